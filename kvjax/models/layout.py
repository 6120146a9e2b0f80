"""The layout of a model's own arrays in those of the decoder.

Products of the same input are one product: q, k and v by group of KV heads, with a group's queries, key and value side
by side; gate and up in alternating blocks of columns. A mesh that splits KV heads splits these arrays without moving a
column, so one layout serves every mesh. Files, exports and fingerprints know only the model's own arrays.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import reshard
from jaxtyping import Array, Int, Shaped

from kvjax.mesh import P
from kvjax.models.config import ModelConfig

FUSED = {
    "qkv": ("q", "k", "v"),
    "qkv_bias": ("q_bias", "k_bias", "v_bias"),
    "qkv_scale": ("q_scale", "k_scale", "v_scale"),
    "gate_up": ("gate", "up"),
    "gate_up_scale": ("gate_scale", "up_scale"),
    "gate_up_bias": ("gate_bias", "up_bias"),
}
"""Arrays of a decoder's layers that hold several of the model's own."""
GROUPED = {"qkv": -1, "qkv_bias": -1, "qkv_scale": -1, "o": -2, "o_scale": -2, "sinks": -1}
"""The axis along which arrays of a decoder's layers have the groups of KV heads one after another."""
SCALE = "_scale"
"""The end of the names of the scales of matrices in 8 bits."""
EXPERTS_OWN = "gate", "up", "down"
"""The matrices that each expert has."""
BLOCK = 128
"""The most columns of gate, or of up, that follow one another: as many as a TPU has lanes."""
DEVICES = 8
"""Devices that can split the MLP of a model with fewer KV heads, if they divide its width: a TPU's or GPU's host."""


def parts_of(path: str) -> tuple[str, ...]:
    """Return the names of the model's own arrays in one of a decoder's layers."""
    return FUSED.get(path, (path,))


def own_shape(part: str, config: ModelConfig) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the inputs' and the outputs' axes of one of a layer's own arrays; a vector has no inputs. Of scales the
    inputs are the blocks of a matrix's inputs."""
    if part.endswith(SCALE):
        part = part.removesuffix(SCALE)
        return (scales_of(part, config),), own_shape(part, config)[1]
    d, f, h = (config.width,), (config.mlp_width,), config.head_dim
    query, key = (config.num_heads, h), (config.num_kv_heads, h)
    # experts are further inputs
    experts = (config.num_experts,) if config.num_experts else ()
    shapes = {
        "q": (d, query),
        "k": (d, key),
        "v": (d, key),
        "o": (query, d),
        "gate": (experts + d, f),
        "up": (experts + d, f),
        "down": (experts + f, d),
        "router": (d, experts),
        "q_bias": ((), (config.num_heads, 1, h)),
        "k_bias": ((), (config.num_kv_heads, 1, h)),
        "v_bias": ((), (config.num_kv_heads, 1, h)),
        "gate_bias": (experts, f),
        "up_bias": (experts, f),
        "down_bias": (experts, d),
        "router_bias": ((), experts),
        "sinks": ((), (config.num_heads,)),
        "q_norm.scale": ((), (h,)),
        "k_norm.scale": ((), (h,)),
    }
    return shapes.get(part, ((), d))


def scales_of(part: str, config: ModelConfig) -> int:
    """Return the number of scales of an output of one of a layer's own matrices in 8 bits: one, or one for each block
    of inputs. An expert has scales of its own."""
    inputs = flat_shape(part, config)[0]
    experts = config.num_experts if part in EXPERTS_OWN else 0
    return inputs // (config.weight_block or inputs // max(experts, 1))


def flat_shape(part: str, config: ModelConfig) -> tuple[int, ...]:
    """Return (inputs, outputs) of one of a layer's own arrays, or (outputs,) of a vector."""
    return tuple(math.prod(axes) for axes in own_shape(part, config) if axes)


def fuse(
    path: str, parts: Mapping[str, Shaped[Array, "... _"]], config: ModelConfig
) -> Shaped[Array, "... columns"]:
    """Return one of a decoder's arrays from the model's own ones, whose last axis is their outputs."""
    if path not in FUSED:
        return parts[path]
    groups = _groups(path, config)
    x = jnp.concatenate([_grouped(parts[part], groups) for part in FUSED[path]], -1)
    return x.reshape(*x.shape[:-2], -1)


def unfuse(path: str, x: Any, config: ModelConfig) -> dict[str, Any]:
    """Return the model's own arrays [... outputs] in one of a decoder's [... columns], in NumPy or JAX: the inverse of
    `fuse`. Applied to a product with the decoder's array, it returns the products with each of the own arrays."""
    if path not in FUSED:
        return {path: x}
    groups, found, start = _groups(path, config), {}, 0
    x = _grouped(x, groups)
    for part in FUSED[path]:
        stop = start + flat_shape(part, config)[-1] // groups
        found[part] = x[..., start:stop].reshape(*x.shape[:-2], -1)
        start = stop
    return found


def _grouped(x: Any, groups: int) -> Any:
    return x.reshape(*x.shape[:-1], groups, -1)


def _groups(path: str, config: ModelConfig) -> int:
    """Return the number of times that the parts of an array take turns."""
    if path.startswith("qkv"):
        return config.num_kv_heads
    return mlp_blocks(config)


def mlp_blocks(config: ModelConfig) -> int:
    """Return the number of blocks of columns in which gate and up take turns. A mesh that splits KV heads, or has up to
    `DEVICES`, leaves each device whole blocks."""
    parts = math.gcd(config.mlp_width, math.lcm(config.num_kv_heads, DEVICES))
    return config.mlp_width // math.gcd(BLOCK, config.mlp_width // parts)


@dataclass(frozen=True)
class OwnArray:
    """One of a model's own arrays, with its layers' axis if it has one."""

    stored: Any
    """The decoder's array that holds it."""
    config: ModelConfig
    path: str = ""
    """The stored array's name in a layer; empty if it is no layer's, and is the own array itself."""
    part: str = ""
    """The own array's name in the layer."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its own axes: inputs first, heads apart."""
        if not self.part:
            return self.stored.shape
        return self.stored.shape[0], *itertools.chain(*own_shape(self.part, self.config))

    @property
    def value(self) -> Array:
        """The own array itself."""
        stored = self.stored
        if self.part and self.config.head_order is not None:
            stored = reordered(self.path, stored, self.config, self.config.place_of_head)
        return unfuse(self.path, stored, self.config).get(self.part, stored).reshape(self.shape)

    def places(self, points: Int[np.ndarray, "axes p"]) -> Int[np.ndarray, "stored_axes p"]:
        """Return the places of its points in the decoder's array."""
        if not self.part:
            return points
        columns = unfuse(self.path, np.arange(self.stored.shape[-1]), self.config)[self.part]
        row, output = np.divmod(np.ravel_multi_index(tuple(points[1:]), self.shape[1:]), len(columns))
        place = [points[0], row, columns[output]]
        place = place if self.stored.ndim == 3 else place[::2]
        if self.config.head_order is not None and (axis := group_axis(self.path, self.stored, self.config)):
            size = self.stored.shape[axis] // self.config.num_kv_heads
            group, rest = np.divmod(place[axis], size)
            place[axis] = every_layer(self.config, self.config.place_of_head)[points[0], group] * size + rest
        return np.stack(place)


def group_axis(path: str, x: Any, config: ModelConfig) -> int | None:
    """Return the axis of one of a decoder's arrays along which the groups of KV heads lie; None: there is none."""
    axis = GROUPED.get(path)
    if axis is None or x.shape[axis] == 1:  # the scales of matrices with one for all inputs
        return None
    assert x.shape[axis] % config.num_kv_heads == 0, (
        "blocks of weights that groups of heads share are not placed"
    )
    return axis


def every_layer(config: ModelConfig, order: Int[np.ndarray, "l k"]) -> Int[np.ndarray, "layers k"]:
    """Return an order of KV heads for all layers, those with sliding windows included, whose heads have their own."""
    found = np.tile(np.arange(config.num_kv_heads, dtype=np.int32), (config.num_layers, 1))
    found[list(config.full_layers)] = order
    return found


def reordered(
    path: str,
    x: Shaped[Array, "layers ..."],
    config: ModelConfig,
    order: Int[np.ndarray, "l k"],
    *,
    consume: bool = False,
) -> Shaped[Array, "layers ..."]:
    """Return one of a decoder's arrays with the groups of KV heads in another order: at each place the one that is now
    at `order`. consume: take over the array's memory."""
    if (axis := group_axis(path, x, config)) is None:
        return x
    call = _consumed if consume else _reordered
    return call(x, jnp.asarray(every_layer(config, order)), axis)


def _layer_by_layer(
    x: Shaped[Array, "layers ..."], order: Int[Array, "layers k"], axis: int
) -> Shaped[Array, "layers ..."]:
    spec = P(*jax.typeof(x).sharding.spec.partitions[1:])

    def one(_, xs):
        # a device has the whole of one layer's array at a time
        layer, order = xs
        groups = jnp.moveaxis(reshard(layer, P()), axis, 0)
        taken = groups.reshape(order.size, -1, *groups.shape[1:])[order].reshape(groups.shape)
        return None, reshard(jnp.moveaxis(taken, 0, axis), spec)

    return jax.lax.scan(one, None, (x, order))[1]


_reordered = jax.jit(_layer_by_layer, static_argnums=2)
_consumed = jax.jit(_layer_by_layer, static_argnums=2, donate_argnums=0)
