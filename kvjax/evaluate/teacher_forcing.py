"""Expected answers under a head pattern, teacher-forced, with one program for all patterns.

The whole heads, the number of sinks and the window are traced, so hundreds of patterns need one compilation. Every
token sees exactly the tokens that it sees through the cache under the policies `head_pattern` and `streaming_llm`.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache import not_finite
from kvjax.mesh import BATCH, HEADS, P, batch_shards, gather, on_host, put, use_mesh
from kvjax.models.decoder import Decoder, scan_layers
from kvjax.struct import static, struct
from kvjax.tasks.sample import Question, Sample, score_agreement
from pallas_kernels.softmax import with_sink
from pallas_kernels.vertical_slash import FOREVER, vertical_slash


@struct
class AnswerRows:
    """Contexts, each followed by its questions and their expected answers side by side."""

    token: Int[Array, "b t"]
    """Token ids; unspecified for padding."""
    position: Int[Array, "b t"]
    """The position in the sequence of the context and one question; −1 for padding."""
    part: Int[Array, "b t"]
    """0 for the context, and the question's number (from 1) for its tokens; −1 for padding."""
    target: Int[Array, "b t"]
    """The token that should follow; −1 where no token is asked for."""
    context: int = static()
    """Columns of the longest context."""


@struct
class Pattern:
    """A head pattern as arrays: streaming heads see the first `sink` and the last `window` tokens."""

    whole: Bool[Array, "*l k"]
    """True for whole heads, by layer and kv head."""
    sink: Int[Array, ""]
    """First tokens that streaming heads see."""
    window: Int[Array, ""]
    """Last tokens that streaming heads see."""


@dataclass(frozen=True)
class Outcome:
    """Score and loss of a head pattern."""

    score: float
    """The mean score of the answers, by the task's metric."""
    loss: float
    """Mean cross-entropy of the answers' tokens, in nats."""


class TeacherForcing:
    """Runs the expected answers to all questions of some samples under head patterns, about `batch` samples at a time.

    Teacher-forced questions are scored by agreement with the predictions of all heads whole, as in an evaluation.
    """

    def __init__(self, model: Decoder, samples: Sequence[Sample], batch: int = 16):
        self._model = model
        context = max(len(sample.context) for sample in samples)
        size = -(-len(samples) // -(-len(samples) // batch))
        with use_mesh(model):
            size = -(-size // batch_shards()) * batch_shards()
            rows, self._answers = _rows(samples, -(-len(samples) // size), size)
            self._parts = [
                AnswerRows(**{name: put(x, BATCH, None) for name, x in part.items()}, context=context)
                for part in rows
            ]
        if any(question.teacher_forced for _, _, question in self._answers):
            output, _ = self._run(
                np.ones((model.config.num_full_layers, model.config.num_kv_heads), bool), 1, 1
            )
            self._answers = [
                (row, at, score_agreement(question, output[row, at])) for row, at, question in self._answers
            ]

    def __call__(self, whole: Bool[np.ndarray, "l k"], sink: int, window: int) -> Outcome:
        """Return the outcome if heads in `whole` see all tokens, and the others the first `sink` and last `window`."""
        output, loss = self._run(whole, sink, window)
        scores = [question.score(output[row, columns]) for row, columns, question in self._answers]
        return Outcome(float(np.mean(scores)), loss)

    def _run(
        self, whole: Bool[np.ndarray, "l k"], sink: int, window: int
    ) -> tuple[Int[np.ndarray, "b q"], float]:
        with use_mesh(self._model):
            pattern = Pattern(put(whole, None, HEADS), put(np.int32(sink)), put(np.int32(window)))
            outcomes = [_outcome(self._model, rows, pattern) for rows in self._parts]
        output, loss, counts = (list(map(on_host, values)) for values in zip(*outcomes, strict=True))
        if not np.isfinite(loss).all():
            raise not_finite(self._model.dtype)
        return np.concatenate(output), float(np.sum(loss, dtype=np.float64) / np.sum(counts))


def _rows(
    samples: Sequence[Sample], parts: int, size: int
) -> tuple[list[dict[str, Int[np.ndarray, "b t"]]], list[tuple[int, slice, Question]]]:
    """Return the arrays of `AnswerRows` in `parts` parts of `size` rows, and the place of each answer.

    Empty rows fill the last part. An answer's place is its row, its columns counted from the context's end, and its
    question.
    """
    context = max(len(sample.context) for sample in samples)
    questions = max(sum(len(q.prompt) + len(q.answer) - 1 for q in sample.questions) for sample in samples)
    shape = parts * size, context + questions
    token, position, part, target = (np.full(shape, x, np.int32) for x in (0, -1, -1, -1))
    answers = []
    for row, sample in enumerate(samples):
        n, column = len(sample.context), context
        token[row, :n], position[row, :n], part[row, :n] = sample.context, np.arange(n), 0
        for number, question in enumerate(sample.questions, 1):
            answer = question.answer
            ids = np.concatenate([question.prompt, answer[:-1]])
            at = slice(column, column := column + len(ids))
            token[row, at], position[row, at], part[row, at] = ids, n + np.arange(len(ids)), number
            target[row, column - len(answer) : column] = answer
            answers.append((row, slice(column - len(answer) - context, column - context), question))
    rows = {"token": token, "position": position, "part": part, "target": target}
    return [
        {name: x[at * size : (at + 1) * size] for name, x in rows.items()} for at in range(parts)
    ], answers


@jax.jit
def _outcome(
    model: Decoder, rows: AnswerRows, pattern: Pattern
) -> tuple[Int[Array, "b q"], Float[Array, ""], Int[Array, ""]]:
    """Return the most likely next token for each column after the context, the summed loss of the targets, and their
    number."""

    def attend(step, carry, layer_pattern):
        step = step.without_padding()
        local = jax.shard_map(partial(_attend, context=rows.context), out_specs=P(BATCH, HEADS))
        return local(step, rows.position, rows.part, layer_pattern), carry, None

    def full(step, carry, whole):
        return attend(step, carry, dataclasses.replace(pattern, whole=whole))

    def slide(step, carry, xs):
        no_heads = jnp.zeros(model.config.num_kv_heads, bool, out_sharding=P(HEADS))
        sliding = Pattern(no_heads, jnp.int32(0), jnp.int32(model.config.sliding_window))
        return attend(step, carry, sliding)

    x = model.embed_tokens(rows.token, frozen=True)
    x, *_ = scan_layers(model, x, rows.position, full, xs=pattern.whole, slide=slide, frozen=True)
    logits = model.logits(model.norm(gather(x, "sequence")[:, rows.context :]))
    target = rows.target[:, rows.context :]
    has_target = target >= 0
    right = jnp.take_along_axis(logits, jnp.maximum(target, 0)[..., None], -1)[..., 0]
    loss = jnp.where(has_target, jax.nn.logsumexp(logits, -1) - right, 0)
    output = jnp.argmax(logits, -1).astype(jnp.int32)
    return jax.sharding.reshard(output, P()), loss.sum(), has_target.sum()


def _attend(step, position, part, pattern, *, context):
    """Attend from the context under its own mask, then from each question over the context and itself."""
    q, k, v = step.q, step.k, step.v
    stays = pattern.whole[:, None] | (position < pattern.sink)[:, None]
    end = jnp.where(stays, FOREVER, (position + pattern.window)[:, None])[..., :context]
    end = jnp.where((position >= 0)[:, None, :context], end, 0).astype(jnp.int32)
    first = {"q": q[:, :, :context], "k": k[:, :, :context], "v": v[:, :, :context]}
    read, _ = with_sink(*vertical_slash(**first, end=end, window=1), step.sink)
    age = position[:, context:, None] - position[:, None]
    same_part = (part[:, None] == 0) | (part[:, None] == part[:, context:, None])
    sees = same_part & (position >= 0)[:, None] & (age >= 0)
    sees = sees[:, None] & (stays[:, :, None] | (age < pattern.window)[:, None])
    queries = rearrange(q[:, :, context:], "b (k g) t h -> b k g t h", k=k.shape[1])
    exact = {"preferred_element_type": jnp.float32}
    logits = jnp.einsum("bkgth,bksh->bkgts", queries, k, **exact) * q.shape[-1] ** -0.5
    # finite, because padding sees no token
    logits = jnp.where(sees[:, :, None], logits, -1e30)
    answered = jnp.einsum("bkgts,bksh->bkgth", jax.nn.softmax(logits, -1), v, **exact).astype(q.dtype)
    answered = rearrange(answered, "b k g t h -> b (k g) t h")
    lse = rearrange(jax.nn.logsumexp(logits, -1), "b k g t -> b (k g) t")
    return jnp.concatenate([read, with_sink(answered, lse, step.sink)[0]], 2)
