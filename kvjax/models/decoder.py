"""One decoder for all families: differences are flags of `ModelConfig`, layers are stacked and scanned.

Stored weights are split over `fsdp` and `tensor`; a layer gathers its own over `fsdp` just before it uses them.
Activations are split over the batch, and by tokens over `sequence`. Attention sees whole sequences, for the kv heads of
its device: queries, keys and values are exchanged before it, and its outputs after it. Where tokens cannot be split,
such as a single one, `sequence` splits what `tensor` does. Products accumulate in float32.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax import nnx
from jax.sharding import reshard
from jaxtyping import Array, Float, Float32, Int

from kvjax.errors import UserError
from kvjax.mesh import BATCH, HEADS, P, axis_size, batch_shards, token_axis, use_mesh
from kvjax.models.config import ACTIVATIONS, ModelConfig
from kvjax.models.layout import OwnArray, flat_shape, fuse, parts_of, unfuse
from kvjax.models.names import TOP
from kvjax.models.rope import CosSin, cos_sin, rotate
from kvjax.policies.views import Step
from kvjax.struct import leaves_by_path
from pallas_kernels.bits import as_bits, as_floats
from pallas_kernels.choose import target
from pallas_kernels.stack_product import MOST_ROWS, stack_product
from pallas_kernels.supported import DTYPES
from pallas_kernels.vertical_slash import SAVED, vertical_slash

ROWS = P(BATCH, None, None)
SPLIT = P(BATCH, HEADS, None, None)
VOCABULARY_MULTIPLE = 128
"""Vocabularies are padded in storage to a multiple of this, so that one shape serves every usual `tensor` axis."""


def padded_vocabulary(config: ModelConfig) -> int:
    """Return the rows of the stored embedding table on the current mesh."""
    multiple = math.lcm(VOCABULARY_MULTIPLE, axis_size(*HEADS))
    return -(-config.vocab_size // multiple) * multiple


def check_mesh(config: ModelConfig) -> None:
    """Raise UserError if an axis of the current mesh does not divide a size of the model that it splits."""
    heads = "tensor axis" if axis_size("sequence") == 1 else "tensor × sequence"
    for name, size, said, axes in (
        ("kv heads", config.num_kv_heads, heads, HEADS),
        ("mlp width", config.mlp_width, heads, HEADS),
        ("width", config.width, "fsdp axis", ("fsdp",)),
    ):
        if size % axis_size(*axes):
            raise UserError(
                f"the mesh's {said} has size {axis_size(*axes)}, which does not divide the model's {name} ({size})"
            )


class RMSNorm(nnx.Module):
    """x / rms(x) · scale over the last axis, in float32."""

    def __init__(self, size: int, eps: float, dtype: Any, layers: tuple[int, ...] = ()):
        self.eps = eps
        self.scale = nnx.Param(jnp.ones((*layers, size), dtype, out_sharding=P(*[None] * len(layers), None)))

    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + self.eps)
        return (y * self.scale[...].astype(jnp.float32)).astype(x.dtype)


Wide = str | tuple[str, ...]


def _axes(x: Float[Array, "b t d"]) -> tuple[str | None, Wide]:
    """Return the axis that splits the tokens of activations, and the axes that then split heads, the MLP's width and
    the vocabulary."""
    axis = jax.typeof(x).sharding.spec[1]
    return axis, HEADS if axis is None else "tensor"


def _gathered(stored: nnx.Param, wide: Wide) -> Array:
    """Return a stored array whole over `fsdp`, and split over `wide` where it is stored split over `tensor`."""
    spec = jax.typeof(stored[...]).sharding.spec
    return reshard(stored[...], P(*(wide if axis == "tensor" else None for axis in spec)))


Index = Int[Array, ""] | None
"""The index of a layer whose matrices are given as the stack of all layers'; None if they are given alone."""


def _product(
    x: Float[Array, "b t d"], weight: nnx.Param, bias: nnx.Param | None, spec: P, wide: Wide, index: Index
) -> Float32[Array, "b t f"]:
    """Return x · weight (+ bias)."""
    weights = _gathered(weight, wide)
    if index is None:
        y = jnp.einsum("btd,df->btf", x, weights, preferred_element_type=jnp.float32, out_sharding=spec)
    else:
        y = _product_in_place(x, weights, index, spec)
    return y if bias is None else y + _gathered(bias, wide)


def _product_in_place(x, stack, index, spec: P) -> Float32[Array, "b t f"]:
    """Return x · stack[index], summed over the devices that share the inputs."""
    inputs = jax.typeof(stack).sharding.spec[1]

    def local(x, stack, index):
        y = stack_product(x.reshape(-1, x.shape[-1]), stack, index).reshape(*x.shape[:2], -1)
        return y if inputs is None else jax.lax.psum(y, inputs)

    return jax.shard_map(local, out_specs=spec)(x, stack, index)


class DecoderLayer(nnx.Module):
    """Attention and mlp of every layer, stacked: each array has a leading layer axis, which `lax.scan` takes off.

    Matrices are [inputs, outputs], some of several products together (`kvjax.models.layout`).
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

        def bias(path, axis):
            size = sum(flat_shape(part, config)[0] for part in parts_of(path))
            return nnx.Param(jnp.zeros((*layers, size), dtype, out_sharding=P(None, axis)))

        def norm(size):
            return RMSNorm(size, config.norm_eps, dtype, layers)

        self.config = config
        self.attention_norm = norm(config.width)
        self.qkv = weight("qkv", "fsdp", "tensor")
        self.qkv_bias = bias("qkv_bias", "tensor") if config.attention_bias else None
        self.q_norm = norm(config.head_dim) if config.qk_norm else None
        self.k_norm = norm(config.head_dim) if config.qk_norm else None
        self.o = weight("o", "tensor", "fsdp")
        self.o_bias = bias("o_bias", None) if config.attention_out_bias else None
        self.mlp_norm = norm(config.width)
        self.gate_up = weight("gate_up", "fsdp", "tensor")
        self.down = weight("down", "tensor", "fsdp")
        self.gate_up_bias = bias("gate_up_bias", "tensor") if config.mlp_bias else None
        self.down_bias = bias("down_bias", None) if config.mlp_bias else None

    def project(
        self, x: Float[Array, "b t d"], angles: CosSin, index: Index = None
    ) -> dict[str, Float[Array, "b ..."]]:
        """Return the fields of `Step` that are computed from the layer's input. The module holds one layer's arrays,
        not the stack; with `index` its matrices are the stack's."""
        hidden, (axis, wide) = self.attention_norm(x), _axes(x)
        y = _product(hidden, self.qkv, self.qkv_bias, P(BATCH, axis, wide), wide, index).astype(x.dtype)

        def heads(y, norm=None):
            y = rearrange(y, "b t (n h) -> b n t h", h=self.config.head_dim)
            return reshard(y if norm is None else norm(y), SPLIT)

        q, k, v = unfuse("qkv", y, self.config).values()
        q_pre, k_pre = heads(q, self.q_norm), heads(k, self.k_norm)
        rotated = {"q": rotate(q_pre, angles), "k": rotate(k_pre, angles)}
        # not split by tokens, which costs nothing unless a method looks at it
        return {"hidden": reshard(hidden, ROWS), "q_pre": q_pre, "k_pre": k_pre, "v": heads(v)} | rotated

    def output(
        self, x: Float[Array, "b t d"], o: Float[Array, "b n t h"], index: Index = None
    ) -> Float[Array, "b t d"]:
        """Return the output projection, which is added to the residual stream `x`."""
        axis, wide = _axes(x)
        o = rearrange(reshard(o, P(BATCH, wide, axis, None)), "b n t h -> b t (n h)")
        return _product(o, self.o, self.o_bias, P(BATCH, axis, None), wide, index).astype(o.dtype)

    def mlp(self, x: Float[Array, "b t d"], index: Index = None) -> Float[Array, "b t d"]:
        """Return down(activation(gate(x)) · up(x))."""
        axis, wide = _axes(x)
        y = _product(x, self.gate_up, self.gate_up_bias, P(BATCH, axis, wide), wide, index)
        gate, up = unfuse("gate_up", y, self.config).values()
        inner = (ACTIVATIONS[self.config.activation](gate) * up).astype(x.dtype)
        return _product(inner, self.down, self.down_bias, P(BATCH, axis, None), wide, index).astype(x.dtype)

    def finish(
        self, x: Float[Array, "b t d"], o: Float[Array, "b n t h"], index: Index = None
    ) -> Float[Array, "b t d"]:
        """Return the layer's output from its input and its heads' attention outputs."""
        x = x + self.output(x, o, index)
        return x + self.mlp(self.mlp_norm(x), index)


class Decoder(nnx.Module):
    """A decoder, from token ids to hidden states to logits. It is built on the current mesh (`kvjax.mesh.use_mesh`),
    with random weights.

    embed and head are [vocabulary, d], the vocabulary padded in storage; head is None where it is tied to embed.

    Raises:
        UserError: a mesh axis that does not divide what it splits.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, dtype: Any = jnp.float32):
        with use_mesh():
            check_mesh(config)
            shape = (padded_vocabulary(config), config.width)

            def table():
                init = jax.nn.initializers.normal(0.02)
                return nnx.Param(init(rngs.params(), shape, dtype, out_sharding=P("tensor", "fsdp")))

            self.config = config
            self.embed = table()
            self.layers = DecoderLayer(config, rngs=rngs, dtype=dtype)
            self.norm = RMSNorm(config.width, config.norm_eps, dtype)
            self.head = None if config.tied else table()

    def own_arrays(self) -> dict[str, OwnArray]:
        """Return the model's own arrays as they are in files: queries, keys and values apart, and gate and up."""
        found = {}
        for name, leaf in leaves_by_path(self).items():
            path = name.removeprefix("layers.").removesuffix(".value")
            if path in TOP:
                found[name] = OwnArray(leaf, self.config)
            for part in () if path in TOP else parts_of(path):
                found[f"layers.{part}.value"] = OwnArray(leaf, self.config, path, part)
        return found

    def with_own(self, values: Mapping[str, Array]) -> "Decoder":
        """Return a decoder like this one, which may be shapes alone, with these values of its own arrays."""

        def array(keys, _):
            name = jax.tree_util.keystr(keys, simple=True, separator=".")
            path = name.removeprefix("layers.").removesuffix(".value")
            if path in TOP:
                return values[name]
            own = {part: values[f"layers.{part}.value"] for part in parts_of(path)}
            flat = {part: x.reshape(len(x), *flat_shape(part, self.config)) for part, x in own.items()}
            return fuse(path, flat, self.config)

        return jax.tree_util.tree_map_with_path(array, self)

    def embed_tokens(self, tokens: Int[Array, "b t"]) -> Float[Array, "b t d"]:
        """Return embeddings, split over the batch and, where `sequence` divides them, by tokens. The table stays split;
        the looked-up columns are exchanged instead."""
        if tokens.shape[0] % batch_shards():
            raise UserError(
                f"a batch of {tokens.shape[0]} does not divide over the mesh's data × fsdp = {batch_shards()} shards: "
                "add empty rows"
            )
        axis = token_axis(tokens.shape[1])
        tokens = reshard(tokens, P("data", axis))
        x = self.embed[...].at[tokens].get(out_sharding=P("data", axis, "fsdp"))
        return reshard(x, P(BATCH, axis, None))

    def logits(self, hidden: Float[Array, "b t d"]) -> Float32[Array, "b t v"]:
        """Return the logits of hidden states that have been through the final norm. The vocabulary is whole on every
        device."""
        table, (axis, wide) = self.embed if self.head is None else self.head, _axes(hidden)
        weights, spec = _gathered(table, wide), P(BATCH, axis, wide)
        y = jnp.einsum("btd,vd->btv", hidden, weights, preferred_element_type=jnp.float32, out_sharding=spec)
        return reshard(y, P(BATCH, axis, None))[..., : self.config.vocab_size]

    def hidden(
        self, tokens: Int[Array, "b t"], document: Int[Array, "b t"] | None = None, *, remat: bool = False
    ) -> Float[Array, "b t d"]:
        """Return hidden states after the final norm, under plain causal attention from position 0. `document`: the
        number of each token's document, where several documents follow one another, none of which sees another."""

        def local(q, k, v, document):
            return vertical_slash(q, k, v, window=1, segment_ids=document)[0]

        def attend(step, carry, xs):
            return jax.shard_map(local, out_specs=SPLIT)(step.q, step.k, step.v, document), carry, None

        x = self.embed_tokens(tokens)
        x, _, _ = scan_layers(self, x, places(tokens, document), attend, remat=remat)
        return self.norm(x)


def own_values(tree: Any) -> Any:
    """Return a pytree in which every decoder is a mapping of its own arrays by their names, as exports hold it."""

    def of(x):
        return {name: own.value for name, own in x.own_arrays().items()} if isinstance(x, Decoder) else x

    return jax.tree.map(of, tree, is_leaf=lambda x: isinstance(x, Decoder))


def places(tokens: Int[Array, "b t"], document: Int[Array, "b t"] | None = None) -> Int[Array, "b t"]:
    """Return the position of every token of whole sequences, counted from the beginning of its document."""
    index = reshard(jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape), P(BATCH, None))
    if document is None:
        return index
    first = jnp.pad(document[:, 1:] != document[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return index - jax.lax.cummax(jnp.where(first, index, 0), axis=1)


Attend = Callable[[Step, Any, Any], tuple[Float[Array, "b n t h"], Any, Any]]


def _reads_in_place(x: Float[Array, "b t d"]) -> bool:
    """Return True if products read weights in place, in their stacks: on a GPU, where XLA would otherwise copy each
    layer's."""
    rows = x.shape[0] // batch_shards() * x.shape[1]
    return target().platform == "gpu" and rows <= MOST_ROWS and axis_size("fsdp") == 1 and x.dtype in DTYPES


def layer_body(
    model: Decoder, position: Int[Array, "b t"], attend: Attend, token: Int[Array, "b t"] | None = None
) -> Callable[[tuple[Any, Any], tuple[Any, Any, Any]], tuple[tuple[Any, Any], Any]]:
    """Return one layer as the body of a scan: from (x, carry) and (the layer's weights, its index, its xs) to (x,
    carry) and its ys. Weights that are None are read in the model's stacks. Arguments as in `scan_layers`."""
    heads = reshard(jnp.arange(model.config.num_kv_heads, dtype=jnp.int32), P(HEADS))
    turned = cos_sin(model.config.rope, model.config.head_dim, position)
    no_rope = model.config.no_rope

    def angles(index):
        if not no_rope:
            return turned
        stays = (index == np.array(no_rope)).any()
        return jnp.where(stays, 1.0, turned[0]), jnp.where(stays, 0.0, turned[1])

    def body(carried, inputs):
        x, carry = carried
        layer, index, own = inputs
        layer = jax.tree.map(
            lambda taken, whole: whole if taken is None else as_floats(taken, whole.dtype),
            *(layer, model.layers),
            is_leaf=lambda x: x is None,
        )
        stacked = index if layer.qkv.ndim == 3 else None
        step = Step(
            **layer.project(x, angles(index), stacked),
            position=position,
            layer=index,
            head=heads,
            token=token,
        )
        o, carry, ys = attend(step, carry, own)
        return (layer.finish(x, o, stacked), carry), ys

    return body


def scan_layers(
    model: Decoder,
    x: Float[Array, "b t d"],
    position: Int[Array, "b t"],
    attend: Attend,
    carry: Any = None,
    xs: Any = None,
    *,
    token: Int[Array, "b t"] | None = None,
    remat: bool = False,
    frozen: bool = False,
) -> tuple[Float[Array, "b t d"], Any, Any]:
    """Run `x` through all layers; attention is `attend(step, carry, xs of the layer) -> (o [b n t h], carry, ys)`.

    Args:
        position: true token positions, −1 for padding.
        carry: the value that each layer hands to the next (the page pool).
        xs: the values of each layer, with a leading layer axis (page tables, states, a policy's parameters).
        token: the token ids, for a policy's `Step`.
        remat: recompute each layer in the backward pass instead of storing its activations.
        frozen: the weights need no gradient, and are read with the fewest copies: on a CPU 16-bit ones as integers of
            the same bits (`pallas_kernels.bits`), on a GPU matrices in place in their stacks
            (`pallas_kernels.stack_product`), if tokens are few and no axis `fsdp` splits the weights.

    Returns:
        x before the final norm, the last carry, and every layer's `ys`, stacked.
    """
    body = layer_body(model, position, attend, token)
    # inside a scan nothing can be merged across iterations, so the barrier that prevents it would only cost
    if remat:
        # attention's own outputs are kept: its backward pass starts from them, so it need not run twice forwards
        kept = jax.checkpoint_policies.save_only_these_names(SAVED)
        body = jax.checkpoint(body, prevent_cse=False, policy=kept)
    indices = jnp.arange(model.config.num_layers, dtype=jnp.int32)
    layers = model.layers
    if frozen and target().platform == "cpu":
        layers = jax.tree.map(lambda x: as_bits(x) if x.dtype.itemsize == 2 else x, layers)
    if frozen and _reads_in_place(x):
        layers = jax.tree.map(lambda x: None if x.ndim == 3 else x, layers)
    (x, carry), ys = jax.lax.scan(body, (x, carry), (layers, indices, xs))
    return x, carry, ys
