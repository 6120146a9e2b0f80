"""Answers: their tokens and texts as they grow, and the stop texts that end them. The host looks for stop texts between
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
    """Log-probabilities of an answer's tokens, by the model's own distribution."""

    chosen: Float[np.ndarray, " t"]
    alternatives: list[dict[int, float]]
    """The most likely tokens at each place, with their log-probabilities."""

    @classmethod
    def of(
        cls,
        chosen: Float[np.ndarray, " t"],
        tokens: Int[np.ndarray, "t m"],
        values: Float[np.ndarray, "t m"],
        count: int,
    ) -> "AnswerLogprobs":
        """Return an answer's log-probabilities, given the most likely tokens, of which the first `count` are taken."""
        pairs = zip(tokens[:, :count].tolist(), values[:, :count].tolist(), strict=True)
        return cls(chosen, [dict(zip(*pair, strict=True)) for pair in pairs])


class Block(NamedTuple):
    """New tokens of every answer, and the cache after them."""

    tokens: list[np.ndarray]
    """New tokens of each answer, its stop token included."""
    cache: Cache
    """The cache after the block. It is donated to the next block, so use it before you ask for that."""
    order: list[int]
    """Row of each answer in the cache's batch."""
    logprobs: list[AnswerLogprobs] | None = None


@dataclasses.dataclass(frozen=True)
class Generation:
    """Answers to prompts. Every list has one entry per answer."""

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
        """Return two or three lines: lengths and finish reasons of the answers, their texts, and the cache's sizes."""
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
        """Return each answer's new tokens in a block [count b], of which only the first `most` tokens are used. They go
        up to and including its stop token. An answer that had ended has none."""
        tokens, logprobs = on_host(drawn[0])[:most], drawn[1]
        lengths = [len(x) for x in self.tokens] or [0] * len(self.order)
        counts = []
        for row, sampling, ends, length in zip(self.order, self.params, self.ends, lengths, strict=True):
            stops = np.flatnonzero(np.isin(tokens[:, row], ends))
            count = stops[0] + 1 if stops.size else len(tokens)
            counts.append(min(count, sampling.max_new_tokens - length) if running[row] else 0)
        new = [tokens[:count, row] for row, count in zip(self.order, counts, strict=True)]
        before = self.tokens or [part[:0] for part in new]
        self.tokens = [np.concatenate(pair) for pair in zip(before, new, strict=True)]
        if logprobs is None:
            return new, None
        arrays = [on_host(x) for x in (logprobs.chosen, logprobs.tokens, logprobs.values)]
        return new, [
            AnswerLogprobs.of(*(x[:count, row] for x in arrays), count=sampling.logprobs or 0)
            for row, count, sampling in zip(self.order, counts, self.params, strict=True)
        ]

    def still(self, running: Bool[Array, " b"]) -> Bool[Array, " b"]:
        """Return the sequences that still run: `running` without those whose answers now contain a stop text."""
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
    """Return the complete answers, given the blocks of `stream`, without the stop tokens or stop texts that ended
    them."""
    tokens, reasons, texts = [], [], []
    answers = map(np.concatenate, zip(*(block.tokens for block in blocks), strict=True))
    for answer, sampling in zip(answers, params, strict=True):
        stop, ids = stop_tokens_of(sampling.stop, tokenizer)
        ends = (*sampling.stop_tokens(eos), *ids)
        stopped = answer.size > 0 and bool(np.isin(answer[-1], ends))
        answer = answer[:-1] if stopped else answer
        before_stop = cut(answer, tokenizer, stop)
        tokens.append(answer if before_stop is None else answer[: before_stop[0]])
        reasons.append("stop" if before_stop or stopped else "length")
        if tokenizer is not None:
            texts.append(decoded(tokenizer, answer) if before_stop is None else before_stop[1])
    logprobs = None
    if any(sampling.logprobs is not None for sampling in params):
        parts = zip(*(block.logprobs or [] for block in blocks), strict=True)
        logprobs = [
            AnswerLogprobs(
                np.concatenate([x.chosen for x in parts_of_answer])[: len(answer)],
                [place for x in parts_of_answer for place in x.alternatives][: len(answer)],
            )
            for parts_of_answer, answer in zip(parts, tokens, strict=True)
        ]
    return Generation(tokens, reasons, stats, prompts, texts or None, logprobs)


def stop_tokens_of(stop: Sequence[str], tokenizer: Any) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Split stop texts into texts to look for and the ids of those that are special tokens of the tokenizer (`</s>`).
    Raises UserError for texts without a tokenizer."""
    if stop and tokenizer is None:
        raise UserError(
            f"sampling: stop={shown(list(stop))} needs a tokenizer: stop_token_ids are stop tokens by their ids"
        )
    added = tokenizer.get_added_vocab() if stop else {}
    return tuple(x for x in stop if x not in added), tuple(added[x] for x in stop if x in added)


def stop_place(text: str, stop: Sequence[str]) -> int | None:
    """Return the place where the first stop text begins; None if there is none."""
    return min((place for stop_text in stop if (place := text.find(stop_text)) >= 0), default=None)


def final_length(text: str, stop: Sequence[str]) -> int:
    """Return how many characters of a text cannot be the beginning of a stop text, whatever follows."""
    starts = (
        text[-size:]
        for stop_text in stop
        for size in range(1, len(stop_text))
        if text.endswith(stop_text[:size])
    )
    return len(text) - max(map(len, starts), default=0)


def cut(tokens: Int[np.ndarray, " t"], tokenizer: Any, stop: Sequence[str]) -> tuple[int, str] | None:
    """Return the number of an answer's tokens before the first stop text, and the text before it; None if there is no
    stop text."""
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
    """An answer's text as it grows, without an end that may be half a character or the beginning of a stop text.

    Each part is decoded together with the part before it, so a long answer is not decoded again for every block.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str]):
        self._tokenizer, self._stop = tokenizer, stop_tokens_of(stop, tokenizer)[0]
        self._tail: list[int] = []
        """The last part whose text is known, and the tokens after it."""
        self._known = 0
        """Tokens of the tail whose text is known."""
        self._held = ""
        """Text that is known but was not returned yet."""
        self.stopped = False
        """True if a stop text has come."""

    def more(self, tokens: Sequence[int]) -> str:
        """Return the text that can be shown after these tokens."""
        self._tail += tokens
        new = self._new_text()
        # a character may still lack bytes that the next tokens bring
        if new and not new.endswith("\N{REPLACEMENT CHARACTER}"):
            self._held += new
            self._tail, self._known = self._tail[self._known :], len(self._tail) - self._known
        return self._shown(final_length(self._held, self._stop))

    def end(self) -> str:
        """Return the text that was held back, once there are no more tokens."""
        self._held += self._new_text()
        return self._shown(len(self._held))

    def _new_text(self) -> str:
        known, text = (decoded(self._tokenizer, x) for x in (self._tail[: self._known], self._tail))
        # new tokens may change known text: some tokenizers drop the space before a full stop
        unchanged = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(known, text, strict=False))
        return text[sum(1 for _ in unchanged) :]

    def _shown(self, count: int) -> str:
        """Return the first `count` characters of the text that is held back, up to a stop text. After a stop text
        nothing is returned."""
        if self.stopped:
            return ""
        if (place := stop_place(self._held, self._stop)) is not None:
            self.stopped, count = True, place
        text, self._held = self._held[:count], self._held[count:]
        return text
