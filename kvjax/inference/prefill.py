"""Prefill: prompts into a new cache, and questions into a copy of one."""

import functools
import inspect
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax import cache as caches
from kvjax.cache import Cache
from kvjax.errors import UserError, named_arguments, whole_number
from kvjax.inference import triggers
from kvjax.inference.allocation import copy_for_question, new_cache, resize_after_prompt
from kvjax.inference.checks import check_arguments, check_continues, check_length, check_observers
from kvjax.inference.forward import drop_observation_state, feed, padded
from kvjax.mesh import on_host, use_mesh
from kvjax.models.chat import Prompts, token_rows
from kvjax.models.decoder import Decoder
from kvjax.policies.compiled import CompiledPolicy
from kvjax.policies.policy import Policy

CHUNK = 16384
"""Prompt tokens in one call. Longer prompts are read in chunks."""


@named_arguments()
def prefill(
    model: Decoder,
    tokens: Prompts,
    *,
    tokenizer: Any = None,
    policy: Policy | None = None,
    max_new_tokens: int = 0,
    capacity: int | str | None = None,
    page_size: int | None = None,
    chunk: int = CHUNK,
    observers: Prompts | None = None,
) -> Cache:
    """Run prompts and keep what the policy keeps of them.

    Args:
        tokens: token ids, one sequence a prompt, of any lengths; with a tokenizer also texts, and chats as lists of
            messages. Texts and chats go through its chat template, if it has one, and the user's turn stays open for
            the question of a later call of `generate`.
        tokenizer: from `kvjax.load`, for text.
        policy: from `make_policy`; None is the full cache.
        max_new_tokens: the number of further tokens that pages are allocated for. Without a stated capacity `generate`
            allocates more itself.
        capacity: the largest size of the pool: entries per kv head on average (an int), bytes in all ("2GiB"), or a
            share of each device's memory ("30%"). None: the pool begins with the policy's expected need and a margin,
            and grows if more is needed, up to the devices' memory.
        page_size: tokens per page. None: 64 on a TPU (128 for int8 entries), which decodes faster from larger pages,
            and 16 elsewhere and for a policy with a selection, which chooses among pages.
        chunk: prompt tokens in one call; the result does not depend on it.
        observers: token ids that follow each prompt. An eviction that compacts at the prompt's end observes them among
            the last tokens. They are then dropped: the cache ends with the prompt.

    Returns:
        The cache, to pass to `generate(…, cache=cache)` with a question, as often as wanted.

    Raises:
        UserError: a prompt is empty, a token is outside the vocabulary, observers are given for a policy that compacts
            while it decodes or does not observe tokens, or activations or scores are not finite.
        CapacityError: the pool ran out, or the capacity is too small for the windows. The message names a sufficient
            one.
    """
    check_arguments("prefill", model, policy)
    max_new_tokens = whole_number("prefill", "max_new_tokens", max_new_tokens, 0)
    page_size = None if page_size is None else whole_number("prefill", "page_size", page_size)
    chunk = whole_number("prefill", "chunk", chunk)
    vocabulary = model.config.vocab_size
    rows = token_rows(tokens, vocabulary, tokenizer, "beginning")
    observer_rows = None if observers is None else token_rows(observers, vocabulary, tokenizer, "end")
    with use_mesh(model):
        compiled = (policy or Policy()).compile(model)
        if observer_rows is not None:
            check_observers(compiled.host, rows, observer_rows)
        cache, _ = read(
            model, compiled, rows, max_new_tokens, chunk,
            observers=observer_rows, page_size=page_size, capacity=capacity,
        )  # fmt: skip
        caches.check(cache, compiled.host.name, max_new_tokens)
        return cache


def read(
    model: Decoder,
    policy: CompiledPolicy,
    rows: list[Int[np.ndarray, " _"]],
    new_tokens: int,
    chunk: int,
    *,
    page_size: int | None = None,
    capacity: int | str | None = None,
    observers: Sequence[Int[np.ndarray, " _"]] | None = None,
) -> tuple[Cache, Float[Array, "b v"]]:
    """Read prompts into a new cache and compact it as the policy's schedule says.

    Args:
        new_tokens: tokens that will follow.
        page_size, capacity, chunk: as in `prefill`.
        observers: tokens that are read after each row for an eviction to observe, and then dropped; None: those of the
            schedule, if it has any.

    Returns:
        the cache, with pages for `new_tokens` more tokens, and the logits after each row.
    """
    host, observer_tokens = policy.host, max((row.size for row in observers or ()), default=0)
    cache = new_cache(model, policy, rows, max(new_tokens, observer_tokens), page_size, capacity)
    check_length(model, rows, new_tokens)
    steps = reading(model, policy, rows, chunk, new_tokens=new_tokens, observers=observers)
    cache, after = _finished(steps, cache)
    return resize_after_prompt(host, cache, new_tokens), after


Steps = Generator[Any, Cache, tuple[Cache, Float[Array, "b v"]]]
"""Steps that read prompts. A step is sent the cache, which is donated, and yields it. The last one returns it with the
logits after each row."""


def next_step(steps: Steps, cache: Cache) -> tuple[Cache, Float[Array, "b v"] | None]:
    """Return the cache (donated) after the next step, and at the end the logits after each row."""
    try:
        if inspect.getgeneratorstate(steps) == inspect.GEN_CREATED:
            next(steps)  # up to where it takes the first cache
        return steps.send(cache), None
    except StopIteration as end:
        return end.value


def _finished(steps: Steps, cache: Cache) -> tuple[Cache, Float[Array, "b v"]]:
    """Return the cache (donated) after all steps, and the logits after each row."""
    after = None
    while after is None:
        cache, after = next_step(steps, cache)
    return cache, after


def reading(
    model: Decoder,
    policy: CompiledPolicy,
    rows: list[Int[np.ndarray, " _"]],
    chunk: int,
    *,
    new_tokens: int = 0,
    observers: Sequence[Int[np.ndarray, " _"]] | None = None,
    grows: bool = True,
    continues: bool = False,
) -> Steps:
    """Read prompts in steps, for `next_step`: calls of at most `chunk` tokens with the compactions that follow them,
    and at the prompts' end the observers, each reconstruction pass and a compaction.

    Args:
        grows: as in `feed`.
        continues: True if the rows continue a prompt whose end was read before. Only policies that compact while
            decoding then compact again.

    The other arguments are as in `read`.
    """
    host, schedule, longest = policy.host, policy.host.schedule, max(row.size for row in rows)
    if continues and not host.compacts_answers:
        schedule = None
    view = policy.extend if continues else policy.read
    run = functools.partial(feed, model, host, view, chunk=chunk, new_tokens=new_tokens, grows=grows)

    def parts(size: int) -> Iterator[tuple[int, list[Int[np.ndarray, " _"]], int]]:
        for start in range(0, longest, size):
            yield start, [row[start : start + size] for row in rows], max(0, longest - start - size)

    cache = yield None
    after = None
    if schedule is not None and schedule.trigger.in_chunks:
        observers = triggers.guidance(schedule, len(rows)) if observers is None else observers
        for start, part, left in parts(schedule.trigger.chunk):
            before = jnp.copy(cache.layers.length) if schedule.by_chunk and not schedule.in_ranges else None
            cache, after = run(cache, part, logits=after, new_tokens=new_tokens + left)
            cache = triggers.after_chunk(model, policy, cache, rows, observers, start, before, run)
            if left:
                cache = yield cache
        assert after is not None
        return cache, after
    for _, part, left in parts(chunk):
        cache, after = run(cache, part, logits=after, new_tokens=new_tokens + left)
        if left:
            cache = yield cache
    assert after is not None
    if schedule is not None and schedule.trigger.while_decoding:
        cache = triggers.evict_to_budget(model, policy, cache, np.ones(len(rows), bool))
    elif schedule is not None:
        cache = yield cache
        observers = triggers.guidance(schedule, len(rows)) if observers is None else observers
        cache = yield from triggers.at_prompt_end(model, policy, cache, rows, run, observers)
    return cache, after


def extend(
    model: Decoder,
    policy: CompiledPolicy,
    cache: Cache,
    rows: list[Int[np.ndarray, " _"]],
    new_tokens: int,
    chunk: int,
) -> tuple[Cache, Float[Array, "b v"]]:
    """Read tokens that continue each sequence of a cache, into a copy of it. Arguments as in `read`.

    Returns the copy, without state that only the compaction of the prompt needed, and the logits after each row.
    """
    check_continues(cache, model, policy, rows)
    check_length(model, rows, new_tokens, cache)
    cache = copy_for_question(policy.host, cache, max(row.size for row in rows), new_tokens)
    cache = drop_observation_state(cache, policy.decode)
    steps = reading(model, policy, rows, chunk, new_tokens=new_tokens, continues=True)
    return _finished(steps, cache)


@named_arguments()
def logits(model: Decoder, tokens: Prompts) -> Float[np.ndarray, "b t v"]:
    """Return next-token logits after every token of sequences of one length, by plain causal attention (float32).

    Raises UserError for sequences of several lengths, and if the logits are not finite.
    """
    check_arguments("logits", model)
    with use_mesh(model):
        rows = token_rows(tokens, model.config.vocab_size)
        if len({row.size for row in rows}) > 1:
            raise UserError(
                f"logits: sequences must have one length, got {sorted({row.size for row in rows})}"
            )
        batch, valid = padded(rows, rows[0].size)
        result, finite = _all_logits(model, batch, valid)
        if not on_host(finite):
            raise caches.not_finite(model.dtype)
        return on_host(result)[: len(rows)]


@jax.jit
def _all_logits(model, tokens, valid):
    result = model.logits(model.hidden(tokens))
    return result, (jnp.isfinite(result).all((1, 2)) | (valid == 0)).all()
