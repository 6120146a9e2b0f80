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
    axes_of,
    drawn_in_eight_bits,
    gathered,
    whole,
    wider,
)
from kvjax.models.layout import OwnArray, flat_shape, fuse, mlp_blocks, parts_of
from kvjax.models.matrix import gathered_for, multiply
from kvjax.models.names import in_layers
from kvjax.models.periods import Segment, by_period, in_order, joined, member, segments
from kvjax.models.rope import cos_sin
from kvjax.policies.views import Step
from kvjax.struct import leaves_by_path
from pallas_kernels.bits import as_bits, as_floats
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
    multiple = math.lcm(VOCABULARY_MULTIPLE, axis_size(*wider(HEADS)))
    return -(-config.vocab_size // multiple) * multiple


def check_mesh(config: ModelConfig, mesh: Mapping[str, int] | None = None) -> None:
    """Raise UserError if an axis of a mesh does not divide a size of the model that it splits.

    mesh: the sizes of its axes; None: the current mesh's.
    """
    heads, mlp, experts = HEADS, wider(HEADS), config.num_experts
    mesh = {axis: axis_size(axis) for axis in AXES} if mesh is None else mesh
    if experts:
        split = ("experts", experts, mlp), ("experts", experts, EXPERTS)
    else:
        split = ("mlp width", config.mlp_width, mlp), ("blocks of the mlp width", mlp_blocks(config), mlp)
    sizes = ("kv heads", config.num_kv_heads, heads), *split, ("width", config.width, ("fsdp",))
    for name, size, axes in (*sizes, *_weight_blocks(config, heads, mlp)):
        if size % (shards := math.prod(mesh[axis] for axis in axes)):
            used = [axis for axis in axes if mesh[axis] > 1]
            said = " × ".join(used) if len(used) > 1 else f"{used[0]} axis"
            wide = math.gcd(size, shards)
            more = f"; tensor={wide},replica={shards // wide} does" if name == "kv heads" else ""
            raise UserError(
                f"the mesh's {said} has size {shards}, which does not divide the model's {name} ({size}){more}"
            )


def _weight_blocks(
    config: ModelConfig, heads: tuple[str, ...], mlp: tuple[str, ...]
) -> Iterator[tuple[str, int, tuple[str, ...]]]:
    """Yield the numbers of blocks of 8-bit weights, of which a device has whole ones."""
    if block := config.weight_block:
        yield "blocks of heads", config.num_heads * config.head_dim // block, heads
        yield "blocks of the width", config.width // block, ("fsdp",)
        if not config.num_experts:
            yield "blocks of the mlp width", config.mlp_width // block, mlp


class Decoder(nnx.Module):
    """A decoder, from token ids to hidden states to logits. It is built on the current mesh (`kvjax.mesh.use_mesh`),
    with random weights.

    embed and head are [vocabulary, d], the vocabulary padded in storage; head is None where it is tied to embed. With
    int8 weights they are in 8 bits, too, with a scale for each token.

    Raises:
        UserError: a mesh axis that does not divide what it splits.
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
                values, scale = drawn_in_eight_bits(floats, jnp.int8)
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
        """The dtype of activations, and of entries in a cache unless these are int8."""
        return self.norm.scale.dtype

    def own_arrays(self) -> dict[str, OwnArray]:
        """Return the model's own arrays as they are in files: queries, keys and values apart, and gate and up."""
        found = {}
        for name, leaf in leaves_by_path(self).items():
            path = name.removeprefix("layers.").removesuffix(".value")
            if not in_layers(path):
                found[name] = OwnArray(leaf, self.config)
            for part in parts_of(path) if in_layers(path) else ():
                found[f"layers.{part}.value"] = OwnArray(leaf, self.config, path, part)
        return found

    def with_own(self, values: Mapping[str, Array]) -> "Decoder":
        """Return a decoder like this one, which may be shapes alone, with these values of its own arrays."""

        def array(keys, _):
            name = jax.tree_util.keystr(keys, simple=True, separator=".")
            path = name.removeprefix("layers.").removesuffix(".value")
            if not in_layers(path):
                return values[name]
            own = {part: values[f"layers.{part}.value"] for part in parts_of(path)}
            flat = {part: x.reshape(len(x), *flat_shape(part, self.config)) for part, x in own.items()}
            return fuse(path, flat, self.config)

        return jax.tree_util.tree_map_with_path(array, self)

    def with_unreduced_gradients(self) -> "Decoder":
        """Return this decoder, whose large gradients are not summed over `data` yet: each part of it has its own
        summand, until `reshard` sums them. These are the gradients of tables and of dense matrices."""
        dense = {"embed", "head", "qkv", "o"} | (set() if self.config.num_experts else {"gate_up", "down"})

        def mark(keys, x):
            name = jax.tree_util.keystr(keys, simple=True, separator=".")
            own = name.removeprefix("layers.").removesuffix(".value")
            return (
                reshard(x, P(*jax.typeof(x).sharding.spec, reduced=frozenset({"data"})))
                if own in dense
                else x
            )

        return jax.tree_util.tree_map_with_path(mark, self)

    def embed_tokens(self, tokens: Int[Array, "b t"], *, frozen: bool = False) -> Float[Array, "b t d"]:
        """Return embeddings, split over the batch and, where `sequence` divides them, by tokens. The table stays split;
        the looked-up columns are exchanged instead. `frozen`: the table needs no gradient, as in `scan_layers`."""
        if tokens.shape[0] % batch_shards():
            raise UserError(
                f"a batch of {tokens.shape[0]} does not divide over the mesh's data × fsdp = {batch_shards()} shards: "
                "add empty rows"
            )
        axis = token_axis(tokens.shape[1])
        tokens = reshard(tokens, P("data", axis))
        table = self.embed[...]
        bits = as_bits(table) if frozen and target().platform == "cpu" else table
        x = as_floats(bits.at[tokens].get(out_sharding=P("data", axis, "fsdp")), table.dtype)
        if self.embed_scale is not None:
            scale = self.embed_scale[...].at[tokens].get(out_sharding=P("data", axis))
            x = (x * scale[..., None]).astype(self.dtype)
        x = reshard(x, P(BATCH, axis, None))
        # the factor is rounded, as in the models' own code
        return x if (scale := self.config.embed_factor) == 1 else x * jnp.asarray(scale, x.dtype)

    def logits(self, hidden: Float[Array, "b t d"]) -> Float32[Array, "b t v"]:
        """Return the logits of hidden states that have been through the final norm. The vocabulary is whole on every
        device."""
        return self.to_logits(hidden)(hidden)

    def to_logits(self, hidden: Float[Array, "b t d"]) -> ToLogits:
        """Return `logits` as a function, for `hidden` or parts of it. Its calls share one gathered table, whose
        gradients are summed over devices once."""
        own = (self.embed, self.embed_scale) if self.head is None else (self.head, self.head_scale)
        (table, scale), (axis, wide) = own, axes_of(hidden)
        spec = P(BATCH, axis, wider(wide))
        one = hidden.shape[:2] == (1, 1) and table.dtype.itemsize < 4 and target().platform == "cpu"
        if one or scale is not None:
            weights = gathered(table, wide)
        else:
            weights = gathered_for(hidden, table[...], whole(table, wide))

        def logits(hidden):
            y: Array
            if one:
                # read as it is: a product first writes all of it in float32, for good if it may do so before its loop
                read, hidden = jax.lax.optimization_barrier((weights, hidden))
                y = (read.astype(jnp.float32) * hidden[0, 0].astype(jnp.float32)).sum(-1)[None, None]
            else:
                y = multiply(hidden, weights.astype(hidden.dtype), "btd,vd->btv", spec)
            if scale is not None:
                y = y * gathered(scale, wide)
            return reshard(y, P(BATCH, axis, None))[..., : self.config.vocab_size]

        return logits

    def hidden(
        self, tokens: Int[Array, "b t"], document: Int[Array, "b t"] | None = None, *, remat: bool = False
    ) -> Float[Array, "b t d"]:
        """Return hidden states after the final norm, under plain causal attention from position 0. `document`: the
        number of each token's document, where several documents follow one another, none of which sees another."""

        def local(step, document):
            own = attention_on_replicas(step.q, step.k, step.v, window=1, segment_ids=document)
            return with_sink(*own, step.sink)[0]

        def attend(step, carry, xs):
            return jax.shard_map(local, out_specs=SPLIT)(step, document), carry, None

        x, slide = self.embed_tokens(tokens), whole_sequences(self.config, document)
        x, *_ = scan_layers(self, x, places(tokens, document), attend, slide=slide, remat=remat)
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
"""Attention of a layer: from its step, the carry and its xs to the output, the carry and its ys."""


def whole_sequences(config: ModelConfig, document: Int[Array, "b t"] | None = None) -> Attend:
    """Return the attention of sliding-window layers among the tokens of whole sequences. `document`: as in
    `Decoder.hidden`."""

    window = config.sliding_window

    def local(step, document):
        end = ends(jnp.zeros(step.k.shape[:3], bool), window)
        own = attention_on_replicas(step.q, step.k, step.v, end, window=window, segment_ids=document)
        return with_sink(*own, step.sink)[0]

    def attend(step, carry, xs):
        return jax.shard_map(local, out_specs=SPLIT)(step, document), carry, None

    return attend


def _reads_in_place(config: ModelConfig, x: Float[Array, "b t d"]) -> bool:
    """Return True if products read weights in place, in their stacks, where XLA would otherwise copy each layer's: on a
    GPU, and on a CPU for a single token."""
    rows, platform = x.shape[0] // batch_shards() * x.shape[1], target().platform
    most = {"gpu": MOST_ROWS, "cpu": int(config.num_experts == 0)}.get(platform, 0)
    return rows <= most and axis_size("fsdp") == 1 and x.dtype in DTYPES


def layer_body(
    model: Decoder,
    position: Int[Array, "b t"],
    attend: Attend,
    token: Int[Array, "b t"] | None = None,
    *,
    slides: bool = False,
) -> Callable[[tuple[Any, Any], tuple[Any, Any, Any, Any]], tuple[tuple[Any, Any], Any]]:
    """Return one layer as the body of a scan: from (x, carry) and (the layer's weights, its index, its index among the
    layers of its kind, its xs) to (x, carry) and its ys. Weights that are None are read in the model's stacks.

    slides: True for the layers with a sliding window. Other arguments as in `scan_layers`.
    """
    config = model.config
    heads = reshard(jnp.arange(config.num_kv_heads, dtype=jnp.int32), P(HEADS))
    rope = config.sliding_rope if slides and config.sliding_rope is not None else config.rope
    turned = cos_sin(rope, config.head_dim, position)

    def placed(place):
        return reshard(jnp.asarray(config.head_at_place)[place], P(HEADS))

    def angles(index):
        if not config.no_rope:
            return turned
        stays = (index == np.array(config.no_rope)).any()
        return jnp.where(stays, 1.0, turned[0]), jnp.where(stays, 0.0, turned[1])

    def body(carried, inputs):
        x, carry = carried
        layer, index, place, own = inputs
        layer = jax.tree.map(
            lambda taken, whole: whole if taken is None else as_floats(taken, whole.dtype),
            *(layer, model.layers),
            is_leaf=lambda x: x is None,
        )
        stacked = index if layer.qkv.ndim == 3 else None
        step = Step(
            **layer.project(x, angles(index), stacked),
            position=position,
            layer=place,
            head=heads if slides or config.head_order is None else placed(place),
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
    slide: Attend | None = None,
    token: Int[Array, "b t"] | None = None,
    remat: bool = False,
    frozen: bool = False,
) -> tuple[Float[Array, "b t d"], Any, Any, Any]:
    """Run `x` through all layers; attention is `attend(step, carry, xs of the layer) -> (o [b n t h], carry, ys)`.

    Args:
        position: true token positions, −1 for padding.
        attend: the attention of layers that see all tokens. `Step.layer` counts these layers alone.
        carry: the value that each layer hands to the next (the page pool).
        xs: the values of each of these layers, with a leading layer axis (page tables, states, a policy's parameters).
        slide: the attention of sliding-window layers, which have no xs, and whose `Step.layer` counts them alone.
            None: among the tokens of whole sequences.
        token: the token ids, for a policy's `Step`.
        remat: recompute each layer in the backward pass instead of storing its activations.
        frozen: the weights need no gradient, and are read with the fewest copies: on a CPU those of 8 and 16 bits as
            integers of the same bits (`pallas_kernels.bits`), on a GPU, and on a CPU for one token, matrices in place
            in their stacks (`pallas_kernels.stack_product`), if tokens are few and no axis `fsdp` splits the weights.

    Returns:
        x before the final norm, the last carry, every layer's `ys` of `attend`, stacked, and those of `slide`.
    """
    config, layers = model.config, model.layers
    if frozen and target().platform == "cpu":
        layers = jax.tree.map(as_bits, layers)
    if frozen and _reads_in_place(config, x):
        layers = jax.tree.map(lambda x: None if x.ndim == 3 else x, layers)
    by_kind = attend, slide or whole_sequences(config)
    bodies = [
        layer_body(model, position, own, token, slides=bool(kind))
        for kind, own in enumerate(by_kind[: 2 if config.sliding_layers else 1])
    ]
    if remat:
        # attention's own outputs are kept: its backward pass starts from them, so it need not run twice forwards.
        # inside a scan nothing can be merged across iterations, so the barrier that prevents it would only cost
        kept = jax.checkpoint_policies.save_only_these_names(SAVED)
        bodies = [jax.checkpoint(body, prevent_cse=False, policy=kept) for body in bodies]
    found, before = ([], []), [0, 0]
    for segment in segments(config.slides):
        full = segment.slides.count(False)
        own = by_period(xs, before[False], full, segment.repeats) if full else None
        # the scan itself slices one layer at a time only if it has all layers, and one in a period
        in_place = frozen and (len(segment.slides) > 1 or segment.layers < config.num_layers)
        (x, carry), ys = _scan_segment(bodies, segment, tuple(before), layers, in_place, (x, carry), own)
        for kind, members in enumerate(ys):
            before[kind] += len(members) * segment.repeats
            found[kind].append(in_order(members))
    return x, carry, *map(joined, found)


def _scan_segment(bodies, segment: Segment, before, layers, in_place: bool, carried, xs):
    """Run the layers of a segment, each with the body of its kind. Returns what is carried and, by kind, a list of the
    ys of each member of a period.

    Args:
        before: the number of layers of each kind in front of the segment.
        layers: the weights of all layers.
        in_place: True if each layer's weights are found in those of all.
        xs: the values of the layers with full attention, by period.
    """
    size, counts = len(segment.slides), [segment.slides.count(kind) for kind in (False, True)]

    def period(carried, inputs):
        index, weights, xs = inputs
        ys = [], []
        for at, kind in enumerate(segment.slides):
            layer, place = segment.first + size * index + at, len(ys[kind])
            own = one_of_layers(layers, layer) if in_place else member(weights, at, size)
            of_kind = before[kind] + counts[kind] * index + place
            inputs = own, layer, of_kind, None if kind else member(xs, place, counts[kind])
            carried, y = bodies[kind](carried, inputs)
            ys[kind].append(y)
        return carried, ys

    weights = None if in_place else by_period(layers, segment.first, size, segment.repeats)
    index = jnp.arange(segment.repeats, dtype=jnp.int32)
    return jax.lax.scan(period, carried, (index, weights, xs))


def one_of_layers(layers: Any, index: Int[Array, ""]) -> Any:
    """Return one layer's values of those of all layers."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), layers)
