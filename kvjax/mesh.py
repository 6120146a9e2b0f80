"""The device mesh: five explicit axes, and a mesh of one device if none is set.

`data` and `fsdp` split the batch; `fsdp` also splits stored weights. `tensor` splits heads. `sequence` splits tokens in
operations on single tokens and, together with `tensor`, the kv heads of attention, of methods and of the cache.
`replica` is for more devices than a model has kv heads: together with `tensor` it splits the MLP, experts and the
vocabulary, and it splits the query heads of attention for many tokens. All its devices have the same methods and cache.
Every mesh has all five axes, so a `PartitionSpec` next to a parameter is valid on every mesh.
"""

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from kvjax.errors import UserError, named_arguments, shown, whole_number

AXES = ("data", "fsdp", "tensor", "sequence", "replica")
BATCH = ("data", "fsdp")
"""The axes that split a batch; `P(BATCH)` is the sharding of every batch axis."""
HEADS = ("tensor", "sequence")
"""The axes that split kv heads, and query heads with them."""
SHARDS = (*BATCH, *HEADS)
"""The axes that split the page pool: one pool for each (batch, kv head) shard."""
WIDTH = ("tensor", "replica")
"""The axes that split the MLP's width and the vocabulary in storage."""


@named_arguments()
def make_mesh(
    data: int = 1,
    fsdp: int = 1,
    tensor: int = 1,
    sequence: int = 1,
    replica: int = 1,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """Return a mesh of `data · fsdp · tensor · sequence · replica` devices, by default the first of `jax.devices()`.
    With several slices of TPUs or hosts of GPUs, the first possible axes (`data`, then `fsdp`) are split over the
    network between them.

    Raises UserError if there are too few devices, or if the mesh does not fill the slices evenly.
    """
    arguments = zip(AXES, (data, fsdp, tensor, sequence, replica), strict=True)
    sizes = {axis: whole_number("make_mesh", axis, size) for axis, size in arguments}
    count = math.prod(sizes.values())
    label = ", ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "a mesh of one"
    devices = jax.devices() if devices is None else devices
    if not isinstance(devices, Sequence | np.ndarray) or not all(hasattr(x, "device_kind") for x in devices):
        raise UserError(f"make_mesh: devices must be a list of jax.devices(), got {shown(devices)}")
    if len(devices) < count:
        advice = ""
        if devices and devices[0].platform == "cpu":
            advice = f"; before anything runs, jax.config.update('jax_num_cpu_devices', {count}) makes virtual ones"
        raise UserError(f"make_mesh: {label} takes {count} devices, there are {len(devices)}{advice}")
    kinds = (AxisType.Explicit,) * len(AXES)
    devices = devices[:count]
    slices = len({getattr(device, "slice_index", None) for device in devices})
    if slices == 1:
        return jax.make_mesh(tuple(sizes.values()), AXES, axis_types=kinds, devices=devices)
    between, remaining = [], slices
    for size in sizes.values():
        between.append(math.gcd(size, remaining))
        remaining //= between[-1]
    within = [size // part for size, part in zip(sizes.values(), between, strict=True)]
    try:
        grid = mesh_utils.create_hybrid_device_mesh(within, between, devices, allow_split_physical_axes=True)
    except ValueError:
        raise UserError(f"make_mesh: {label} does not fill {slices} slices of devices evenly") from None
    return Mesh(grid, AXES, axis_types=kinds)


def mesh_of(tree: Any) -> Mesh | None:
    """Return the mesh of the arrays of `tree`; None if they are not on a mesh with these axes."""
    for leaf in jax.tree.leaves(tree):
        sharding = getattr(leaf, "sharding", None)
        mesh = getattr(sharding, "mesh", None)
        if isinstance(mesh, Mesh) and mesh.axis_names == AXES:
            return mesh
    return None


def use_mesh(tree: Any = None) -> contextlib.AbstractContextManager:
    """Return a context with a mesh: the current one, or else the mesh of `tree`'s arrays, or else one device."""
    if not jax.sharding.get_abstract_mesh().empty:
        return contextlib.nullcontext()
    return jax.set_mesh(mesh_of(tree) or make_mesh())


def put(x: Any, *spec: Any) -> jax.Array:
    """Return `x` on the current mesh, split as in `spec`. With several processes, each must have all of `x`."""
    if jax.process_count() == 1 or (isinstance(x, jax.Array) and not x.is_fully_addressable):
        return jax.device_put(x, P(*spec))
    # device_put would make all processes compare their values
    array, sharding = np.asarray(x), NamedSharding(jax.sharding.get_mesh(), P(*spec))
    return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)


def specs_of(tree: Any) -> Any:
    """Return how each array of `tree` is split over the mesh, in the tree's form. May be called while tracing."""
    return jax.tree.map(lambda leaf: jax.typeof(leaf).sharding.spec, tree)


def adopt(tree: Any) -> Any:
    """Return `tree` with its arrays moved to the current mesh, each split along the same axes as before."""

    def move(leaf):
        return put(leaf, *getattr(getattr(leaf, "sharding", None), "spec", P()))

    return jax.tree.map(move, tree)


def gather(tree: Any, *axes: str) -> Any:
    """Return `tree` with its arrays no longer split along the named mesh axes (an all-gather; its transpose
    scatters)."""

    def other_axes(names):
        return tuple(name for name in names_in(names) if name not in axes) or None

    def gather_leaf(leaf):
        return jax.sharding.reshard(leaf, P(*map(other_axes, jax.typeof(leaf).sharding.spec)))

    return jax.tree.map(gather_leaf, tree)


def on_host(x: Any) -> np.ndarray:
    """Return a whole array as a numpy array. Parts on other processes are gathered, so call it in every process."""
    if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
        with use_mesh(x):
            x = _replicated(x)
    return np.asarray(x)


@jax.jit
def _replicated(x: jax.Array) -> jax.Array:
    return jax.sharding.reshard(x, P())


def on_cpu() -> bool:
    """Return True if the current mesh has CPU devices."""
    return jax.sharding.get_mesh().devices.flat[0].platform == "cpu"


def names_in(*axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the names of mesh axes in the entries of a `PartitionSpec`."""
    return tuple(name for axis in axes if axis for name in ((axis,) if isinstance(axis, str) else axis))


def axis_size(*names: str) -> int:
    """Return the product of the sizes of the named axes of the current mesh."""
    shape = jax.sharding.get_abstract_mesh().shape
    return math.prod(shape[name] for name in names)


def batch_shards() -> int:
    """Return the number of parts that the current mesh splits a batch into."""
    return axis_size(*BATCH)


def token_shards(tokens: int) -> int:
    """Return the number of parts that the current mesh splits the tokens of a sequence into; 1 if it does not divide
    them."""
    size = axis_size("sequence")
    return 1 if tokens % size else size


def token_axis(tokens: int) -> str | None:
    """Return the axis that splits this number of tokens; None if every device has all of them."""
    return "sequence" if token_shards(tokens) > 1 else None


__all__ = [
    "AXES",
    "BATCH",
    "HEADS",
    "SHARDS",
    "WIDTH",
    "P",
    "adopt",
    "axis_size",
    "batch_shards",
    "gather",
    "make_mesh",
    "mesh_of",
    "names_in",
    "on_cpu",
    "on_host",
    "put",
    "token_axis",
    "token_shards",
    "use_mesh",
]
