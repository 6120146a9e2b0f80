"""Questions and answers token by token: what a cache of a context is asked is read as decoding reads it.

So a method that chooses what a query reads chooses for the question too (as Quest's own evaluation does), the footprint
counts each step, and one program of a few steps serves every question, answer and text.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from kvjax import cache as caches
from kvjax.cache import Cache
from kvjax.calls import Calls
from kvjax.evaluate.asked import Asked
from kvjax.evaluate.pace import Pace
from kvjax.evaluate.tasks.task import Tokens
from kvjax.feeding import extend
from kvjax.mesh import BATCH, P, put, use_mesh
from kvjax.models.decoder import Decoder
from kvjax.policies.policy import Policy
from kvjax.stopwatch import Stopwatch

STEPS = 4
"""Tokens between two looks of the host."""
OWN = -1
"""In place of a token that is given: what the model said last."""


def answers(
    model: Decoder,
    policy: Policy,
    cache: Cache,
    questions: Sequence[Asked],
    *,
    stop: Sequence[int],
    calls: Calls,
    pace: Pace,
    watch: Stopwatch,
) -> list[Tokens]:
    """What the model says to each sequence's question, greedily; `cache` stays as it is.

    stop: tokens that end the answers to questions that say so. calls, pace: records to add to. Raises CapacityError if
    the pool has no room for the answers.
    """
    given, wanted = _fed(questions, cache.seen.shape[0])
    said = np.zeros_like(given)
    stopped = np.zeros(given.shape[1], bool)
    with use_mesh(model):
        cache = jax.tree.map(jnp.copy, cache)
        last = put(np.zeros(given.shape[1], np.int32), BATCH)
        watch.lap()
        for start in range(0, len(given), STEPS):
            block = slice(start, start + STEPS)
            running = wanted[block] & ~stopped
            if not running.any():
                break
            fed = put(given[block], None, BATCH), put(running, None, BATCH)
            cache, last, new, before = _say(model, policy.traced, cache, last, *fed)
            said[block] = np.asarray(new)
            caches.check(cache, policy)
            pace.add(int(running[:, : len(questions)].sum()), watch.lap(), watch.compiled)
            lengths, seen, ran = map(np.asarray, before)
            calls.decoded(lengths, seen, ran, cache.window, len(questions))
            for row, question in enumerate(questions):
                first = max(start, len(question.prompt) - 1)
                stopped[row] |= question.stops and bool(np.isin(said[first : start + STEPS, row], stop).any())
    return [_answer(question, said[:, row], stop) for row, question in enumerate(questions)]


def _fed(questions: Sequence[Asked], rows: int) -> tuple[Int[np.ndarray, "t b"], Bool[np.ndarray, "t b"]]:
    """What is fed to each row, and where it is running: whole blocks for the longest question with its answer."""
    lines = [len(q.prompt) + q.answer_tokens - 1 for q in questions]
    steps = -(-max(lines) // STEPS) * STEPS
    given, wanted = np.full((steps, rows), OWN, np.int32), np.zeros((steps, rows), bool)
    for row, (question, count) in enumerate(zip(questions, lines, strict=True)):
        known = question.prompt if question.given is None else np.append(question.prompt, question.given[:-1])
        given[: len(known), row] = known
        wanted[:count, row] = True
    return given, wanted


def _answer(question: Asked, said: Tokens, stop: Sequence[int]) -> Tokens:
    """The tokens said after the question's last one, without a stop token and what follows it."""
    first = len(question.prompt) - 1
    answer = said[first : first + question.answer_tokens]
    if question.stops:
        ends = np.flatnonzero(np.isin(answer, stop))
        return answer[: ends[0]] if ends.size else answer
    return answer


@partial(jax.jit, donate_argnums=2)
def _say(
    model: Decoder,
    policy: Policy,
    cache: Cache,
    last: Int[Array, " b"],
    given: Int[Array, "t b"],
    running: Bool[Array, "t b"],
):
    """A step for each row of `given`. Rows that are not running write nothing.

    Returns the cache, the token said last, those said after each step, and what the cache was before it (as
    `sampling.decode_block` does).
    """

    def one(carry, xs):
        (cache, last), (given, running) = carry, xs
        before = cache.layers.length, cache.seen, running
        token = jnp.where(given == OWN, last, given)
        cache, hidden = extend(model, policy, cache, token[:, None], running.astype(jnp.int32))
        logits = jax.sharding.reshard(model.logits(hidden)[:, 0], P(BATCH, None))
        new = jnp.argmax(logits, -1).astype(jnp.int32)
        return (cache, new), (new, before)

    (cache, last), (said, before) = jax.lax.scan(one, (cache, last), (given, running))
    return cache, last, said, before
