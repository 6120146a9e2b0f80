"""Answers: their tokens and texts as they grow, and the stop texts that end them. The host looks for these between
blocks."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache import Cache, Stats
from kvjax.errors import UserError, shown
from kvjax.inference.sampler import Logprobs
from kvjax.mesh import BATCH, on_host, put
from kvjax.sampling_params import SamplingParams


class AnswerLogprobs(NamedTuple):
    """Log-probabilities of an answer's tokens by the model's own distribution."""

    chosen: Float[np.ndarray, " t"]
    alternatives: list[dict[int, float]]
    """The most likely tokens at each place, with their log-probabilities."""


class Block(NamedTuple):
    """New tokens of every answer, and the cache after them."""

    tokens: list[np.ndarray]
    """New tokens of each answer, its stop token included."""
    cache: Cache
    """The cache after the block. It is donated to the next block, so read what you need of it at once."""
    order: list[int]
    """Row of each answer in the cache's batch."""
    logprobs: list[AnswerLogprobs] | None = None


@dataclasses.dataclass(frozen=True)
class Generation:
    """Answers to prompts, one entry an answer in every list."""

    tokens: list[np.ndarray]
    """Tokens of each answer, without the stop token or the stop text."""
    finish_reasons: list[Literal["stop", "length"]]
    stats: Stats
    """Sizes of the cache at the end, with its sequences in the answers' order."""
    prompts: list[int]
    """Index of each answer's prompt."""
    texts: list[str] | None = None
    """Texts of the answers; None without a tokenizer."""
    logprobs: list[AnswerLogprobs] | None = None

    def __repr__(self) -> str:
        """Return two or three lines: how long the answers are and why they ended, their texts, and what the cache
        holds."""
        counts = ", ".join(str(len(tokens)) for tokens in self.tokens[:8]) + (
            ", …" if len(self.tokens) > 8 else ""
        )
        reasons = ", ".join(
            f"{self.finish_reasons.count(x)} by {x}" for x in dict.fromkeys(self.finish_reasons)
        )
        texts = "" if self.texts is None else f"\n  texts={shown(self.texts)},"
        lengths = f"{len(self.tokens)} answers of {counts} tokens"
        return f"Generation({lengths}, ended {reasons},{texts}\n  stats={self.stats})"


@dataclasses.dataclass
class Answers:
    """The answers of a batch as they grow, and which of them have ended."""

    params: list[SamplingParams]
    ends: list[tuple[int, ...]]
    """Stop tokens of each answer."""
    stops: list[tuple[str, ...]]
    """Stop texts of each answer."""
    order: Sequence[int]
    """The row of each answer in the batch."""
    tokenizer: Any
    tokens: list[np.ndarray] = dataclasses.field(default_factory=list)

    def block(
        self, drawn: tuple[Array, Logprobs | None], running: Bool[np.ndarray, " rows"], most: int
    ) -> tuple[list[np.ndarray], list[AnswerLogprobs] | None]:
        """Return each answer's new tokens in a block [count b], of which the first `most` count: up to and including
        its stop token, and none if it had ended."""
        tokens, found = on_host(drawn[0])[:most], drawn[1]
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
        chosen, ids, values = map(on_host, (found.chosen, found.tokens, found.values))
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
        """Return the sequences that still run: `running` without those whose answers now hold a stop text."""
        if not any(self.stops):
            return running
        ended = np.zeros(running.shape[0], bool)
        for row, tokens, stop in zip(self.order, self.tokens, self.stops, strict=True):
            ended[row] = cut(tokens, self.tokenizer, stop) is not None
        return running & ~put(ended, BATCH)


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


def stop_tokens_of(stop: Sequence[str], tokenizer: Any) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Split stop texts into texts to look for and the ids of those that are tokens of the tokenizer's own (`</s>`).
    Raises UserError for texts without a tokenizer."""
    if stop and tokenizer is None:
        raise UserError(
            f"sampling: stop={shown(list(stop))} needs a tokenizer: stop_token_ids are stop tokens by their ids"
        )
    own = tokenizer.get_added_vocab() if stop else {}
    return tuple(x for x in stop if x not in own), tuple(own[x] for x in stop if x in own)


def stop_place(text: str, stop: Sequence[str]) -> int | None:
    """Return where the first stop text begins; None where there is none."""
    return min((place for one in stop if (place := text.find(one)) >= 0), default=None)


def final_length(text: str, stop: Sequence[str]) -> int:
    """Return how many characters of a text cannot be the beginning of a stop text, whatever follows."""
    starts = (text[-size:] for one in stop for size in range(1, len(one)) if text.endswith(one[:size]))
    return len(text) - max(map(len, starts), default=0)


def cut(tokens: Int[np.ndarray, " t"], tokenizer: Any, stop: Sequence[str]) -> tuple[int, str] | None:
    """Return how many tokens of an answer lie before the first stop text, and the text before it; None where there is
    none."""
    place = stop_place(text := decoded(tokenizer, tokens), stop) if stop else None
    if place is None:
        return None
    text, count = text[:place], len(tokens)
    while not text.startswith(decoded(tokenizer, tokens[:count])):
        count -= 1
    return count, text


def decoded(tokenizer: Any, tokens: Sequence[int] | Int[np.ndarray, " t"]) -> str:
    """Return an answer's text."""
    return tokenizer.decode(tokens, skip_special_tokens=True)


class LiveText:
    """An answer's text as it grows, without what may be half a character or the beginning of a stop text.

    Each part is decoded behind the part before it, so that a long answer is not decoded again for every block.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str]):
        self._tokenizer, self._stop = tokenizer, stop_tokens_of(stop, tokenizer)[0]
        self._tail: list[int] = []
        """The last part whose text is known, and the tokens after it."""
        self._known = 0
        """Tokens of the tail whose text is known."""
        self._held = ""
        """Text that is known and not shown."""
        self.stopped = False
        """True if a stop text has come."""

    def more(self, tokens: Sequence[int]) -> str:
        """Return what can be shown now that these tokens have come."""
        self._tail += tokens
        new = self._new_text()
        # a character may still lack bytes that the next tokens bring
        if new and not new.endswith("\N{REPLACEMENT CHARACTER}"):
            self._held += new
            self._tail, self._known = self._tail[self._known :], len(self._tail) - self._known
        return self._shown(final_length(self._held, self._stop))

    def end(self) -> str:
        """Return what was held back, once no more tokens come."""
        self._held += self._new_text()
        return self._shown(len(self._held))

    def _new_text(self) -> str:
        known, text = (decoded(self._tokenizer, x) for x in (self._tail[: self._known], self._tail))
        # what comes may change what is known: some tokenizers drop the space before a full stop
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(known, text, strict=False))
        return text[sum(1 for _ in same) :]

    def _shown(self, count: int) -> str:
        """Return the first characters of what is held, up to a stop text, after which nothing is shown."""
        if self.stopped:
            return ""
        if (place := stop_place(self._held, self._stop)) is not None:
            self.stopped, count = True, place
        text, self._held = self._held[:count], self._held[count:]
        return text
