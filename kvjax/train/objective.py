"""Losses of recipes: a student under the mask of a small cache learns from a frozen teacher or from the next tokens."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import reshard
from jaxtyping import Array, Bool, Float, Float32, Int, Shaped

from kvjax.cache import ends
from kvjax.inference.attention import masked_attention
from kvjax.mesh import BATCH, HEADS, P, token_axis, token_shards
from kvjax.models.decoder import Decoder, positions_of, scan_layers, sliding_attention
from kvjax.policies.base import BIAS, Admission, Mask, Trainable
from kvjax.policies.views import Shape, Step
from kvjax.struct import static, struct
from pallas_kernels.varying import alike


def student(
    method: Trainable,
    model: Decoder,
    tokens: Int[Array, "b t"],
    document: Int[Array, "b t"] | None = None,
    *,
    window: int,
) -> tuple[Float[Array, "b t d"], dict[str, Float[Array, "l b k"]]]:
    """Return the final hidden states of the model, whose attention is masked by the method in all layers, and the
    method's figures. Layers are recomputed in the backward pass.

    Args:
        method: its arrays have a leading layer axis. Arrays [l k …] are split over the head shards here, so callers
            need not shard them.
        document: the index of each token's document, if a sequence has several. Documents do not see each other.
    """
    method = jax.tree.map(lambda x: _split_heads(x, model), method)

    def attend(step, carry, layer):
        o, figures = masked_attention(layer, step, document, window=window)
        return o, carry, figures

    embedded, position = model.embed_tokens(tokens), positions_of(tokens, document)
    slide = sliding_attention(model.config, document)
    x, _, figures, _ = scan_layers(
        model, embedded, position, attend, xs=method, slide=slide, remat=True, token=tokens
    )
    return model.norm(x), figures


def deployed_mask(admission: Admission, step: Step, window: int) -> tuple[Float[Array, "b k t"], Mask]:
    """Return the priority of every token and the mask of an admission at inference, for whole sequences.

    The priority of the last tokens is not known yet and is −inf. Priorities and biases have a gradient, the choice of
    kept tokens has none. `Trainable.masks` can call this.
    """
    batch, heads, tokens, head_dim = step.k.shape
    shape = Shape(batch, heads, step.q.shape[1] // heads, head_dim, step.k.dtype)
    bounds = jnp.zeros(batch, jnp.int32), jnp.full(batch, tokens, jnp.int32)
    # the carry of a scan must vary over the same mesh axes as its inputs
    state = jax.tree.map(lambda x: alike(x, step.k)[0], admission.init(shape))
    if admission.revisits is not None:
        step = from_the_start(step, admission.revisits)
    _, scores, delay = admission.score(state, step, *bounds)
    padding = ((0, 0), (0, 0), (0, min(delay, tokens)))
    priority = jnp.pad(scores[..., delay:], padding, constant_values=-jnp.inf)
    keep = admission.keep()
    fixed = jax.lax.stop_gradient(priority)
    end = ends(keep.wanted(fixed), fixed, keep.max_entries, window=window)
    bias = admission.bias(state, step) if BIAS in admission.metadata else None
    return priority, Mask(end=end, log_gate=bias)


def from_the_start(step: Step, revisits: int) -> Step:
    """Return the step of whole sequences with the keys and values of the tokens `revisits` before each token as
    `earlier`; before the first token they are zeros."""
    zeros = jnp.zeros_like(step.k[:, :, :revisits])
    return step.revisiting(zeros, zeros)


@struct
class Deployed:
    """The mask of an admission at inference, as a method for `student`."""

    admission: Admission
    """The placed admission: its numbers have a leading layer axis."""
    window: int = static()
    """The number of last tokens that are always visible."""

    def masks(self, step: Step) -> tuple[None, list[Mask]]:
        return None, [deployed_mask(self.admission, step, self.window)[1]]

    def figures(self, state: None, step: Step, outputs: Any) -> dict[str, Float[Array, "b k"]]:
        return {}


def _split_heads(x: jax.Array, model: Decoder) -> jax.Array:
    heads = x.shape[:2] == (model.config.num_full_layers, model.config.num_kv_heads)
    if heads and not any(jax.typeof(x).sharding.spec):
        return reshard(x, P(None, HEADS))
    return x


TOKENS_AT_ONCE = 512
"""The number of tokens of a sequence whose logits a device holds at a time."""
Part = Callable[[Array], Array]
"""A function that cuts the same tokens out of each array [b t …]."""


def next_token_loss(
    model: Decoder, hidden: Float[Array, "b t d"], tokens: Int[Array, "b t"]
) -> Float[Array, ""]:
    """Return the mean cross-entropy (nats, float32) of all tokens but the first, given the hidden states before them.
    Logits are computed for a part of each sequence at a time, and again in the backward pass."""
    return next_token_losses(model, hidden, tokens).mean()


def next_token_losses(
    model: Decoder,
    hidden: Float[Array, "b t d"],
    tokens: Int[Array, "b t"],
    labelled: Bool[Array, "b t"] | None = None,
) -> Float[Array, " b"]:
    """Return the `next_token_loss` of each sequence. With `labelled` only the labelled tokens count, and the loss is 0
    if a sequence has none."""
    following, to_logits = _following(tokens), model.to_logits(hidden)

    def errors(cut: Part):
        return (_cross_entropy(to_logits(cut(hidden)), cut(following)),)

    (sums,), count = _sums_by_parts(errors, tokens, labelled)
    return sums / jnp.maximum(count, 1)


def distilled_token_loss(
    model: Decoder,
    hidden: Float[Array, "b t d"],
    tokens: Int[Array, "b t"],
    teacher: Callable[[Part], tuple[Float[Array, "b t n"], Int[Array, "b t n"]]],
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return the `next_token_loss` and the mean divergence KL(teacher ‖ student). For the divergence both distributions
    are renormalised over the tokens that the teacher returns (KVPOP, Sec. 4).

    Args:
        teacher: a function that returns the logits and the indices of likely next tokens (`likeliest`) for a part of
            the sequences.
    """
    following, to_logits = _following(tokens), model.to_logits(hidden)

    def errors(cut: Part):
        teacher_logits, which = teacher(cut)
        logits = to_logits(cut(hidden))
        student_logits = jax.nn.log_softmax(jnp.take_along_axis(logits, which, -1), -1)
        teacher_logits = jax.nn.log_softmax(jax.lax.stop_gradient(teacher_logits).astype(jnp.float32), -1)
        divergences = jnp.sum(jnp.exp(teacher_logits) * (teacher_logits - student_logits), -1)
        return _cross_entropy(logits, cut(following)), divergences

    sums, count = _sums_by_parts(errors, tokens)
    error, divergence = (x.sum() / count.sum() for x in sums)
    return error, divergence


def likeliest(
    logits: Float32[Array, "b t v"], count: int
) -> tuple[Float32[Array, "b t n"], Int[Array, "b t n"]]:
    """Return the logits and the indices of the `count` likeliest next tokens, the likeliest first."""
    largest, which = jax.lax.top_k(logits, min(count, logits.shape[-1]))
    return largest, which


def cut_tokens(x: Shaped[Array, "b t ..."], first: Any, count: int) -> Shaped[Array, "b cut ..."]:
    """Cut `count` tokens out of each device's part of every sequence, from token `first` of the part on. If sequences
    are not split over devices, the part is the whole sequence."""
    (b, t, *rest), rest_spec = x.shape, (None,) * (x.ndim - 2)
    axis, shards = token_axis(t), token_shards(t)
    x = reshard(x, P(BATCH, axis, *rest_spec))
    x = jax.lax.reshape(x, (b, shards, t // shards, *rest), out_sharding=P(BATCH, axis, None, *rest_spec))
    x = jax.lax.dynamic_slice_in_dim(x, first, count, 2)
    return jax.lax.reshape(x, (b, shards * count, *rest), out_sharding=P(BATCH, axis, *rest_spec))


def _following(tokens: Shaped[Array, "b t"]) -> Shaped[Array, "b t"]:
    return jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)))


def _cross_entropy(logits: Float[Array, "b t v"], labels: Int[Array, "b t"]) -> Float[Array, "b t"]:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def _sums_by_parts(
    errors: Callable[[Part], tuple[Float[Array, "b t"], ...]],
    tokens: Int[Array, "b t"],
    labelled: Bool[Array, "b t"] | None = None,
) -> tuple[tuple[Float[Array, " b"], ...], Int[Array, " b"]]:
    """Return the sum of each error over all tokens that are followed by another token (by a labelled token if
    `labelled` is given), and the number of these tokens. Errors are computed for one part of the sequences at a time.
    """
    b, t = tokens.shape
    shards = token_shards(t)
    local_tokens = t // shards
    part = min(TOKENS_AT_ONCE, local_tokens)
    counts = reshard(jnp.broadcast_to(jnp.arange(t) < t - 1, (b, t)), P(BATCH, None))
    if labelled is not None:
        counts &= _following(labelled)

    @jax.checkpoint
    def sums_of_part(first: Any, done: Any):
        cut = lambda x: cut_tokens(x, first, part)  # noqa: E731
        # the last part begins earlier than it has to, so that it is as long as the others
        uncounted = jnp.tile(jnp.arange(part) + first >= done, shards)
        return tuple(jnp.sum(jnp.where(cut(counts) & uncounted, x, 0), 1) for x in errors(cut))

    starts = jnp.minimum(jnp.arange(-(-local_tokens // part), dtype=jnp.int32) * part, local_tokens - part)
    _, sums = jax.lax.scan(
        lambda done, first: (first + part, sums_of_part(first, done)), jnp.int32(0), starts
    )
    return tuple(x.sum(0) for x in sums), counts.sum(1)


def student_errors(
    method: Trainable,
    model: Decoder,
    tokens: Int[Array, "b t"],
    teacher: Float[Array, "b t d"],
    *,
    window: int,
) -> tuple[Float[Array, "b t d"], dict[str, Float[Array, "l b k"]]]:
    """Return the squared differences between the final hidden states of the student and those of the teacher
    (`model.hidden`, with full attention), in float32, and the method's figures."""
    hidden, figures = student(method, model, tokens, window=window)
    difference = hidden.astype(jnp.float32) - teacher.astype(jnp.float32)
    return jnp.square(difference), figures
