"""`SamplingParams`: how the tokens of an answer are sampled, and when it ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from kvjax.errors import UserError, named_fields, one_of, real_number, shown, whole_number

MIN_TEMPERATURE = 1e-6
"""The smallest temperature above 0. Logits divided by a smaller one might not be finite."""
MAX_ALTERNATIVES = 20
"""The maximum of `logprobs`."""
MAX_PENALTY = 2.0
"""The largest presence or frequency penalty, in either direction, as in the OpenAI API."""


@named_fields
@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """The sampling parameters of a prompt's answers, and the conditions that end them. Names and meanings are those of
    vLLM, except for `max_new_tokens`.

    With the same `seed` a prompt gets the same answer in any batch. Each of the n answers of a prompt has a separate
    stream of random numbers.

    Args:
        max_new_tokens: the maximum tokens of an answer.
        temperature: the logits are divided by it; 0 takes the most likely token.
        top_k: sample from the k most likely tokens; 0 samples from all.
        top_p: sample from the fewest most likely tokens whose probabilities sum to at least this.
        min_p: sample from tokens with at least this fraction of the most likely token's probability.
        repetition_penalty: the logits of tokens in the prompt or the answer are divided by it if positive, and
            multiplied by it if negative (CTRL, arXiv:1909.05858, Sec. 4.1); 1 has no effect. Tokens of a context that
            was read before do not count.
        presence_penalty: subtracted from the logits of tokens in the answer.
        frequency_penalty: subtracted from a token's logit once for each occurrence in the answer.
        logit_bias: numbers added to the logits of token ids.
        n: the number of answers of each prompt; above 1 it needs a temperature above 0.
        seed: the seed of the random numbers.
        stop: texts that end an answer, which is cut before the first of them.
        stop_token_ids: tokens that end an answer, in addition to the model's.
        ignore_eos: continue past the model's stop tokens.
        logprobs: the number of most likely tokens to return at each position, with their log-probabilities in the
            model's distribution. 0 returns only those of the chosen tokens, and None returns none.

    Raises:
        UserError: a value is out of range.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    n: int = 1
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self):
        integers = {"max_new_tokens": 1, "top_k": 0, "n": 1, "seed": 0}
        checked: dict[str, Any] = {
            name: whole_number("sampling", name, getattr(self, name), least)
            for name, least in integers.items()
        }
        temperature = real_number("sampling", "temperature", self.temperature, 0.0)
        if temperature > 0:
            real_number("sampling", "temperature above 0", temperature, MIN_TEMPERATURE)
        penalties = "presence_penalty", "frequency_penalty"
        checked |= {
            "temperature": temperature,
            "top_p": real_number("sampling", "top_p", self.top_p, above=0.0, most=1.0),
            "min_p": real_number("sampling", "min_p", self.min_p, 0.0, 1.0),
            "repetition_penalty": real_number(
                "sampling", "repetition_penalty", self.repetition_penalty, above=0.0
            ),
            "logit_bias": _bias(self.logit_bias),
            "stop": stop_texts(self.stop),
            "stop_token_ids": _token_ids(self.stop_token_ids),
        } | {
            name: real_number("sampling", name, getattr(self, name), -MAX_PENALTY, MAX_PENALTY)
            for name in penalties
        }
        if self.logprobs is not None:
            checked["logprobs"] = whole_number("sampling", "logprobs", self.logprobs, 0, MAX_ALTERNATIVES)
        one_of("sampling", "ignore_eos", self.ignore_eos, (True, False))
        if checked["n"] > 1 and temperature == 0:
            raise UserError(
                f"sampling: n={checked['n']} answers at temperature 0 would be alike: give a temperature above 0"
            )
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def penalized(self) -> bool:
        """True if there is a penalty, so that tokens must be counted."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def stop_tokens(self, eos: Iterable[int]) -> tuple[int, ...]:
        """Return the tokens that end an answer of a model whose own are `eos`."""
        return (*(() if self.ignore_eos else eos), *self.stop_token_ids)


def stop_texts(stop: Any) -> tuple[str, ...]:
    """Return the texts that end an answer. Raises UserError if they are not a list of texts."""
    if isinstance(stop, str) or not _is_list(stop):
        raise UserError(f"sampling: stop must be a list of texts, got {shown(stop)}")
    texts = tuple(stop)
    if not all(isinstance(text, str) and text for text in texts):
        raise UserError(f"sampling: stop must be a list of texts, none empty, got {shown(list(texts))}")
    return texts


def _token_ids(ids: Any) -> tuple[int, ...]:
    if isinstance(ids, str):
        raise UserError(
            f"sampling: stop_token_ids must be a list of token ids, got the text {ids!r}: stop=[{ids!r}] ends an "
            "answer at a text"
        )
    if not _is_list(ids):
        raise UserError(f"sampling: stop_token_ids must be a list of token ids, got {shown(ids)}")
    return tuple(whole_number("sampling", "a token id of stop_token_ids", token, 0) for token in ids)


def _is_list(value: Any) -> bool:
    """Return True for an iterable. An array without axes does not count as one."""
    return isinstance(value, Iterable) and getattr(value, "shape", None) != ()


def _bias(bias: Any) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise UserError(f"sampling: logit_bias must be a mapping of token ids to numbers, got {shown(bias)}")
    return {
        whole_number("sampling", "a token id of logit_bias", token, 0): real_number(
            "sampling", f"logit_bias of token {token}", value, -100.0, 100.0
        )
        for token, value in bias.items()
    }
