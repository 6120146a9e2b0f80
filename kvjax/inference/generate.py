"""Generating answers in blocks of tokens.

A block is one `lax.scan` over tokens with the cache as its carry. The host looks at tokens, at who has ended and at the
pool's free count between blocks only.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax import cache as caches
from kvjax.cache import Cache, Stats
from kvjax.errors import UserError, named_arguments, shown, whole_number
from kvjax.inference import eviction
from kvjax.inference.allocation import copy_for_question, new_cache
from kvjax.inference.checks import (
    Prompts,
    check_arguments,
    check_continues,
    check_in_front,
    check_length,
    token_rows,
    tokens_of,
)
from kvjax.inference.decode import Before, Recurring, decode
from kvjax.inference.footprint_log import log_steps
from kvjax.inference.forward import feed
from kvjax.inference.observations import drop_observation_state
from kvjax.inference.prefill import CHUNK, compiled_policy
from kvjax.inference.sampler import (
    Counts,
    Logprobs,
    Sampler,
    count_tokens,
    draw,
    log_probabilities,
    make_sampler,
)
from kvjax.inference.sharing import branched, placed, places
from kvjax.inference.text import cut, decoded, stop_tokens_of
from kvjax.mesh import BATCH, put, use_mesh
from kvjax.models.decoder import Decoder
from kvjax.policies.compiled import View
from kvjax.policies.policy import Policy
from kvjax.sampling_params import SamplingParams

BLOCK = 16
"""Tokens between two looks of the host at what was generated."""
GREEDY = SamplingParams()


class AnswerLogprobs(NamedTuple):
    """Log-probabilities of an answer's tokens by the model's own distribution."""

    chosen: Float[np.ndarray, " t"]
    alternatives: list[dict[int, float]]
    """The most likely tokens at each place, with theirs."""


class Block(NamedTuple):
    """New tokens of every answer, and the cache after them."""

    tokens: list[np.ndarray]
    """New tokens of each answer, its stop token included."""
    cache: Cache
    """It is donated to the next block: read what you want of it at once."""
    logprobs: list[AnswerLogprobs] | None = None


@dataclasses.dataclass(frozen=True)
class Generation:
    """Answers to prompts, one entry an answer in every list."""

    tokens: list[np.ndarray]
    """Without the stop token or the stop text."""
    finish_reasons: list[Literal["stop", "length"]]
    stats: Stats
    """Sizes of the cache at the end, with its sequences in the answers' order."""
    prompts: list[int]
    """Index of each answer's prompt."""
    texts: list[str] | None = None
    """None without a tokenizer."""
    logprobs: list[AnswerLogprobs] | None = None

    def __repr__(self) -> str:
        """In two or three lines: how long the answers are and why they ended, what they say, what the cache holds."""
        counts = ", ".join(str(len(tokens)) for tokens in self.tokens[:8]) + (
            ", …" if len(self.tokens) > 8 else ""
        )
        reasons = ", ".join(
            f"{self.finish_reasons.count(x)} by {x}" for x in dict.fromkeys(self.finish_reasons)
        )
        texts = "" if self.texts is None else f"\n  texts={shown(self.texts)},"
        lengths = f"{len(self.tokens)} answers of {counts} tokens"
        return f"Generation({lengths}, ended {reasons},{texts}\n  stats={self.stats})"


@functools.partial(jax.jit, donate_argnums=2, static_argnames=("count", "implementation"))
def decode_block(
    model: Decoder,
    view: View,
    cache: Cache,
    token: Int[Array, " b"],
    running: Bool[Array, " b"],
    sampler: Sampler,
    drawn_before: Int[Array, ""],
    counts: Counts | None = None,
    *,
    count: int,
    limit: Int[Array, ""] | None = None,
    recurring: Recurring | None = None,
    implementation: str | None = None,
) -> tuple[
    Cache,
    tuple[Int[Array, "count b"], Logprobs | None],
    tuple[Int[Array, " b"], Bool[Array, " b"], Counts | None],
    Before,
]:
    """Feed `token`, then what was drawn, `count` times in all. Rows that are not `running` write nothing, and after
    `limit` tokens (None: `count`) none does.

    What is drawn does not depend on the blocks, but on how many were `drawn_before`.

    Returns the cache, the drawn tokens with their log-probabilities if these are wanted, the last tokens with who is
    still running and the tokens' counts, and what the cache was before each token.
    """
    limit = jnp.int32(count) if limit is None else limit

    def feed_last(carry, index):
        token, running, _ = carry
        return token, running & (index < limit)

    def draw_next(carry, index, logits):
        token, running, counts = carry
        live = running & (index < limit)
        new = jnp.where(live, draw(sampler, logits, drawn_before + index, counts), token)
        counts = None if counts is None else counts.with_token(new, live)
        running &= ~(live & sampler.ends(new, drawn_before + index + 1))
        return (new, running, counts), (new, log_probabilities(sampler, logits, new))

    cache, carry, drawn, before = decode(
        model, view, cache, (token, running, counts), jnp.arange(count), feed_last, draw_next,
        recurring=recurring, implementation=implementation,
    )  # fmt: skip
    return cache, drawn, carry, before


@jax.jit
def _first(sampler: Sampler, logits: Float[Array, "b v"], live: Bool[Array, " b"], counts: Counts | None):
    """Draw the first tokens: they, their log-probabilities, who goes on, and the counts."""
    token = draw(sampler, logits, 0, counts)
    counts = None if counts is None else counts.with_token(token, live)
    return token, log_probabilities(sampler, logits, token), live & ~sampler.ends(token, 1), counts


@dataclasses.dataclass
class _Answers:
    """The answers of a batch as they grow, and which of them have ended."""

    params: list[SamplingParams]
    ends: list[tuple[int, ...]]
    """Stop tokens of each."""
    stops: list[tuple[str, ...]]
    """Stop texts of each."""
    order: Sequence[int]
    """The row of each in the batch."""
    tokenizer: Any
    tokens: list[np.ndarray] = dataclasses.field(default_factory=list)

    def block(
        self, drawn: tuple[Array, Logprobs | None], running: Bool[np.ndarray, " rows"], most: int
    ) -> tuple[list[np.ndarray], list[AnswerLogprobs] | None]:
        """Return the own tokens of a block [count b], of which the first `most` count: up to and with the stop token,
        nothing of an answer that had ended."""
        tokens, found = np.asarray(drawn[0])[:most], drawn[1]
        made = [len(x) for x in self.tokens] or [0] * len(self.order)
        counts = []
        for row, one, ends, had in zip(self.order, self.params, self.ends, made, strict=True):
            stops = np.flatnonzero(np.isin(tokens[:, row], ends))
            count = stops[0] + 1 if stops.size else len(tokens)
            counts.append(min(count, one.max_new_tokens - had) if running[row] else 0)
        new = [tokens[:count, row] for row, count in zip(self.order, counts, strict=True)]
        before = self.tokens or [part[:0] for part in new]
        self.tokens = [np.concatenate(pair) for pair in zip(before, new, strict=True)]
        if found is None:
            return new, None
        chosen, ids, values = map(np.asarray, (found.chosen, found.tokens, found.values))
        return new, [
            AnswerLogprobs(
                chosen[:count, row],
                [
                    dict(zip(*place, strict=True))
                    for place in zip(
                        ids[:count, row, : one.logprobs or 0].tolist(),
                        values[:count, row, : one.logprobs or 0].tolist(),
                        strict=True,
                    )
                ],
            )
            for row, count, one in zip(self.order, counts, self.params, strict=True)
        ]

    def still(self, running: Bool[Array, " b"]) -> Bool[Array, " b"]:
        """Return who still runs: not those in whose answer a stop text has come."""
        if not any(self.stops):
            return running
        ended = np.zeros(running.shape[0], bool)
        for row, tokens, stop in zip(self.order, self.tokens, self.stops, strict=True):
            ended[row] = cut(tokens, self.tokenizer, stop) is not None
        return running & ~put(ended, BATCH)


@named_arguments()
def stream(
    model: Decoder,
    prompts: Prompts,
    sampling: SamplingParams | Sequence[SamplingParams] = GREEDY,
    *,
    tokenizer: Any = None,
    policy: Policy | None = None,
    cache: Cache | None = None,
    share: Any = False,
    capacity: int | str | None = None,
    page_size: int | None = None,
    chunk: int = CHUNK,
    block: int = BLOCK,
    implementation: str | None = None,
) -> Iterator[Block]:
    """Generate, block by block. Arguments and errors are those of `generate`.

    The first block is the single token that prefill gives; the next `block` tokens are computed only when asked for.
    The text that ends an answer is among its tokens, as a stop token is.
    """
    check_arguments("generate", model, policy, cache, implementation)
    page_size = None if page_size is None else whole_number("generate", "page_size", page_size)
    chunk, block = whole_number("generate", "chunk", chunk), whole_number("generate", "block", block)
    asked = token_rows(model, tokens_of(prompts, tokenizer, "whole" if cache is None else "end"))
    params, numbers = sampling_of(sampling, len(asked))
    _check_shared(params, cache, share)
    stops, ids = zip(*(stop_tokens_of(one.stop, tokenizer) for one in params), strict=True)
    params = [
        dataclasses.replace(one, stop_token_ids=(*one.stop_token_ids, *own))
        for one, own in zip(params, ids, strict=True)
    ]
    rows = [row for row, one in zip(asked, _each(sampling, asked), strict=True) for _ in range(one.n)]
    longest_answer = max(one.max_new_tokens for one in params)
    # the caller's code runs between the blocks, so no mesh may stay set there
    with use_mesh(model):
        compiled = compiled_policy(policy, model)
        host = compiled.host
        order: Sequence[int] = range(len(rows))
        if cache is None:
            held = new_cache(model, compiled, rows, longest_answer, page_size, capacity)
            check_length(model, rows, longest_answer)
            held, after = eviction.read(model, compiled, held, rows, longest_answer, chunk, implementation)
            held = drop_observation_state(held, compiled.decode)
        else:
            if capacity is not None:
                raise UserError(
                    "capacity is stated where the cache is made (prefill), not where it is continued"
                )
            if share is not False:
                cache, order = branched(cache, share, params[0].n, len(rows))
                rows = placed(rows, order, cache.seen.shape[0])
            else:
                check_in_front("generate", cache)
            check_continues(cache, model, compiled, rows)
            check_length(model, rows, longest_answer, cache)
            longest = max(row.size for row in rows)
            held = copy_for_question(host, cache, longest, longest_answer)
            held = drop_observation_state(held, compiled.decode)
            held, after = feed(
                model, host, compiled.extend, held, rows, chunk, implementation, room=longest_answer
            )
            held = eviction.at_end(model, compiled, held, len(rows))
        batch, vocabulary = held.seen.shape[0], model.config.vocab_size
        eos = model.config.eos_ids
        sampler = make_sampler(params, numbers, eos, vocabulary, order, batch)
        of_rows = placed(rows, order, batch) if share is False else rows
        counts = count_tokens(sampler, of_rows, vocabulary)
        live = np.isin(np.arange(batch), order)
        token, found, running, counts = _first(sampler, after, put(live, BATCH), counts)
        ends = [(*(() if one.ignore_eos else eos), *one.stop_token_ids) for one in params]
        answers = _Answers(params, ends, list(stops), order, tokenizer)
        new, logprobs = answers.block(jax.tree.map(lambda x: x[None], (token, found)), live, 1)
        caches.check(held, host.name, longest_answer)
        running = answers.still(running)
        again = eviction.recurring(host, held)
    yield Block(new, held, logprobs)
    made = 1
    while made < longest_answer and (before := np.asarray(running)[: len(rows)]).any():
        with use_mesh(model):
            left = longest_answer - made
            count, size, held = eviction.next_block(host, held, before, made - 1, left, block)
            held, drawn, (token, running, counts), fed = decode_block(
                model, compiled.decode, held, token, running, sampler, np.int32(made), counts,
                limit=np.int32(count), count=size, recurring=again, implementation=implementation,
            )  # fmt: skip
        caches.check(held, host.name, left - count)
        log_steps(fed, count=count, window=held.window, sequences=len(rows))
        made += count
        new, logprobs = answers.block(drawn, before, count)
        with use_mesh(model):
            running = answers.still(running)
            held = eviction.after_block(model, compiled, held, np.asarray(running)[: len(rows)], made - 1)
        yield Block(new, held, logprobs)


def _each(
    sampling: SamplingParams | Sequence[SamplingParams], prompts: Sequence[Any]
) -> list[SamplingParams]:
    """Return the sampling parameters of each prompt. Raises UserError for another number of them."""
    if isinstance(sampling, SamplingParams):
        return [sampling] * len(prompts)
    given = list(sampling) if isinstance(sampling, Sequence) else []
    if len(given) != len(prompts) or not all(isinstance(one, SamplingParams) for one in given):
        raise UserError(
            f"generate: sampling must be one SamplingParams or one for each of {len(prompts)} prompts, got "
            f"{shown(sampling)}"
        )
    return given


def sampling_of(
    sampling: SamplingParams | Sequence[SamplingParams], prompts: int
) -> tuple[list[SamplingParams], list[int]]:
    """Return the parameters of each answer, and its number among the answers of its prompt."""
    each = _each(sampling, range(prompts))
    return [one for one in each for _ in range(one.n)], [i for one in each for i in range(one.n)]


def _check_shared(params: Sequence[SamplingParams], cache: Cache | None, share: Any) -> None:
    """Refuse sharing without a cache, and several answers of a cache that is not shared."""
    if share is not False and cache is None:
        raise UserError("generate: share is for questions of a cache: give cache=, from prefill")
    if share is not False and len({one.n for one in params}) > 1:
        raise UserError("generate: with share every prompt must have the same n")
    if cache is not None and share is False and any(one.n > 1 for one in params):
        raise UserError(
            "generate: n answers of a cache are forks of it, which share its pages: give share=True"
        )


@named_arguments()
def generate(
    model: Decoder,
    prompts: Prompts,
    sampling: SamplingParams | Sequence[SamplingParams] = GREEDY,
    *,
    tokenizer: Any = None,
    policy: Policy | None = None,
    cache: Cache | None = None,
    share: Any = False,
    capacity: int | str | None = None,
    page_size: int | None = None,
    chunk: int = CHUNK,
    block: int = BLOCK,
    implementation: str | None = None,
) -> Generation:
    """Answer prompts, as one batch.

    Args:
        prompts: token ids, one sequence a prompt, of any lengths; with a tokenizer also texts, and chats as lists of
            messages. A text is the user's turn where the tokenizer has a chat template, and with a cache the end of it.
        sampling: one for all prompts or one for each.
        tokenizer: from `kvjax.load_tokenizer`, for text; answers then come with theirs.
        policy: from `make_policy`; None is the full cache.
        cache: from `prefill`: the prompts continue it. It is copied, so it stays usable for the next question.
        share: True: several questions of each of the cache's contexts, as many of each, one context's after another's;
            or a list with the context of each question, from 0. They are a batch of forks which hold the context's
            pages together and copy only those that they write to; on a mesh a fork runs where its context is.
        capacity, page_size, chunk: as in `prefill`; a cache that is continued keeps its capacity and
            page size.
        block: tokens between two looks of the host.

    Returns:
        The answers, the n of a prompt one after another.

    Raises:
        UserError, CapacityError: as in `prefill`, and for logits that are not finite; never after a wrong token was
            returned.
    """
    check_arguments("generate", model, policy, cache, implementation)
    asked = tokens_of(prompts, tokenizer, "whole" if cache is None else "end")
    blocks: list[Block] = []
    for new in stream(
        model, asked, sampling, tokenizer=tokenizer, policy=policy, cache=cache, share=share, capacity=capacity,
        page_size=page_size, chunk=chunk, block=block, implementation=implementation,
    ):  # fmt: skip
        stats = caches.stats(new.cache, len(new.tokens) if share is False else None)
        blocks.append(Block(new.tokens, new.cache, new.logprobs))
    each = _each(sampling, asked)
    params, _ = sampling_of(sampling, len(asked))
    if share is not False and cache is not None:
        with use_mesh(model):
            order = places(cache, share, params[0].n, len(params))[1]
        stats = dataclasses.replace(stats, entries=stats.entries[:, order], tokens=stats.tokens[order])
    numbers = [index for index, one in enumerate(each) for _ in range(one.n)]
    return whole_answers(blocks, params, numbers, stats, model.config.eos_ids, tokenizer)


def whole_answers(
    blocks: Sequence[Block],
    params: Sequence[SamplingParams],
    prompts: list[int],
    stats: Stats,
    eos: Sequence[int],
    tokenizer: Any,
) -> Generation:
    """Return the answers of the blocks that `stream` gave, each whole, without the stop token or the text that ended
    it."""
    tokens, reasons, texts = [], [], []
    lines = map(np.concatenate, zip(*(block.tokens for block in blocks), strict=True))
    for line, one in zip(lines, params, strict=True):
        stop, ids = stop_tokens_of(one.stop, tokenizer)
        ends = (*(() if one.ignore_eos else eos), *one.stop_token_ids, *ids)
        stopped = line.size > 0 and bool(np.isin(line[-1], ends))
        line = line[:-1] if stopped else line
        found = cut(line, tokenizer, stop)
        tokens.append(line if found is None else line[: found[0]])
        reasons.append("stop" if found or stopped else "length")
        if tokenizer is not None:
            texts.append(decoded(tokenizer, line) if found is None else found[1])
    logprobs = None
    if any(one.logprobs is not None for one in params):
        parts = zip(*(block.logprobs or [] for block in blocks), strict=True)
        logprobs = [
            AnswerLogprobs(
                np.concatenate([x.chosen for x in own])[: len(line)],
                [place for x in own for place in x.alternatives][: len(line)],
            )
            for own, line in zip(parts, tokens, strict=True)
        ]
    return Generation(tokens, reasons, stats, prompts, texts or None, logprobs)
