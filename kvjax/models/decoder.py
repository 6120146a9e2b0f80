"""One decoder for all families, from tokens to logits: its layers are stacked and scanned."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import reshard
from jaxtyping import Array, Float, Float32, Int

from kvjax.errors import UserError
from kvjax.mesh import AXES, BATCH, HEADS, WIDTH, P, axis_size, batch_shards, token_axis, use_mesh
from kvjax.models.config import ModelConfig
from kvjax.models.layers import (
    EXPERTS,
    SPLIT,
    DecoderLayer,
    RMSNorm,
    attention_on_replicas,
    gathered,
    mlp_axes,
    random_in_eight_bits,
    read_sharding,
    token_and_head_axes,
)
from kvjax.models.layout import UnfusedArray, flat_shape, fuse, mlp_blocks, parts_of
from kvjax.models.matrix import gathered_for, multiply
from kvjax.models.names import in_layers
from kvjax.models.periods import Segment, by_period, in_order, joined, member, segments
from kvjax.models.rope import cos_sin
from kvjax.policies.views import Step
from kvjax.struct import leaves_by_path
from pallas_kernels.bits import as_bits, as_floats, item
from pallas_kernels.choose import target
from pallas_kernels.softmax import with_sink
from pallas_kernels.stack_product import MOST_ROWS
from pallas_kernels.supported import DTYPES
from pallas_kernels.vertical_slash import SAVED, ends

ToLogits = Callable[[Float[Array, "b t d"]], Float32[Array, "b t v"]]
"""A function from hidden states to logits."""
VOCABULARY_MULTIPLE = 128
"""Vocabularies are padded in storage to a multiple of this, so that one shape serves every usual `tensor` axis."""


def padded_vocabulary(config: ModelConfig) -> int:
    """Return the rows of the stored embedding table on the current mesh."""
    multiple = math.lcm(VOCABULARY_MULTIPLE, axis_size(*mlp_axes(HEADS)))
    return -(-config.vocab_size // multiple) * multiple


def check_mesh(config: ModelConfig, mesh: Mapping[str, int] | None = None) -> None:
    """Raise UserError if a mesh axis does not divide a size of the model that it splits.

    mesh: the sizes of the mesh's axes; None: the current mesh.
    """
    mlp, experts = mlp_axes(HEADS), config.num_experts
    mesh = {axis: axis_size(axis) for axis in AXES} if mesh is None else mesh
    if experts:
        split = ("experts", experts, mlp), ("experts", experts, EXPERTS)
    else:
        split = ("mlp width", config.mlp_width, mlp), ("blocks of the mlp width", mlp_blocks(config), mlp)
    sizes = ("kv heads", config.num_kv_heads, HEADS), *split, ("width", config.width, ("fsdp",))
    for name, size, axes in (*sizes, *_weight_blocks(config, mlp)):
        if size % (shards := math.prod(mesh[axis] for axis in axes)):
            used = [axis for axis in axes if mesh[axis] > 1]
            label = " × ".join(used) if len(used) > 1 else f"{used[0]} axis"
            tensor = math.gcd(size, shards)
            advice = f"; tensor={tensor},replica={shards // tensor} does" if name == "kv heads" else ""
            raise UserError(
                f"the mesh's {label} has size {shards}, which does not divide the model's {name} ({size}){advice}"
            )


def _weight_blocks(config: ModelConfig, mlp: tuple[str, ...]) -> Iterator[tuple[str, int, tuple[str, ...]]]:
    """Yield the name and the number of each kind of blocks of 8-bit weights, and the mesh axes that must divide it."""
    if block := config.weight_block:
        yield "blocks of heads", config.num_heads * config.head_dim // block, HEADS
        yield "blocks of the width", config.width // block, ("fsdp",)
        if not config.num_experts:
            yield "blocks of the mlp width", config.mlp_width // block, mlp


class Decoder(nnx.Module):
    """A decoder, from token ids to hidden states to logits. It is built with random weights on the current mesh
    (`kvjax.mesh.use_mesh`).

    embed and head are [vocabulary, d], with the vocabulary padded in storage; head is None if it is tied to embed. With
    int8 weights they are also in 8 bits, with a scale for each token.

    Raises:
        UserError: a mesh axis does not divide a size that it splits.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, dtype: Any = jnp.float32):
        with use_mesh():
            check_mesh(config)
            shape = (padded_vocabulary(config), config.width)

            def table():
                init, spec = jax.nn.initializers.normal(0.02), P(WIDTH, "fsdp")
                floats = init(rngs.params(), shape, dtype, out_sharding=spec)
                if config.weights != "int8":
                    return nnx.Param(floats), None
                values, scale = random_in_eight_bits(floats, jnp.int8)
                return nnx.Param(values), nnx.Param(
                    jnp.full(len(values), scale, jnp.float32, out_sharding=P(WIDTH))
                )

            self.config = config
            self.embed, self.embed_scale = table()
            self.layers = DecoderLayer(config, rngs=rngs, dtype=dtype)
            self.norm = RMSNorm(config.width, config, dtype)
            self.head, self.head_scale = (None, None) if config.tied else table()

    @property
    def dtype(self) -> np.dtype:
        """The dtype of activations, and of cache entries unless they are int8."""
        return self.norm.scale.dtype

    def unfused_arrays(self) -> dict[str, UnfusedArray]:
        """Return the model's arrays as files hold them, with separate queries, keys and values, and separate gate and
        up."""
        arrays = {}
        for name, leaf in leaves_by_path(self).items():
            path = name.removeprefix("layers.").removesuffix(".value")
            if not in_layers(path):
                arrays[name] = UnfusedArray(leaf, self.config)
            for part in parts_of(path) if in_layers(path) else ():
                arrays[f"layers.{part}.value"] = UnfusedArray(leaf, self.config, path, part)
        return arrays

    def with_unfused(self, values: Mapping[str, Array]) -> "Decoder":
        """Return a decoder like this one with these values of its unfused arrays. This one may consist of shapes."""

        def array(keys, _):
            name = jax.tree_util.keystr(keys, simple=True, separator=".")
            path = name.removeprefix("layers.").removesuffix(".value")
            if not in_layers(path):
                return values[name]
            parts = {part: values[f"layers.{part}.value"] for part in parts_of(path)}
            flat = {part: x.reshape(len(x), *flat_shape(part, self.config)) for part, x in parts.items()}
            return fuse(path, flat, self.config)

        return jax.tree_util.tree_map_with_path(array, self)

    def with_unreduced_gradients(self) -> "Decoder":
        """Return this decoder with large gradients left unsummed over `data`: each part of the axis keeps its own
        summand until `reshard` sums them. Large gradients are those of the vocabulary tables and of dense matrices."""
        dense = {"embed", "head", "qkv", "o"} | (set() if self.config.num_experts else {"gate_up", "down"})

        def mark(keys, x):
            name = jax.tree_util.keystr(keys, simple=True, separator=".")
            if name.removeprefix("layers.").removesuffix(".value") not in dense:
                return x
            return reshard(x, P(*jax.typeof(x).sharding.spec, reduced=frozenset({"data"})))

        return jax.tree_util.tree_map_with_path(mark, self)

    def embed_tokens(self, tokens: Int[Array, "b t"], *, frozen: bool = False) -> Float[Array, "b t d"]:
        """Return embeddings, split over the batch and, if `sequence` divides the tokens, by tokens. The table stays
        split; the looked-up columns are exchanged instead. `frozen`: the table needs no gradient, as in
        `scan_layers`."""
        if tokens.shape[0] % batch_shards():
            raise UserError(
                f"a batch of {tokens.shape[0]} does not divide over the mesh's data × fsdp = {batch_shards()} shards: "
                "add empty rows"
            )
        axis = token_axis(tokens.shape[1])
        tokens = reshard(tokens, P("data", axis))
        table = self.embed[...]
        dtype = table.dtype
        if frozen and target().platform == "cpu":
            # without the barrier XLA would take the bits of the whole table before a loop over tokens, and store them
            table, tokens = jax.lax.optimization_barrier((table, tokens))
            table = as_bits(table)
        x = as_floats(table.at[tokens].get(out_sharding=P("data", axis, "fsdp")), dtype)
        if self.embed_scale is not None:
            scale = self.embed_scale[...].at[tokens].get(out_sharding=P("data", axis))
            x = (x * scale[..., None]).astype(self.dtype)
        x = reshard(x, P(BATCH, axis, None))
        # the factor is rounded, as in the models' own code
        return x if (scale := self.config.embed_factor) == 1 else x * jnp.asarray(scale, x.dtype)

    def logits(self, hidden: Float[Array, "b t d"]) -> Float32[Array, "b t v"]:
        """Return the logits of hidden states after the final norm. Every device has the whole vocabulary."""
        return self.to_logits(hidden)(hidden)

    def to_logits(self, hidden: Float[Array, "b t d"]) -> ToLogits:
        """Return `logits` as a function, for `hidden` or parts of it. Its calls share one gathered table, whose
        gradients are summed over devices once."""
        table, scale = self.head, self.head_scale
        if table is None:
            table, scale = self.embed, self.embed_scale
        axis, head_axes = token_and_head_axes(hidden)
        spec = P(BATCH, axis, mlp_axes(head_axes))
        single = hidden.shape[:2] == (1, 1) and table.dtype.itemsize < 4 and target().platform == "cpu"
        if single or scale is not None:
            weights = gathered(table, head_axes)
        else:
            weights = gathered_for(hidden, table[...], read_sharding(table, head_axes))

        def logits(hidden):
            y: Array
            if single:
                # a matrix product would first write the whole table in float32, and keep it if XLA hoists the
                # conversion out of a loop
                read, hidden = jax.lax.optimization_barrier((weights, hidden))
                y = (read.astype(jnp.float32) * hidden[0, 0].astype(jnp.float32)).sum(-1)[None, None]
            else:
                y = multiply(hidden, weights.astype(hidden.dtype), "btd,vd->btv", spec)
            if scale is not None:
                y = y * gathered(scale, head_axes)
            return reshard(y, P(BATCH, axis, None))[..., : self.config.vocab_size]

        return logits

    def hidden(
        self, tokens: Int[Array, "b t"], document: Int[Array, "b t"] | None = None, *, remat: bool = False
    ) -> Float[Array, "b t d"]:
        """Return hidden states after the final norm, under plain causal attention from position 0.

        document: the number of each token's document. Attention does not cross documents.
        """

        def attend(step, carry, xs):
            return causal_attention(step, document), carry, None

        x, slide = self.embed_tokens(tokens), sliding_attention(self.config, document)
        x, *_ = scan_layers(self, x, positions_of(tokens, document), attend, slide=slide, remat=remat)
        return self.norm(x)


def unfused_values(tree: Any) -> Any:
    """Return a pytree with every decoder replaced by a mapping of its unfused arrays by name, as in exports."""

    def values(x):
        return (
            {name: array.value for name, array in x.unfused_arrays().items()} if isinstance(x, Decoder) else x
        )

    return jax.tree.map(values, tree, is_leaf=lambda x: isinstance(x, Decoder))


def positions_of(tokens: Int[Array, "b t"], document: Int[Array, "b t"] | None = None) -> Int[Array, "b t"]:
    """Return the position of every token, counted from the beginning of its document. Sequences are given whole."""
    index = reshard(jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape), P(BATCH, None))
    if document is None:
        return index
    first = jnp.pad(document[:, 1:] != document[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return index - jax.lax.cummax(jnp.where(first, index, 0), axis=1)


Attend = Callable[[Step, Any, Any], tuple[Float[Array, "b n t h"], Any, Any]]
"""The attention of a layer, a function from (step, carry, xs of the layer) to (output, carry, ys of the layer)."""


def causal_attention(
    step: Step, document: Int[Array, "b t"] | None = None, window: int = 0
) -> Float[Array, "b n t h"]:
    """Return causal attention of whole sequences: to all earlier tokens of the same document, or if `window` is not 0
    to the last `window` of them. `document`: as in `Decoder.hidden`."""

    def local(step, document):
        end = ends(jnp.zeros(step.k.shape[:3], bool), window) if window else None
        attended = attention_on_replicas(
            step.q, step.k, step.v, end, window=window or 1, segment_ids=document
        )
        return with_sink(*attended, step.sink)[0]

    return jax.shard_map(local, out_specs=SPLIT)(step, document)


def sliding_attention(config: ModelConfig, document: Int[Array, "b t"] | None = None) -> Attend:
    """Return the attention of sliding-window layers when whole sequences are given. `document`: as in
    `Decoder.hidden`."""

    def attend(step, carry, xs):
        return causal_attention(step, document, config.sliding_window), carry, None

    return attend


def _reads_in_place(config: ModelConfig, x: Float[Array, "b t d"]) -> bool:
    """Return True if products read weights in place in their stacks, so that XLA does not copy each layer's weights.
    They do on a GPU for few tokens, and on a CPU for a single token."""
    rows, platform = x.shape[0] // batch_shards() * x.shape[1], target().platform
    max_rows = {"gpu": MOST_ROWS, "cpu": int(config.num_experts == 0)}.get(platform, 0)
    return rows <= max_rows and axis_size("fsdp") == 1 and x.dtype in DTYPES


def layer_body(
    model: Decoder,
    position: Int[Array, "b t"],
    attend: Attend,
    token: Int[Array, "b t"] | None = None,
    *,
    slides: bool = False,
) -> Callable[[tuple[Any, Any], tuple[Any, Any, Any, Any]], tuple[tuple[Any, Any], Any]]:
    """Return one layer as the body of a scan. It maps (x, carry) and (the layer's weights, its index, its index among
    the layers of its kind, its xs) to (x, carry) and its ys. Weights that are None are read from the model's stacks.

    slides: True for the layers with a sliding window. Other arguments as in `scan_layers`.
    """
    config = model.config
    heads = reshard(jnp.arange(config.num_kv_heads, dtype=jnp.int32), P(HEADS))
    rope = config.sliding_rope if slides and config.sliding_rope is not None else config.rope
    cos, sin = cos_sin(rope, config.head_dim, position)

    def placed_heads(kind_index):
        return reshard(jnp.asarray(config.head_at_place)[kind_index], P(HEADS))

    def angles(index):
        if not config.no_rope:
            return cos, sin
        unrotated = (index == np.array(config.no_rope)).any()
        return jnp.where(unrotated, 1.0, cos), jnp.where(unrotated, 0.0, sin)

    def body(carried, inputs):
        x, carry = carried
        layer, index, kind_index, xs = inputs
        layer = jax.tree.map(
            lambda weight, stack: stack if weight is None else weight,
            *(layer, model.layers),
            is_leaf=lambda x: x is None,
        )
        stacked = index if layer.qkv.ndim == 3 else None
        step = Step(
            **layer.project(x, angles(index), stacked),
            position=position,
            layer=kind_index,
            head=heads if slides or config.head_order is None else placed_heads(kind_index),
            token=token,
        )
        o, carry, ys = attend(step, carry, xs)
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
    slide: Attend | None = None,
    token: Int[Array, "b t"] | None = None,
    remat: bool = False,
    frozen: bool = False,
) -> tuple[Float[Array, "b t d"], Any, Any, Any]:
    """Run `x` through all layers; attention is `attend(step, carry, xs of the layer) -> (o [b n t h], carry, ys)`.

    Args:
        position: true token positions, −1 for padding.
        attend: the attention of layers with full attention. `Step.layer` counts only these layers.
        carry: the value that each layer passes to the next (the page pool).
        xs: values of each full-attention layer, with a leading layer axis (page tables, states, a policy's parameters).
        slide: the attention of sliding-window layers. They have no xs, and their `Step.layer` counts only them.
            None: `sliding_attention`.
        token: the token ids, for a policy's `Step`.
        remat: recompute each layer in the backward pass instead of storing its activations.
        frozen: the weights need no gradient, and are read with the fewest copies. A CPU reads 8- and 16-bit weights as
            integers of the same bits (`pallas_kernels.bits`). A GPU for few tokens, and a CPU for one token, read
            matrices in place in their stacks (`pallas_kernels.stack_product`), unless `fsdp` splits the weights.

    Returns:
        x before the final norm, the last carry, the stacked ys of all full-attention layers, and those of all
        sliding-window layers.
    """
    config, layers = model.config, model.layers
    if frozen and _reads_in_place(config, x):
        layers = jax.tree.map(lambda x: None if x.ndim == 3 else x, layers)
    by_kind = attend, slide or sliding_attention(config)
    bodies = [
        layer_body(model, position, attention, token, slides=bool(kind))
        for kind, attention in enumerate(by_kind[: 2 if config.sliding_layers else 1])
    ]
    if remat:
        # attention's outputs are saved, since its backward pass starts from them and need not run it forwards again.
        # prevent_cse=False: XLA merges nothing across iterations of a scan, so its barrier would only cost time
        save_attention = jax.checkpoint_policies.save_only_these_names(SAVED)
        bodies = [jax.checkpoint(body, prevent_cse=False, policy=save_attention) for body in bodies]
    ys_by_kind, before = ([], []), [0, 0]
    for segment in segments(config.slides):
        full = segment.slides.count(False)
        segment_xs = by_period(xs, before[False], full, segment.repeats) if full else None
        # a scan slices one layer's weights at a time only if it runs over all layers, with one layer in a period
        sliced = len(segment.slides) == 1 and segment.layers == config.num_layers
        in_place = frozen and (not sliced or target().platform == "cpu")
        (x, carry), ys = _scan_segment(
            bodies, segment, tuple(before), layers, in_place, (x, carry), segment_xs
        )
        for kind, members in enumerate(ys):
            before[kind] += len(members) * segment.repeats
            ys_by_kind[kind].append(in_order(members))
    return x, carry, *map(joined, ys_by_kind)


def _scan_segment(bodies, segment: Segment, before, layers, in_place: bool, carried, xs):
    """Run the layers of a segment, each with the body of its kind. Returns the carried values and, by kind, a list of
    the ys of each layer of a period.

    Args:
        before: the number of layers of each kind before the segment.
        layers: the weights of all layers.
        in_place: True to index the weights of all layers in each step of the scan, instead of scanning over a slice.
        xs: the values of the layers with full attention, by period.
    """
    size, counts = len(segment.slides), [segment.slides.count(kind) for kind in (False, True)]

    def period(carried, inputs):
        index, weights, xs = inputs
        ys = [], []
        for place, kind in enumerate(segment.slides):
            layer, kind_place = segment.first + size * index + place, len(ys[kind])
            layer_weights = layer_at(layers, layer) if in_place else member(weights, place, size)
            kind_index = before[kind] + counts[kind] * index + kind_place
            layer_xs = None if kind else member(xs, kind_place, counts[kind])
            inputs = layer_weights, layer, kind_index, layer_xs
            carried, y = bodies[kind](carried, inputs)
            ys[kind].append(y)
        return carried, ys

    weights = None if in_place else by_period(layers, segment.first, size, segment.repeats)
    index = jnp.arange(segment.repeats, dtype=jnp.int32)
    return jax.lax.scan(period, carried, (index, weights, xs))


def layer_at(layers: Any, index: Int[Array, ""]) -> Any:
    """Return the values of one layer, given the stacked values of all layers."""
    return jax.tree.map(lambda stack: item(stack, index), layers)
