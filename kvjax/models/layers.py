"""The layers of a decoder, for all families. `ModelConfig` has flags for their differences.

Stored weights are split over `fsdp` and `tensor`; each layer gathers its weights over `fsdp` just before it uses them.
Activations are split over the batch, and by tokens over `sequence`. Attention sees whole sequences for the kv heads of
its device: queries, keys and values are exchanged before it, and its outputs after it. If `sequence` does not divide
the tokens (a single token, for example), it splits heads together with `tensor`. `replica` splits the MLP and, in
attention for many tokens, the query heads of a kv head. Products accumulate in float32.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jax.sharding import reshard
from jaxtyping import Array, Float, Shaped

from kvjax.mesh import BATCH, HEADS, WIDTH, P, axis_size, names_in
from kvjax.models import experts
from kvjax.models.config import ACTIVATIONS, ModelConfig
from kvjax.models.layout import SCALE, flat_shape, fuse, parts_of, scale_count, unfuse
from kvjax.models.matrix import Index, Matrix, product
from kvjax.models.rope import CosSin, rotate
from pallas_kernels.eight_bits import EIGHT_BITS, LARGEST
from pallas_kernels.vertical_slash import vertical_slash

ROWS = P(BATCH, None, None)
SPLIT = P(BATCH, HEADS, None, None)
EXPERTS = (*WIDTH, "fsdp")
"""The axes that split the experts of a layer in storage."""


class RMSNorm(nnx.Module):
    """x / rms(x) · (scale + offset) over the last axis, in float32."""

    def __init__(self, size: int, config: ModelConfig, dtype: Any, layers: tuple[int, ...] = ()):
        self.eps, self.offset = config.norm_eps, config.norm_offset
        self.scale = nnx.Param(jnp.ones((*layers, size), dtype, out_sharding=P(*[None] * len(layers), None)))

    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + self.eps)
        scale = self.scale[...].astype(jnp.float32)
        return (y * (scale + self.offset if self.offset else scale)).astype(x.dtype)


AxisNames = tuple[str, ...]


def token_and_head_axes(x: Float[Array, "b t d"]) -> tuple[str | None, AxisNames]:
    """Return the mesh axis that splits the tokens of activations (or None), and the axes that split heads."""
    axis = jax.typeof(x).sharding.spec[1]
    return axis, HEADS if axis is None else ("tensor",)


def mlp_axes(head_axes: AxisNames) -> AxisNames:
    """Return the mesh axes that split the MLP's width, experts and the vocabulary, given those that split heads."""
    return (*head_axes, "replica")


def read_sharding(stored: nnx.Param, head_axes: AxisNames) -> P:
    """Return the sharding in which a stored array is read. It is gathered over `fsdp`. Axes stored over `tensor` are
    split over `head_axes`, and axes stored over `WIDTH` over `mlp_axes(head_axes)`."""

    def read_axes(stored_axes):
        names = names_in(stored_axes)
        if "tensor" not in names:
            return None
        return mlp_axes(head_axes) if "replica" in names else head_axes

    return P(*map(read_axes, jax.typeof(stored[...]).sharding.spec.partitions))


def gathered(stored: nnx.Param, head_axes: AxisNames) -> Array:
    """Return a stored array in its `read_sharding`."""
    return reshard(stored[...], read_sharding(stored, head_axes))


def by_replica(
    attend: Callable[..., tuple[Array, Array]], *queries: Float[Array, "b n t h"], heads: int
) -> tuple[Float[Array, "b n t h"], Float[Array, "b n t"]]:
    """Return the outputs and log-sum-exps of `attend(*queries)`, inside `shard_map`. The devices along `replica` hold
    the same `heads` kv heads. Each computes an equal share of the query heads of every kv head, if these divide
    evenly."""
    shares, group = axis_size("replica"), queries[0].shape[1] // heads
    if shares == 1 or group % shares:
        return attend(*queries)
    index = jax.lax.axis_index("replica")

    def share_of(q):
        return rearrange(q, "b (k r g) t h -> r b (k g) t h", k=heads, r=shares)[index]

    def gather_shares(x):
        # other devices add zeros, so that the sum is the same on all
        all_shares = jax.lax.psum(jnp.zeros((shares, *x.shape), x.dtype).at[index].set(x), "replica")
        return rearrange(all_shares, "r b (k g) ... -> b (k r g) ...", k=heads)

    o, lse = attend(*map(share_of, queries))
    return gather_shares(o), gather_shares(lse)


def attention_on_replicas(
    q: Float[Array, "b n t h"], k: Float[Array, "b k s h"], *more: Any, **options: Any
) -> tuple[Float[Array, "b n t h"], Float[Array, "b n t"]]:
    """Return the result of `vertical_slash`, computed as in `by_replica`."""
    return by_replica(lambda q: vertical_slash(q, k, *more, **options), q, heads=k.shape[1])


def random_in_eight_bits(x: Float[Array, "*s"], kind: Any) -> tuple[Shaped[Array, "*s"], float]:
    """Return normal numbers of standard deviation 0.02 in 8 bits, and their common scale."""
    largest = LARGEST[jnp.dtype(kind)]
    scale = 4 * 0.02 / largest
    return jnp.clip(x.astype(jnp.float32) / scale, -largest, largest).astype(kind), scale


class DecoderLayer(nnx.Module):
    """Attention and MLP of all layers, stacked: each array has a leading layer axis, over which `lax.scan` runs.

    Matrices are [inputs, outputs]. Some are several matrices fused into one (`kvjax.models.layout`).
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, dtype: Any = jnp.float32):
        layers, init = (config.num_layers,), jax.nn.initializers.normal(0.02)

        def weight(path, *spec):
            parts = {
                part: init(
                    rngs.params(), layers + flat_shape(part, config), dtype, out_sharding=P(None, *spec)
                )
                for part in parts_of(path)
            }
            return nnx.Param(fuse(path, parts, config))

        def matrix(path, *spec):
            floats = weight(path, *spec)
            if config.weights is None:
                return floats, None
            values, step = random_in_eight_bits(floats[...], EIGHT_BITS[config.weights])
            count = scale_count(parts_of(path)[0], config)
            spec = P(None, spec[0] if count > 1 else None, spec[1])
            scale = jnp.full((*layers, count, values.shape[-1]), step, jnp.float32, out_sharding=spec)
            return nnx.Param(values), nnx.Param(scale)

        def bias(path, axis):
            size = sum(flat_shape(part, config)[0] for part in parts_of(path))
            return nnx.Param(jnp.zeros((*layers, size), dtype, out_sharding=P(None, axis)))

        def norm(size):
            return RMSNorm(size, config, dtype, layers)

        self.config = config
        self.attention_norm = norm(config.width)
        self.qkv, self.qkv_scale = matrix("qkv", "fsdp", "tensor")
        self.qkv_bias = bias("qkv_bias", "tensor") if config.attention_bias else None
        self.q_norm = norm(config.head_dim) if config.qk_norm else None
        self.k_norm = norm(config.head_dim) if config.qk_norm else None
        self.o, self.o_scale = matrix("o", "tensor", "fsdp")
        self.o_bias = bias("o_bias", None) if config.attention_out_bias else None
        self.sinks = bias("sinks", "tensor") if config.attention_sinks else None
        self.attention_post_norm = norm(config.width) if config.post_norms else None
        self.mlp_norm = norm(config.width)
        if config.num_experts:
            # each device has whole experts; fsdp comes after tensor, so that what a device gathers is contiguous
            self.router = weight("router", "fsdp", None)
            self.gate_up, self.gate_up_scale = matrix("gate_up", EXPERTS, None)
            self.down, self.down_scale = matrix("down", EXPERTS, None)
            self.router_bias = bias("router_bias", None) if config.expert_bias else None
            self.gate_up_bias = weight("gate_up_bias", EXPERTS, None) if config.expert_bias else None
            self.down_bias = weight("down_bias", EXPERTS, None) if config.expert_bias else None
        else:
            self.router = self.router_bias = None
            self.gate_up, self.gate_up_scale = matrix("gate_up", "fsdp", WIDTH)
            self.down, self.down_scale = matrix("down", WIDTH, "fsdp")
            self.gate_up_bias = bias("gate_up_bias", WIDTH) if config.mlp_bias else None
            self.down_bias = bias("down_bias", None) if config.mlp_bias else None
        self.mlp_post_norm = norm(config.width) if config.post_norms else None

    def _matrix(self, name: str, head_axes: AxisNames) -> tuple[Matrix, P]:
        """Return a matrix as it is stored, with its gathered scales and biases, and the sharding in which it is
        read."""
        params = (getattr(self, name + suffix, None) for suffix in (SCALE, "_bias"))
        scale, bias = (None if param is None else gathered(param, head_axes) for param in params)
        stored = getattr(self, name)
        return Matrix(stored[...], scale, bias), read_sharding(stored, head_axes)

    def project(
        self, x: Float[Array, "b t d"], angles: CosSin, index: Index = None
    ) -> dict[str, Float[Array, "b ..."]]:
        """Return the fields of `Step` that are computed from the layer's input. The module holds one layer's arrays,
        not the stack; with `index` its matrices are the stack's."""
        hidden, (axis, head_axes) = self.attention_norm(x), token_and_head_axes(x)
        y = product(hidden, *self._matrix("qkv", head_axes), P(BATCH, axis, head_axes), index).astype(x.dtype)

        def heads(y, norm=None):
            y = rearrange(y, "b t (n h) -> b n t h", h=self.config.head_dim)
            return reshard(y if norm is None else norm(y), SPLIT)

        q, k, v = unfuse("qkv", y, self.config).values()
        q_pre, k_pre = heads(q, self.q_norm), heads(k, self.k_norm)
        if (scale := self.config.query_factor) != 1:
            q_pre = (q_pre.astype(jnp.float32) * scale).astype(x.dtype)
        rotated = {"q": rotate(q_pre, angles), "k": rotate(k_pre, angles)}
        # hidden states are gathered over tokens; XLA drops the gather unless a method uses them
        fields = {"hidden": reshard(hidden, ROWS), "q_pre": q_pre, "k_pre": k_pre, "v": heads(v)} | rotated
        return fields if self.sinks is None else fields | {"sink": reshard(self.sinks[...], P(HEADS))}

    def output(
        self, x: Float[Array, "b t d"], o: Float[Array, "b n t h"], index: Index = None
    ) -> Float[Array, "b t d"]:
        """Return the output projection, which is added to the residual stream `x`."""
        axis, head_axes = token_and_head_axes(x)
        o = rearrange(reshard(o, P(BATCH, head_axes, axis, None)), "b n t h -> b t (n h)")
        return product(o, *self._matrix("o", head_axes), P(BATCH, axis, None), index).astype(o.dtype)

    def mlp(self, x: Float[Array, "b t d"], index: Index = None) -> Float[Array, "b t d"]:
        """Return down(activation(gate(x)) · up(x)), or the weighted sum of the experts' outputs."""
        if self.router is not None:
            return self._experts(x, index)
        axis, head_axes = token_and_head_axes(x)
        y = product(x, *self._matrix("gate_up", head_axes), P(BATCH, axis, mlp_axes(head_axes)), index)
        gate, up = unfuse("gate_up", y, self.config).values()
        inner = (ACTIVATIONS[self.config.activation](gate) * up).astype(x.dtype)
        return product(inner, *self._matrix("down", head_axes), P(BATCH, axis, None), index).astype(x.dtype)

    def _experts(self, x: Float[Array, "b t d"], index: Index) -> Float[Array, "b t d"]:
        """Return the weighted sum of the experts that the router chooses for each token. Each device runs its own
        experts."""
        (axis, head_axes), config = token_and_head_axes(x), self.config
        logits = product(x, *self._matrix("router", head_axes), P(BATCH, axis, None), index).astype(x.dtype)
        weight, chosen = jax.lax.top_k(jax.nn.softmax(logits.astype(jnp.float32)), config.experts_per_token)
        if config.norm_expert_weights:
            weight = weight / weight.sum(-1, keepdims=True)
        weight = weight.astype(x.dtype)

        def activate(y):
            gate, up = unfuse("gate_up", y, config).values()
            if config.swiglu is None:
                return (ACTIVATIONS[config.activation](gate) * up).astype(x.dtype)
            slope, limit = config.swiglu
            gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
            return ((up + 1) * gate * jax.nn.sigmoid(slope * gate)).astype(x.dtype)

        def local(x, weight, chosen, gate_up, down, index):
            first = jax.lax.axis_index(mlp_axes(head_axes)) * (gate_up.weight.shape[-2] // config.width)
            y = experts.mix_experts(x, weight, chosen - first, gate_up, down, activate, index)
            return jax.lax.psum(y, mlp_axes(head_axes)).astype(x.dtype)

        def matrix(name):
            stored, sharding = self._matrix(name, head_axes)
            return stored._replace(weight=reshard(stored.weight, sharding))

        matrices = matrix("gate_up"), matrix("down")
        return jax.shard_map(local, out_specs=P(BATCH, axis, None))(x, weight, chosen, *matrices, index)

    def finish(
        self, x: Float[Array, "b t d"], o: Float[Array, "b n t h"], index: Index = None
    ) -> Float[Array, "b t d"]:
        """Return the layer's output from its input and its heads' attention outputs."""
        attended = self.output(x, o, index)
        x = x + (attended if self.attention_post_norm is None else self.attention_post_norm(attended))
        hidden = self.mlp(self.mlp_norm(x), index)
        return x + (hidden if self.mlp_post_norm is None else self.mlp_post_norm(hidden))
