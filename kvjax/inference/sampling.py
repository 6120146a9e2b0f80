"""Running a model over the cache: prefill, logits, and generation in blocks of tokens.

Text comes block by block: a block is one `lax.scan` over tokens with the cache as its carry, and the host looks at
tokens, stop flags and the pool's free count between blocks only.
"""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax import cache as caches
from kvjax.cache import Cache, Stats
from kvjax.errors import UserError, named_arguments, one_of, shown, whole_number
from kvjax.inference import schedule
from kvjax.inference.checks import (
    Prompts,
    check_arguments,
    check_continues,
    check_in_front,
    check_length,
    check_observers,
    check_samples,
    stop_tokens,
    token_rows,
    tokens_of,
)
from kvjax.inference.decode import Before, Recurring, decode
from kvjax.inference.draw import Draw, checked_key, draw_token, nth_key
from kvjax.inference.footprint_log import log_steps
from kvjax.inference.forward import feed, padded
from kvjax.inference.room import begin, with_room
from kvjax.inference.settled import drop_observation_state
from kvjax.inference.sharing import branched, placed, places
from kvjax.inference.stop import Watch, cut, decoded, stop_texts
from kvjax.mesh import BATCH, put, use_mesh
from kvjax.models.decoder import Decoder
from kvjax.policies import make_policy
from kvjax.policies.compiled import CompiledPolicy, View
from kvjax.policies.policy import Policy

CHUNK = 16384
"""Prompt tokens in one call; longer prompts come in chunks of it."""
BLOCK = 16
"""Tokens between two looks of the host at what was generated."""


@dataclasses.dataclass(frozen=True)
class Sampled:
    """What `sample` returns."""

    tokens: list[np.ndarray]
    """New tokens of each prompt, the stop token or text (if one came) not included."""
    stop_reasons: list[Literal["eos", "stop", "length"]]
    """By answer: a stop token, a stop text, or max_new_tokens."""
    stats: Stats
    """Of the cache at the end, its sequences in the answers' order."""
    texts: list[str] | None = None
    """The answers' text, if there is a tokenizer."""
    logprobs: list[np.ndarray] | None = None
    """Of each answer's tokens, float32, if they were wanted."""

    def __repr__(self) -> str:
        """In two or three lines: how long the answers are and why they ended, what they say, what the cache holds."""
        counts = ", ".join(str(len(tokens)) for tokens in self.tokens[:8]) + (
            ", …" if len(self.tokens) > 8 else ""
        )
        reasons = ", ".join(f"{self.stop_reasons.count(x)} by {x}" for x in dict.fromkeys(self.stop_reasons))
        texts = "" if self.texts is None else f"\n  texts={shown(self.texts)},"
        return f"Sampled({len(self.tokens)} answers of {counts} tokens, ended {reasons},{texts}\n  stats={self.stats})"


@functools.partial(jax.jit, donate_argnums=2, static_argnames=("count", "greedy", "implementation"))
def decode_block(
    model: Decoder,
    view: View,
    cache: Cache,
    token: Int[Array, " b"],
    running: Bool[Array, " b"],
    draw: Draw,
    key: jax.Array,
    drawn_before: Int[Array, ""],
    *,
    count: int,
    greedy: bool,
    limit: Int[Array, ""] | None = None,
    recurring: Recurring | None = None,
    implementation: str | None = None,
) -> tuple[
    Cache,
    tuple[Int[Array, "count b"], Float[Array, "count b"] | None],
    Int[Array, " b"],
    Bool[Array, " b"],
    Before,
]:
    """Feed `token`, then what was drawn, `count` times in all. Rows that are not `running` write nothing, and after
    `limit` tokens (None: `count`) none does.

    What is drawn does not depend on the blocks, but on how many were `drawn_before`.

    Returns the cache, the drawn tokens with their log-probabilities if these are wanted, the last tokens, which rows
    are still running, and what the cache was before each token.
    """

    limit = jnp.int32(count) if limit is None else limit

    def feed_last(carry, index):
        token, running = carry
        return token, running & (index < limit)

    def draw_next(carry, index, logits):
        token, running = carry
        new = draw_token(logits, draw, nth_key(key, drawn_before + index), greedy)
        new = jnp.where(running & (index < limit), new, token)
        return (new, running & ~draw.ends(new)), (new, draw.logprob(logits, new))

    cache, (token, running), drawn, before = decode(
        model,
        view,
        cache,
        (token, running),
        jnp.arange(count),
        feed_last,
        draw_next,
        recurring=recurring,
        implementation=implementation,
    )
    return cache, drawn, token, running, before


_first_draw = jax.jit(draw_token, static_argnums=3)
_first_logprob = jax.jit(Draw.logprob)


def _compiled(policy: Policy | None, model: Decoder) -> CompiledPolicy:
    """Compile a policy for a model, on the current mesh; the full cache where none is given."""
    return (make_policy("full") if policy is None else policy).compile(model)


@named_arguments()
def prefill(
    model: Decoder,
    tokens: Prompts,
    *,
    tokenizer: Any = None,
    policy: Policy | None = None,
    max_new_tokens: int = 0,
    capacity: int | str | None = None,
    max_tokens: int | None = None,
    page_size: int | None = None,
    chunk: int = CHUNK,
    observers: Prompts | None = None,
    implementation: str | None = None,
) -> Cache:
    """Run prompts and keep what the policy keeps of them.

    Args:
        tokens: token ids, one sequence a prompt, of any lengths; with a tokenizer also texts, and chats as lists of
            messages: they go through its chat template, where it has one, and leave the user's turn open for what a
            later call of `sample` asks.
        tokenizer: from `kvjax.load`, for text.
        policy: from `make_policy`; None is the full cache.
        max_new_tokens: room for what will follow. With no stated capacity `sample` makes room itself.
        capacity: the pool's size: entries per kv head on average (an int), bytes in all ("2GiB"), or a share of each
            device's memory ("30%"). It is a bound. None: the policy's expected need with a margin, and what more turns
            out to be needed, up to the devices' memory.
        max_tokens: the longest prompt with its answer that is to share compiled programs: pool and tables are made for
            it and keep their size, so that every shorter context and question runs the programs of the first. None:
            pools follow each prompt, and programs are shared by those of about one length.
        page_size: tokens per page. None: 64 on a TPU, which decodes faster from larger ones, and 16 elsewhere and for a
            policy with a selection, which chooses among pages.
        chunk: prompt tokens in one call; the result does not depend on it.
        observers: token ids behind each prompt that an eviction looks with when it compacts at the prompt's end, among
            the last tokens that it observes. They are then gone: the cache stands at the prompt's end.

    Returns:
        The cache, to pass to `sample(…, cache=cache)` with a question, as often as wanted.

    Raises:
        UserError: an empty prompt, a token outside the vocabulary, a capacity below the window, observers of a policy
            that compacts while it decodes, or that looks at no tokens; activations or scores that are not finite.
        CapacityError: the pool ran out, naming policy, capacity and need.
    """
    check_arguments("prefill", model, policy, implementation=implementation)
    max_new_tokens = whole_number("prefill", "max_new_tokens", max_new_tokens, 0)
    max_tokens = None if max_tokens is None else whole_number("prefill", "max_tokens", max_tokens)
    page_size = None if page_size is None else whole_number("prefill", "page_size", page_size)
    chunk = whole_number("prefill", "chunk", chunk)
    tokens = tokens_of(tokens, tokenizer, "beginning")
    observers = None if observers is None else tokens_of(observers, tokenizer, "end")
    with use_mesh(model):
        compiled = _compiled(policy, model)
        rows, behind = token_rows(model, tokens), None
        room = max_new_tokens
        if observers is not None:
            behind = token_rows(model, observers)
            room = max(room, *(row.size for row in behind))
            check_observers(compiled.host, rows, behind)
        cache = begin(model, compiled, rows, room, page_size, capacity, max_tokens)
        check_length(model, rows, max_new_tokens)
        arguments = max_new_tokens, chunk, implementation, behind
        cache = schedule.read(model, compiled, cache, rows, *arguments)[0]
        caches.check(cache, compiled.host.name, max_new_tokens)
        return cache


@named_arguments()
def logits(model: Decoder, tokens: Prompts) -> Float[np.ndarray, "b t v"]:
    """Next-token logits after every token of sequences of one length, by plain causal attention (float32).

    Raises UserError for sequences of several lengths, and if the logits are not finite.
    """
    check_arguments("logits", model)
    with use_mesh(model):
        rows = token_rows(model, tokens)
        if len({row.size for row in rows}) > 1:
            raise UserError(
                f"logits: sequences must have one length, got {sorted({row.size for row in rows})}"
            )
        batch, valid = padded(rows, rows[0].size)
        found, finite = _all_logits(model, batch, valid)
        if not np.asarray(finite):
            raise caches.not_finite(model.embed.dtype)
        return np.asarray(found)[: len(rows)]


@jax.jit
def _all_logits(model, tokens, valid):
    found = model.logits(model.hidden(tokens))
    return found, (jnp.isfinite(found).all((1, 2)) | (valid == 0)).all()


@named_arguments()
def stream(
    model: Decoder,
    prompts: Prompts,
    *,
    tokenizer: Any = None,
    policy: Policy | None = None,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    samples: int = 1,
    key: jax.Array | None = None,
    eos: Iterable[int] | None = None,
    stop: Iterable[str] | None = None,
    logprobs: list[list[np.ndarray]] | None = None,
    cache: Cache | None = None,
    share: Any = False,
    capacity: int | str | None = None,
    max_tokens: int | None = None,
    page_size: int | None = None,
    chunk: int = CHUNK,
    block: int = BLOCK,
    implementation: str | None = None,
) -> Iterator[tuple[list[np.ndarray], Cache]]:
    """Generate, block by block: yields each prompt's new tokens (stop token included) and the cache so far.

    The first block is the single token that prefill gives; the next `block` tokens are computed only when asked for.
    Arguments as in `sample`, but `logprobs` is a list to add to: for each block each prompt's, of its tokens. The text
    that ends an answer is among its tokens, as a stop token is. The yielded cache is donated to the next block: read
    what you want of it at once.
    """
    check_arguments("sample", model, policy, cache, implementation)
    max_new_tokens = whole_number("sample", "max_new_tokens", max_new_tokens)
    max_tokens = None if max_tokens is None else whole_number("sample", "max_tokens", max_tokens)
    page_size = None if page_size is None else whole_number("sample", "page_size", page_size)
    chunk = whole_number("sample", "chunk", chunk)
    block = whole_number("sample", "block", block)
    samples = whole_number("sample", "samples", samples)
    if not isinstance(logprobs, list | None):
        raise UserError(f"stream: logprobs must be a list to add to, got {shown(logprobs)}")
    texts, ids = stop_texts(stop, tokenizer)
    ends = tuple(model.config.eos_ids if eos is None else stop_tokens(eos)) + ids
    draw = Draw(temperature, top_k, top_p, min_p, ends, logprobs is not None)
    greedy = draw.greedy
    check_samples(samples, greedy, cache is not None and share is False)
    if share is not False and cache is None:
        raise UserError("sample: share is for questions of a cache: give cache=, from kvjax.prefill")
    prompts = tokens_of(prompts, tokenizer, "whole" if cache is None else "end")
    prompts = [prompt for prompt in prompts for _ in range(samples)]
    key = checked_key(key, greedy, len(prompts))
    watch = Watch(tokenizer, texts)
    # the caller's code runs between the blocks, so no mesh may stay set there
    with use_mesh(model):
        compiled = _compiled(policy, model)
        host = compiled.host
        rows = token_rows(model, prompts)
        order: Sequence[int] = range(len(rows))
        if cache is None:
            arguments = max_new_tokens, page_size, capacity, max_tokens
            held = begin(model, compiled, rows, *arguments)
            check_length(model, rows, max_new_tokens)
            held, after = schedule.read(model, compiled, held, rows, max_new_tokens, chunk, implementation)
            held = drop_observation_state(held, compiled.decode)
        else:
            for name, stated in (("capacity", capacity), ("max_tokens", max_tokens)):
                if stated is not None:
                    raise UserError(
                        f"{name} is stated where the cache is made (prefill), not where it is continued"
                    )
            if share is not False:
                cache, order = branched(cache, share, samples, len(rows))
                rows = placed(rows, order, cache.seen.shape[0])
            else:
                check_in_front("sample", cache)
            check_continues(cache, model, compiled, rows)
            check_length(model, rows, max_new_tokens, cache)
            longest = max(row.size for row in rows)
            held = with_room(cache, host, longest, max_new_tokens)
            held = drop_observation_state(held, compiled.decode)
            held, after = feed(
                model, host, compiled.extend, held, rows, chunk, implementation, room=max_new_tokens
            )
            held = schedule.at_end(model, compiled, held, len(rows))
        key = _row_keys(key, order, held.seen.shape[0])
        token = _first_draw(after, draw, nth_key(key, 0), greedy)
        live = np.isin(np.arange(held.seen.shape[0]), order)
        running = put(live, BATCH) & ~draw.ends(token)
        first = token[None], None if logprobs is None else _first_logprob(draw, after, token)[None]
        parts = _parts(first, live, order, draw, logprobs)
        caches.check(held, host.name, max_new_tokens)
        running = _still(running, watch, order, parts)
        again = schedule.recurring(host, held)
    yield parts, held
    made = 1
    while made < max_new_tokens and (before := np.asarray(running)[: len(rows)]).any():
        with use_mesh(model):
            left = max_new_tokens - made
            count, size, held = schedule.next_block(host, held, before, made - 1, left, block)
            held, drawn, token, running, fed = decode_block(
                model, compiled.decode, held, token, running, draw, key, np.int32(made),
                limit=np.int32(count), count=size, greedy=greedy, recurring=again, implementation=implementation,
            )  # fmt: skip
        caches.check(held, host.name, max_new_tokens - made - count)
        log_steps(fed, count=count, window=held.window, sequences=len(rows))
        made += count
        parts = _parts(drawn, before, order, draw, logprobs, count)
        with use_mesh(model):
            running = _still(running, watch, order, parts)
            held = schedule.after_block(model, compiled, held, np.asarray(running)[: len(rows)], made - 1)
        yield parts, held


def _row_keys(key: jax.Array, order: Sequence[int], rows: int) -> jax.Array:
    """One key as it is; of each answer's own one a row, in `order`, the rows that a mesh adds among them."""
    if not key.ndim:
        return key
    of = np.zeros(rows, np.int32)
    of[list(order)] = np.arange(key.size)
    return put(key[of], BATCH)


def _parts(
    drawn: tuple[Array, Array | None],
    running: Bool[np.ndarray, " b"],
    order: Sequence[int],
    draw: Draw,
    logprobs: list[list[np.ndarray]] | None,
    most: int = 1,
) -> list[np.ndarray]:
    """The own tokens of a block [count b] of the sequences in `order`, the first `most`: up to and with its stop token;
    nothing if it had stopped. Their log-probabilities are added to `logprobs`."""
    tokens, own = (None if x is None else np.asarray(x)[:most] for x in drawn)
    assert tokens is not None
    counts = []
    for row in order:
        stops = np.flatnonzero(np.isin(tokens[:, row], draw.eos))
        counts.append((stops[0] + 1 if stops.size else len(tokens)) if running[row] else 0)
    if logprobs is not None and own is not None:
        logprobs.append([own[:count, row] for row, count in zip(order, counts, strict=True)])
    return [tokens[:count, row] for row, count in zip(order, counts, strict=True)]


def _still(
    running: Bool[Array, " b"], watch: Watch, order: Sequence[int], parts: list[np.ndarray]
) -> Bool[Array, " b"]:
    """Which sequences still run after a block of those in `order`: not those in whose answer a stop text has come."""
    if not watch.stop:
        return running
    ended = np.zeros(running.shape[0], bool)
    ended[list(order)] = watch.ended(parts)
    return running & ~put(ended, BATCH)


@named_arguments()
def sample(
    model: Decoder,
    prompts: Prompts,
    *,
    tokenizer: Any = None,
    policy: Policy | None = None,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    samples: int = 1,
    key: jax.Array | None = None,
    eos: Iterable[int] | None = None,
    stop: Iterable[str] | None = None,
    logprobs: bool = False,
    cache: Cache | None = None,
    share: Any = False,
    capacity: int | str | None = None,
    max_tokens: int | None = None,
    page_size: int | None = None,
    chunk: int = CHUNK,
    block: int = BLOCK,
    implementation: str | None = None,
) -> Sampled:
    """Continue prompts.

    Args:
        prompts: token ids, one sequence a prompt, of any lengths; with a tokenizer also texts, and chats as lists of
            messages. A text is the user's turn where the tokenizer has a chat template, and with a cache the end of it.
        tokenizer: from `kvjax.load`, for text; answers then come with theirs.
        policy: from `make_policy`; None is the full cache.
        max_new_tokens: at most so many new tokens each.
        temperature: 0 (the default) takes the most likely token; above 0, `key` is needed.
        top_k, top_p, min_p: keep only the k most likely tokens (0: all), then the fewest whose probability reaches
            top_p, then those at least min_p times as likely as the most likely.
        samples: answers drawn of each prompt, one after another in the result: those of prompt i are
            `tokens[i * samples : (i + 1) * samples]`. The prompt is repeated, and each answer has noise of its own.
        key: a JAX random key; the same key gives the same tokens. Or a key for each answer: it is then drawn as it
            would be alone, whatever else is in the batch.
        eos: stop tokens; by default every eos id of the model's generation_config.json.
        stop: texts that end an answer, which is cut before the first; looked for between blocks, so that the cache may
            hold some tokens more. One that is a token of the tokenizer's own is a stop token.
        logprobs: whether to return each token's log-probability, by the model's own distribution before temperature,
            top_k, top_p and min_p.
        cache: from `prefill` (or a context already seen): the prompts continue it. The cache is copied, so it stays
            usable for the next question.
        share: True: several questions of each of the cache's contexts, as many of each, one context's after another's;
            or a list with the context of each question, from 0. They are a batch of branches which hold the context's
            pages together and copy only those that they write to; on a mesh a branch runs where its context is.
        capacity, max_tokens, page_size, chunk: as in `prefill`; a cache that is continued keeps its capacity and
            page size.
        block: tokens between two looks of the host.

    Returns:
        `Sampled`: tokens, stop reasons and the cache's sizes.

    Raises:
        UserError, CapacityError: as in `prefill`, and for logits that are not finite; never after a wrong token was
            returned.
    """
    one_of("sample", "logprobs", logprobs, (True, False))
    stop, ids = stop_texts(stop, tokenizer)
    if eos is not None or ids:
        check_arguments("sample", model)
        eos = tuple(model.config.eos_ids if eos is None else stop_tokens(eos)) + ids
    record: list[list[np.ndarray]] | None = [] if logprobs else None
    parts: list[list[np.ndarray]] = []
    for block_parts, held in stream(
        model, prompts, tokenizer=tokenizer, policy=policy, max_new_tokens=max_new_tokens, temperature=temperature,
        top_k=top_k, top_p=top_p, min_p=min_p, samples=samples, key=key, eos=eos, stop=stop, logprobs=record,
        cache=cache, share=share, capacity=capacity, max_tokens=max_tokens, page_size=page_size,
        chunk=chunk, block=block, implementation=implementation,
    ):  # fmt: skip
        parts.append(block_parts)
        sizes = caches.stats(held, len(block_parts) if share is False else None)
    if share is not False and cache is not None:
        with use_mesh(model):
            order = places(cache, share, samples, len(parts[0]))[1]
        sizes = dataclasses.replace(sizes, entries=sizes.entries[:, order], tokens=sizes.tokens[order])
    ends = list(model.config.eos_ids if eos is None else eos)
    return answers(parts, record, sizes, ends, tokenizer, stop)


def answers(
    parts: list[list[np.ndarray]],
    record: list[list[np.ndarray]] | None,
    sizes: Stats,
    ends: Sequence[int],
    tokenizer: Any,
    stop: Sequence[str],
) -> Sampled:
    """Of the blocks that `stream` gave, `parts` with the log-probabilities in `record`, each answer whole, without the
    stop token, one of `ends`, or the text that ended it."""
    tokens, reasons, texts = [], [], []
    for line in map(np.concatenate, zip(*parts, strict=True)):
        stopped = line.size > 0 and bool(np.isin(line[-1], ends))
        line = line[:-1] if stopped else line
        found = cut(line, tokenizer, stop)
        tokens.append(line if found is None else line[: found[0]])
        reasons.append("stop" if found else "eos" if stopped else "length")
        if tokenizer is not None:
            texts.append(decoded(tokenizer, line) if found is None else found[1])
    own = None
    if record is not None:
        lines = map(np.concatenate, zip(*record, strict=True))
        own = [line[: answer.size] for line, answer in zip(lines, tokens, strict=True)]
    return Sampled(tokens, reasons, sizes, texts or None, own)
