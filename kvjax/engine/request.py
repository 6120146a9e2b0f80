"""A request to the engine: a prompt, sampling parameters, and the answer so far."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Int

from kvjax.errors import UserError, shown, whole_number
from kvjax.inference.answers import AnswerLogprobs, LiveText, cut, stop_tokens_of
from kvjax.policies.policy import Policy
from kvjax.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "capacity", "abort"]
Spans = tuple[tuple[int, int], ...]
"""Spans of a sequence's tokens: the positions of the first token and of the one after the last."""


@runtime_checkable
class Constraint(Protocol):
    """A rule that restricts an answer's tokens, such as a grammar."""

    def allowed(self) -> Bool[np.ndarray, " v"]:
        """Return a mask of the tokens that may come next. It allows at least one token, which may be one that ends the
        answer."""
        ...

    @property
    def error(self) -> str | None:
        """The reason why the answer cannot go on under the rule and must end; None if it can go on."""
        ...

    def take(self, token: int) -> None:
        """Take the next token, which does not end the answer."""
        ...


class Anything:
    """The constraint that allows every token."""

    error = None

    def __init__(self, vocabulary: int):
        self._all = np.ones(vocabulary, bool)

    def allowed(self) -> Bool[np.ndarray, " v"]:
        return self._all

    def take(self, token: int) -> None:
        pass


@dataclasses.dataclass(eq=False)
class Request:
    """One answer to one prompt, made by `Engine.submit`, or the reading of a named context."""

    prompt: Int[np.ndarray, " t"]
    sampling: SamplingParams
    number: int
    """Index of the answer among those to its prompt, from 0."""
    arrival: int
    """Index of the request among all of the engine's, in the order of arrival."""
    ends: tuple[int, ...]
    """Tokens that end the answer."""
    tokenizer: Any = None
    constraint: Constraint | None = None
    context: str | None = None
    """Name of the context that the prompt continues, or that is read."""
    kept: int = 0
    """The number of the prompt's tokens after which later prompts may continue."""
    dropped: Spans = ()
    """Spans of the prompt's tokens that leave the cache once its first `dropped_at` tokens are read, in order. No two
    spans touch."""
    dropped_at: int = 0
    """The number of tokens that are read before anything is dropped. It is not below the end of the last span."""
    reads: bool = False
    """True if a context is read, and nothing is answered."""
    scores: bool = False
    """True if the prompt's own tokens are scored."""
    expected: int | None = None
    """Tokens that the answer is expected to have, for which pages must be free when it begins; None: all that it may
    have."""
    prompt_logprobs: list[AnswerLogprobs] = dataclasses.field(default_factory=list)
    """Log-probabilities of all prompt tokens but the first, part by part, if the prompt is scored."""
    tokens: list[int] = dataclasses.field(default_factory=list)
    """The answer so far, including a stop token. A stop text that has ended the answer is not included."""
    logprobs: list[AnswerLogprobs] = dataclasses.field(default_factory=list)
    """Log-probabilities of the answer's tokens, part by part, if they were asked for."""
    text: str = ""
    """Text of the answer so far, without an end that may be half a character or the beginning of a stop text. It is
    empty without a tokenizer."""
    finish_reason: FinishReason | None = None
    """`stop`: a stop token or a stop text came, or a context is read. `length`: the answer has `max_new_tokens` tokens.
    `capacity`: the pool has no page for the next token. `abort`: the request was cancelled, or its spans cannot be
    dropped yet (`Cache.without`). None: the request has not ended."""
    cached: int = 0
    """Tokens of the prompt that were read for an earlier prompt."""
    kv_ratio: float = 1.0
    """Entries in the cache when the answer ended, as a share of a full cache's."""
    cancelled: bool = False

    def __post_init__(self):
        self._live = None if self.tokenizer is None else LiveText(self.tokenizer, self.sampling.stop)
        self._stops = () if self.tokenizer is None else stop_tokens_of(self.sampling.stop, self.tokenizer)[0]

    @property
    def max_length(self) -> int:
        """The most tokens of prompt and answer in the cache. The last token of an answer is never fed."""
        return self.prompt.size + self.sampling.max_new_tokens - 1

    @property
    def expected_length(self) -> int:
        """The most tokens of prompt and answer that are expected in the cache."""
        new = self.sampling.max_new_tokens
        return self.prompt.size + (new if self.expected is None else min(new, self.expected)) - 1

    @property
    def compacted(self) -> int:
        """Tokens of the prompt that an eviction at its end compacts: a context, if the prompt continues one."""
        return self.prompt.size if self.context is None else self.cached

    def cancel(self) -> None:
        """Tell the engine to end the request at its next turn."""
        self.cancelled = True

    def extend(self, tokens: Sequence[int], logprobs: AnswerLogprobs | None = None) -> None:
        """Add drawn tokens to the answer, up to its end."""
        left = self.sampling.max_new_tokens - len(self.tokens)
        stop = next((i + 1 for i, token in enumerate(tokens) if token in self.ends), None)
        new = list(tokens[: min(left, len(tokens) if stop is None else stop)])
        self.tokens += new
        if self.constraint is not None:
            for token in new:
                if token not in self.ends:
                    self.constraint.take(token)
        if logprobs is not None:
            self.logprobs.append(
                AnswerLogprobs(logprobs.chosen[: len(new)], logprobs.alternatives[: len(new)])
            )
        if stop is not None and stop <= left:
            self.finish_reason = "stop"
        elif len(self.tokens) == self.sampling.max_new_tokens:
            self.finish_reason = "length"
        if self._live is None:
            return
        self.text += self._live.more([token for token in new if token not in self.ends])
        if self.finish_reason is not None:
            self.text += self._live.end()
        if self._live.stopped:
            before_stop = cut(np.array(self.tokens), self.tokenizer, self._stops)
            self.tokens = self.tokens if before_stop is None else self.tokens[: before_stop[0]]
            self.finish_reason = "stop"

    def answer(self) -> list[int]:
        """Return the answer's tokens, without the stop token that ended it."""
        return self.tokens[:-1] if self.tokens and self.tokens[-1] in self.ends else self.tokens

    def end(self, reason: FinishReason, length: Int[np.ndarray, "..."], local: int, seen: int) -> None:
        """Record why the request ended, and the share of a full cache that its cache held then.

        Args:
            length: retained entries of each head.
            local: tokens in the local window.
            seen: tokens that a full cache would hold.
        """
        self.finish_reason = reason
        if reason == "capacity" and self._live is not None:
            self.text += self._live.end()
        if length.size:
            self.kv_ratio = float((length.mean() + local) / max(1, seen))


def refusal(host: Policy, knows_positions: bool) -> str:
    """Return why spans cannot be dropped under a policy; empty if they can. knows_positions: True if the positions of
    entries are known."""
    decides_late = host.schedule is not None or host.admission.revisits is not None
    if decides_late or host.max_entries is not None:
        return (
            f"policy {host.name} does not decide token by token, so conversations are read again: leave the tokens "
            "out of the prompt instead of dropping them"
        )
    if not knows_positions:
        return (
            f"policy {host.name} does not know the positions of its entries, so none can be dropped: use a policy "
            "that keeps positions, such as full:positions=true"
        )
    return ""


def merged_spans(dropped: Any, dropped_at: int, tokens: int) -> tuple[Spans, int]:
    """Return the spans in order, with those that touch merged, and the number of tokens after which they are dropped.
    Raises UserError for spans that a prompt of `tokens` tokens does not have."""
    try:
        bounds = [(start, end) for start, end in dropped]
    except (TypeError, ValueError):
        raise UserError(f"dropped must be spans (start, end), got {shown(dropped)}") from None
    at = whole_number("Engine.submit", "dropped_at", dropped_at, 0)
    spans = sorted(
        (whole_number("Engine.submit", "dropped", start, 0), whole_number("Engine.submit", "dropped", end, 0))
        for start, end in bounds
    )
    if spans and not (all(start < end <= at for start, end in spans) and at < tokens):
        raise UserError(f"no such spans of the first {at} of {tokens} tokens: {shown(tuple(spans))}")
    merged = spans[:1]
    for start, end in spans[1:]:
        first, last = merged[-1]
        if start <= last:
            merged[-1] = first, max(last, end)
        else:
            merged.append((start, end))
    return tuple(merged), at
