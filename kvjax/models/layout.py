"""The layout of fused arrays in the decoder.

Matrices that multiply the same input are fused into one. q, k and v are interleaved by group of KV heads: the queries,
key and value of a group are adjacent. gate and up are in alternating blocks of columns. A mesh that splits KV heads
splits these arrays without moving a column, so one layout serves every mesh. Files, exports and fingerprints use the
unfused arrays.
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
"""The unfused arrays in each fused array of a decoder's layers."""
GROUPED = {"qkv": -1, "qkv_bias": -1, "qkv_scale": -1, "o": -2, "o_scale": -2, "sinks": -1}
"""The axis along which arrays of a decoder's layers hold one group of KV heads after another."""
SCALE = "_scale"
"""The suffix of the names of 8-bit matrices' scales."""
EXPERT_MATRICES = "gate", "up", "down"
"""The matrices that each expert has."""
BLOCK = 128
"""The largest number of adjacent columns of gate, or of up: the number of a TPU's lanes."""
DEVICES = 8
"""The number of devices (of a TPU or GPU host) that can split the MLP even if the model has fewer KV heads, provided
that it divides the MLP's width."""


def parts_of(path: str) -> tuple[str, ...]:
    """Return the names of the unfused arrays in an array of the decoder's layers."""
    return FUSED.get(path, (path,))


def unfused_shape(part: str, config: ModelConfig) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the input axes and the output axes of an unfused array of a layer. A vector has no inputs. The inputs of
    scales are blocks of the matrix's inputs."""
    if part.endswith(SCALE):
        part = part.removesuffix(SCALE)
        return (scale_count(part, config),), unfused_shape(part, config)[1]
    d, f, h = (config.width,), (config.mlp_width,), config.head_dim
    query, key = (config.num_heads, h), (config.num_kv_heads, h)
    # experts are stacked along the inputs
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


def scale_count(part: str, config: ModelConfig) -> int:
    """Return the number of scales per output of an unfused 8-bit matrix: one, or one for each block of inputs. Each
    expert has separate scales."""
    inputs = flat_shape(part, config)[0]
    experts = config.num_experts if part in EXPERT_MATRICES else 0
    return inputs // (config.weight_block or inputs // max(experts, 1))


def flat_shape(part: str, config: ModelConfig) -> tuple[int, ...]:
    """Return the shape (inputs, outputs) of an unfused array of a layer, or (outputs,) of a vector."""
    return tuple(math.prod(axes) for axes in unfused_shape(part, config) if axes)


def fuse(
    path: str, parts: Mapping[str, Shaped[Array, "... _"]], config: ModelConfig
) -> Shaped[Array, "... columns"]:
    """Return a fused array, given its unfused arrays, whose last axis is their outputs."""
    if path not in FUSED:
        return parts[path]
    groups = _groups(path, config)
    x = jnp.concatenate([_grouped(parts[part], groups) for part in FUSED[path]], -1)
    return x.reshape(*x.shape[:-2], -1)


def unfuse(path: str, x: Any, config: ModelConfig) -> dict[str, Any]:
    """Return the unfused arrays [... outputs] in a fused array [... columns], in NumPy or JAX: the inverse of `fuse`.
    Applied to a product with the fused array, it returns the products with each of the unfused arrays."""
    if path not in FUSED:
        return {path: x}
    groups, arrays, start = _groups(path, config), {}, 0
    x = _grouped(x, groups)
    for part in FUSED[path]:
        stop = start + flat_shape(part, config)[-1] // groups
        arrays[part] = x[..., start:stop].reshape(*x.shape[:-2], -1)
        start = stop
    return arrays


def _grouped(x: Any, groups: int) -> Any:
    return x.reshape(*x.shape[:-1], groups, -1)


def _groups(path: str, config: ModelConfig) -> int:
    """Return the number of groups of columns in which the parts of a fused array alternate."""
    if path.startswith("qkv"):
        return config.num_kv_heads
    return mlp_blocks(config)


def mlp_blocks(config: ModelConfig) -> int:
    """Return the number of blocks of columns in which gate and up alternate. Each device has whole blocks on meshes
    that split KV heads, and on meshes of up to `DEVICES` devices."""
    parts = math.gcd(config.mlp_width, math.lcm(config.num_kv_heads, DEVICES))
    return config.mlp_width // math.gcd(BLOCK, config.mlp_width // parts)


@dataclass(frozen=True)
class UnfusedArray:
    """An unfused array of a model, with its layer axis if it has one."""

    stored: Any
    """The decoder's array that holds this array."""
    config: ModelConfig
    path: str = ""
    """The name of the stored array in a layer; empty if it is not in a layer, and hence not fused."""
    part: str = ""
    """The name of this array in the layer."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The unfused shape: inputs before outputs, with a separate axis for heads."""
        if not self.part:
            return self.stored.shape
        return self.stored.shape[0], *itertools.chain(*unfused_shape(self.part, self.config))

    @property
    def value(self) -> Array:
        """The values, unfused and in the order of the model's files."""
        stored = self.stored
        if self.part and self.config.head_order is not None:
            stored = reorder_heads(self.path, stored, self.config, self.config.place_of_head)
        return unfuse(self.path, stored, self.config).get(self.part, stored).reshape(self.shape)

    def stored_indices(self, points: Int[np.ndarray, "axes p"]) -> Int[np.ndarray, "stored_axes p"]:
        """Return the indices in the stored array of points that are given by their indices in this array."""
        if not self.part:
            return points
        columns = unfuse(self.path, np.arange(self.stored.shape[-1]), self.config)[self.part]
        row, output = np.divmod(np.ravel_multi_index(tuple(points[1:]), self.shape[1:]), len(columns))
        index = [points[0], row, columns[output]]
        index = index if self.stored.ndim == 3 else index[::2]
        if self.config.head_order is not None and (axis := group_axis(self.path, self.stored, self.config)):
            size = self.stored.shape[axis] // self.config.num_kv_heads
            group, offset = np.divmod(index[axis], size)
            order = order_of_all_layers(self.config, self.config.place_of_head)
            index[axis] = order[points[0], group] * size + offset
        return np.stack(index)


def group_axis(path: str, x: Any, config: ModelConfig) -> int | None:
    """Return the axis of a decoder's array that holds the groups of KV heads; None if there is none."""
    axis = GROUPED.get(path)
    if axis is None or x.shape[axis] == 1:  # one scale for all inputs
        return None
    assert x.shape[axis] % config.num_kv_heads == 0, (
        "blocks of weights that groups of heads share are not placed"
    )
    return axis


def order_of_all_layers(config: ModelConfig, order: Int[np.ndarray, "l k"]) -> Int[np.ndarray, "layers k"]:
    """Extend an order of KV heads to all layers. Sliding-window layers keep their order."""
    extended = np.tile(np.arange(config.num_kv_heads, dtype=np.int32), (config.num_layers, 1))
    extended[list(config.full_layers)] = order
    return extended


def reorder_heads(
    path: str,
    x: Shaped[Array, "layers ..."],
    config: ModelConfig,
    order: Int[np.ndarray, "l k"],
    *,
    consume: bool = False,
) -> Shaped[Array, "layers ..."]:
    """Return a decoder's array with its groups of KV heads permuted: place i gets the group that is now at place
    `order[i]`. consume: reuse the memory of `x`."""
    if (axis := group_axis(path, x, config)) is None:
        return x
    reorder = _reorder_donated if consume else _reorder
    return reorder(x, jnp.asarray(order_of_all_layers(config, order)), axis)


def _layer_by_layer(
    x: Shaped[Array, "layers ..."], order: Int[Array, "layers k"], axis: int
) -> Shaped[Array, "layers ..."]:
    spec = P(*jax.typeof(x).sharding.spec.partitions[1:])

    def reorder_layer(_, xs):
        # gathered layer by layer, so that a device holds no more than one whole layer
        layer, order = xs
        groups = jnp.moveaxis(reshard(layer, P()), axis, 0)
        permuted = groups.reshape(order.size, -1, *groups.shape[1:])[order].reshape(groups.shape)
        return None, reshard(jnp.moveaxis(permuted, 0, axis), spec)

    return jax.lax.scan(reorder_layer, None, (x, order))[1]


_reorder = jax.jit(_layer_by_layer, static_argnums=2)
_reorder_donated = jax.jit(_layer_by_layer, static_argnums=2, donate_argnums=0)
