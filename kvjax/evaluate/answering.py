"""Greedy answers to questions about a cached context.

A long question is read in one call, except for its last token. The remaining tokens are decoded one by one, with one
program of a few steps for all answers. With a selection, the whole question is decoded token by token, so that the
method selects for each token, as in Quest's evaluation.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from kvjax import cache as caches
from kvjax.cache import Cache
from kvjax.cache.rollback import marked, rolled_back
from kvjax.cli.stopwatch import Pace, Stopwatch
from kvjax.inference.decode import Before, decode
from kvjax.inference.footprint_log import log_steps
from kvjax.inference.forward import feed
from kvjax.inference.prefill import CHUNK
from kvjax.mesh import BATCH, P, batch_shards, on_host, put, use_mesh
from kvjax.models.decoder import Decoder
from kvjax.policies.compiled import CompiledPolicy, View
from kvjax.tasks.sample import Question, Tokens

STEPS = 4
"""Decoding steps of one block. The host looks at the tokens after each block."""
LONG_QUESTION = 8
"""Questions of more tokens than this are read in a separate call, which needs another program."""
SHRINK = 4
"""The batch shrinks to one in `SHRINK` of its rows once no more rows are running."""
SHRINK_STEPS = 32
"""The batch shrinks only if at least this many steps remain, since another batch size needs another program."""
LAST = -1
"""Placeholder for the model's last predicted token."""


@dataclass(frozen=True)
class Answer:
    """An answer to a question."""

    tokens: Tokens
    log_likelihood: float
    """Log-likelihood in nats of a teacher-forced text; 0 for other questions."""
    cut: bool = False
    """True if a sampled answer was cut off by its length limit."""


def answer(
    model: Decoder,
    policy: CompiledPolicy,
    cache: Cache,
    questions: Sequence[Question],
    *,
    stop: Sequence[int],
    pace: Pace,
    watch: Stopwatch,
) -> tuple[list[Answer], Cache]:
    """Return the model's greedy answer to each sequence's question, and the cache (donated) as it was before.

    stop: tokens that end an answer if its question `stops`. pace: decoding times are added to it. Raises CapacityError
    if the pool is too small for the answers.
    """
    with use_mesh(model):
        mark, origin = marked(cache), on_host(cache.origin)
        # this depends on each question alone, so that its answer does not depend on the batch
        read = [
            len(q.prompt) - 1 if policy.host.selection is None and len(q.prompt) > LONG_QUESTION else 0
            for q in questions
        ]
        if any(read):
            first = [q.prompt[:count] for q, count in zip(questions, read, strict=True)]
            cache, _ = feed(model, policy.host, policy.extend, cache, first, chunk=CHUNK, grows=False)
            questions = [
                dataclasses.replace(q, prompt=q.prompt[count:])
                for q, count in zip(questions, read, strict=True)
            ]
        inputs, true, planned = _feed_table(questions, cache.seen.shape[0])
        output, log_likelihoods = np.zeros_like(inputs), np.zeros(inputs.shape, np.float32)
        stopped = np.zeros(inputs.shape[1], bool)
        last = put(np.zeros(inputs.shape[1], np.int32), BATCH)
        rows = np.arange(inputs.shape[1])
        watch.lap()
        for start in range(0, len(inputs), STEPS):
            block = slice(start, start + STEPS)
            running = planned[block] & ~stopped
            if not running.any():
                break
            if len(rows) == len(stopped) and len(inputs) - start >= SHRINK_STEPS and batch_shards() == 1:
                rows = _rows_to_keep(running)
                if len(rows) < len(stopped):
                    cache, last = _take_rows(cache, last, rows)
            steps = (put(x[:, rows], None, BATCH) for x in (inputs[block], true[block], running))
            cache, last, new, before = _decode_block(model, policy.decode, cache, last, *steps)
            output[block, rows], log_likelihoods[block, rows] = map(on_host, new)
            caches.check(cache, policy.host.name)
            seconds = watch.lap()
            if len(rows) == len(stopped):
                # a step costs the same whether or not rows have finished
                pace.add(len(questions) * STEPS, seconds, watch.compiled)
            before = [_scatter_rows(len(stopped), rows, on_host(x)) for x in before]
            log_steps(before, origin, cache.window, count=STEPS, sequences=len(questions))
            for row, question in enumerate(questions):
                first = max(start, len(question.prompt) - 1)
                stopped[row] |= question.stops and bool(
                    np.isin(output[first : start + STEPS, row], stop).any()
                )
        cache = rolled_back(cache, mark)
    answers = [
        _cut_answer(question, output[:, row], log_likelihoods[:, row], stop)
        for row, question in enumerate(questions)
    ]
    return answers, cache


def _feed_table(
    questions: Sequence[Question], rows: int
) -> tuple[Int[np.ndarray, "t b"], Int[np.ndarray, "t b"], Bool[np.ndarray, "t b"]]:
    """Return the tokens fed to each row, the true next tokens (where known), and a mask of the steps at which the row
    runs. The tables have whole blocks, for the longest question with its answer."""
    counts = [max(0, len(q) - 1) for q in questions]
    steps = -(-max(counts) // STEPS) * STEPS
    inputs, planned = np.full((steps, rows), LAST, np.int32), np.zeros((steps, rows), bool)
    true = np.zeros_like(inputs)
    for row, (question, count) in enumerate(zip(questions, counts, strict=True)):
        text = np.append(question.prompt, question.answer) if question.teacher_forced else question.prompt
        fed, following = text[:count], text[1:]
        inputs[: len(fed), row], true[: len(following), row] = fed, following
        planned[:count, row] = True
    return inputs, true, planned


def _rows_to_keep(running: Bool[np.ndarray, "t b"]) -> Int[np.ndarray, " rows"]:
    """Return the rows of the next block: all, or, if few are running, these and some finished ones."""
    active, few = running.any(0), running.shape[1] // SHRINK
    if active.sum() > few:
        return np.arange(running.shape[1])
    return np.sort(np.argsort(~active, kind="stable")[:few])


def _take_rows(
    cache: Cache, last: Int[Array, " b"], rows: Int[np.ndarray, " rows"]
) -> tuple[Cache, Int[Array, " rows"]]:
    """Return some rows of a cache, which must not be compacted, and of the last tokens. The pool stays the same."""

    def take(x, axis):
        return put(np.take(on_host(x), rows, axis), *x.sharding.spec)

    layers, windows = jax.tree.map(partial(take, axis=1), (cache.layers, cache.sliding))
    counters = jax.tree.map(
        partial(take, axis=0), {x: getattr(cache, x) for x in ("seen", "origin", "dropped_slots")}
    )
    return dataclasses.replace(cache, layers=layers, sliding=windows, **counters), take(last, 0)


def _scatter_rows(
    batch: int, rows: Int[np.ndarray, " rows"], x: Shaped[np.ndarray, "..."]
) -> Shaped[np.ndarray, "..."]:
    """Return values of some rows at their places among all rows of the batch; the others are 0."""
    axis = 2 if x.ndim == 4 else 1
    all_rows = np.zeros((*x.shape[:axis], batch, *x.shape[axis + 1 :]), x.dtype)
    all_rows[(slice(None),) * axis + (rows,)] = x
    return all_rows


def _cut_answer(
    question: Question, output: Tokens, log_likelihoods: Float[np.ndarray, " t"], stop: Sequence[int]
) -> Answer:
    """Return the tokens after the question's last one, up to a stop token."""
    first = len(question.prompt) - 1
    span = slice(first, first + question.answer_tokens)
    tokens = output[span]
    if question.stops and (ends := np.flatnonzero(np.isin(tokens, stop))).size:
        tokens = tokens[: ends[0]]
    return Answer(
        tokens, float(log_likelihoods[span].sum(dtype=np.float64)) if question.teacher_forced else 0.0
    )


@partial(jax.jit, donate_argnums=2)
def _decode_block(
    model: Decoder,
    view: View,
    cache: Cache,
    last: Int[Array, " b"],
    inputs: Int[Array, "t b"],
    true: Int[Array, "t b"],
    running: Bool[Array, "t b"],
) -> tuple[Cache, Int[Array, " b"], tuple[Int[Array, "t b"], Float[Array, "t b"]], Before]:
    """Decode one step for each row of `inputs`. Sequences that are not running write nothing.

    Returns the cache, the last predicted token, the token predicted after each step with the log-probability of the
    `true` token (float32), and the cache's state before each step.
    """

    def feed_token(last, x):
        token, _, running = x
        return jnp.where(token == LAST, last, token), running

    def next_token(last, x, logits):
        _, true, _ = x
        logits = jax.sharding.reshard(logits, P(BATCH, None))
        new = jnp.argmax(logits, -1).astype(jnp.int32)
        truth = jnp.arange(logits.shape[1]) == true[:, None]
        log_likelihood = jnp.where(truth, logits, 0).sum(-1) - jax.nn.logsumexp(logits, -1)
        return new, (new, log_likelihood)

    return decode(model, view, cache, last, (inputs, true, running), feed_token, next_token)
