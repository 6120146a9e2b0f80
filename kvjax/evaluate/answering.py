"""Questions that are asked of a cached context, and the model's greedy answers.

A long question is read in one call, except for its last token. The rest is decoded token by token, by one program of a
few steps for every answer and text. A method with a selection also gets the question token by token, so that it selects
for each of its tokens, as Quest's own evaluation does.
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
LONG = 8
"""Questions of more tokens than this are read in a call of their own, which is another program."""
FEWER = 4
"""Once at most one in `FEWER` rows still runs, the batch shrinks to one in `FEWER` of its rows …"""
AHEAD = 32
"""… if at least this many steps remain, since another batch size is another program."""
OWN = -1
"""Stands for a token that is not given: the model's last token is fed instead."""


@dataclass(frozen=True)
class Answer:
    """An answer to a question."""

    tokens: Tokens
    log_likelihood: float
    """Log-likelihood in nats of a given text, each token after the true ones before it; 0 for other questions."""
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

    stop: tokens that end the answers to questions that say so. pace: decoding times are added to it. Raises
    CapacityError if the pool has no room for the answers.
    """
    with use_mesh(model):
        mark, origin = marked(cache), on_host(cache.origin)
        # each question decides by its own length, so that the rest of its batch changes nothing
        read = [
            len(q.prompt) - 1 if policy.host.selection is None and len(q.prompt) > LONG else 0
            for q in questions
        ]
        if any(read):
            first = [q.prompt[:count] for q, count in zip(questions, read, strict=True)]
            cache, _ = feed(model, policy.host, policy.extend, cache, first, chunk=CHUNK, grows=False)
            questions = [
                dataclasses.replace(q, prompt=q.prompt[count:])
                for q, count in zip(questions, read, strict=True)
            ]
        given, true, wanted = _feed_table(questions, cache.seen.shape[0])
        output, likely = np.zeros_like(given), np.zeros(given.shape, np.float32)
        stopped = np.zeros(given.shape[1], bool)
        last = put(np.zeros(given.shape[1], np.int32), BATCH)
        rows = np.arange(given.shape[1])
        watch.lap()
        for start in range(0, len(given), STEPS):
            block = slice(start, start + STEPS)
            running = wanted[block] & ~stopped
            if not running.any():
                break
            if len(rows) == len(stopped) and len(given) - start >= AHEAD and batch_shards() == 1:
                rows = _rows_to_go(running)
                if len(rows) < len(stopped):
                    cache, last = _take_rows(cache, last, rows)
            fed = (put(x[:, rows], None, BATCH) for x in (given[block], true[block], running))
            cache, last, new, before = _decode_block(model, policy.decode, cache, last, *fed)
            output[block, rows], likely[block, rows] = map(on_host, new)
            caches.check(cache, policy.host.name)
            seconds = watch.lap()
            if len(rows) == len(stopped):
                # a step costs the same however many of its rows are done
                pace.add(len(questions) * STEPS, seconds, watch.compiled)
            before = [_put_rows(len(stopped), rows, on_host(x)) for x in before]
            log_steps(before, origin, cache.window, count=STEPS, sequences=len(questions))
            for row, question in enumerate(questions):
                first = max(start, len(question.prompt) - 1)
                stopped[row] |= question.stops and bool(
                    np.isin(output[first : start + STEPS, row], stop).any()
                )
        cache = rolled_back(cache, mark)
    answers = [
        _cut_answer(question, output[:, row], likely[:, row], stop) for row, question in enumerate(questions)
    ]
    return answers, cache


def _feed_table(
    questions: Sequence[Question], rows: int
) -> tuple[Int[np.ndarray, "t b"], Int[np.ndarray, "t b"], Bool[np.ndarray, "t b"]]:
    """Return the tokens fed to each row, the true next tokens (where known), and a mask of the steps at which the row
    runs. The tables have whole blocks, for the longest question with its answer."""
    lines = [max(0, len(q) - 1) for q in questions]
    steps = -(-max(lines) // STEPS) * STEPS
    given, wanted = np.full((steps, rows), OWN, np.int32), np.zeros((steps, rows), bool)
    true = np.zeros_like(given)
    for row, (question, count) in enumerate(zip(questions, lines, strict=True)):
        known = np.append(question.prompt, question.answer) if question.given else question.prompt
        fed, following = known[:count], known[1:]
        given[: len(fed), row], true[: len(following), row] = fed, following
        wanted[:count, row] = True
    return given, true, wanted


def _rows_to_go(running: Bool[np.ndarray, "t b"]) -> Int[np.ndarray, " rows"]:
    """Return the rows to go on with: all, or, if few still run, these and some finished ones."""
    going, few = running.any(0), running.shape[1] // FEWER
    if going.sum() > few:
        return np.arange(running.shape[1])
    return np.sort(np.argsort(~going, kind="stable")[:few])


def _take_rows(
    cache: Cache, last: Int[Array, " b"], rows: Int[np.ndarray, " rows"]
) -> tuple[Cache, Int[Array, " rows"]]:
    """Return some rows of a cache that nothing compacts, and of the last tokens. The pool stays the same."""

    def of(x, axis):
        return put(np.take(on_host(x), rows, axis), *x.sharding.spec)

    layers, windows = jax.tree.map(partial(of, axis=1), (cache.layers, cache.sliding))
    small = jax.tree.map(partial(of, axis=0), {x: getattr(cache, x) for x in ("seen", "origin", "hidden")})
    return dataclasses.replace(cache, layers=layers, sliding=windows, **small), of(last, 0)


def _put_rows(
    batch: int, rows: Int[np.ndarray, " rows"], x: Shaped[np.ndarray, "..."]
) -> Shaped[np.ndarray, "..."]:
    """Return values of some rows in their places among all rows of the batch; the others are 0."""
    axis = 2 if x.ndim == 4 else 1
    everyone = np.zeros((*x.shape[:axis], batch, *x.shape[axis + 1 :]), x.dtype)
    everyone[(slice(None),) * axis + (rows,)] = x
    return everyone


def _cut_answer(
    question: Question, output: Tokens, likely: Float[np.ndarray, " t"], stop: Sequence[int]
) -> Answer:
    """Return the tokens after the question's last one, up to a stop token."""
    first = len(question.prompt) - 1
    span = slice(first, first + question.answer_tokens)
    tokens = output[span]
    if question.stops and (ends := np.flatnonzero(np.isin(tokens, stop))).size:
        tokens = tokens[: ends[0]]
    return Answer(tokens, float(likely[span].sum(dtype=np.float64)) if question.given else 0.0)


@partial(jax.jit, donate_argnums=2)
def _decode_block(
    model: Decoder,
    view: View,
    cache: Cache,
    last: Int[Array, " b"],
    given: Int[Array, "t b"],
    true: Int[Array, "t b"],
    running: Bool[Array, "t b"],
) -> tuple[Cache, Int[Array, " b"], tuple[Int[Array, "t b"], Float[Array, "t b"]], Before]:
    """Decode one step for each row of `given`. Sequences that are not running write nothing.

    Returns the cache, the last predicted token, the token predicted after each step with the log-probability of the
    `true` one (float32), and the cache's state before each step.
    """

    def feed_token(last, x):
        given, _, running = x
        return jnp.where(given == OWN, last, given), running

    def next_token(last, x, logits):
        _, true, _ = x
        logits = jax.sharding.reshard(logits, P(BATCH, None))
        new = jnp.argmax(logits, -1).astype(jnp.int32)
        truth = jnp.arange(logits.shape[1]) == true[:, None]
        likely = jnp.where(truth, logits, 0).sum(-1) - jax.nn.logsumexp(logits, -1)
        return new, (new, likely)

    return decode(model, view, cache, last, (given, true, running), feed_token, next_token)
