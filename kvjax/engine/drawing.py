"""Samplers for the slots. There are two programs: a greedy one, and one with every sampling parameter."""

import dataclasses

import numpy as np

from kvjax.engine.request import Request
from kvjax.errors import UserError
from kvjax.inference.answers import AnswerLogprobs
from kvjax.inference.sampler import Counts, Logprobs, Sampler, make_sampler
from kvjax.mesh import BATCH, on_host, put
from kvjax.models.config import ModelConfig
from kvjax.sampling_params import MAX_ALTERNATIVES, SamplingParams

STOPS, BIASES = 256, 512
"""The number of stop tokens and of biased tokens that a slot has space for. Fewer of them compile nothing new."""
InSlots = list[tuple[int, Request]]
"""Requests, with their slots."""


def sampler_of(config: ModelConfig, requests: InSlots, slots: int) -> tuple[Sampler, Counts | None]:
    """Return the sampler of `slots` slots, and the token counts so far where penalties may need them."""
    params = [one.sampling for _, one in requests]
    plain = all(
        one.temperature == 0 and one.logprobs is None and not one.logit_bias and not one.penalized
        for one in params
    ) and all(one.constraint is None for _, one in requests)
    sampler = make_sampler(
        params, [one.number for _, one in requests], config.eos_ids, config.vocab_size, [slot for slot, _ in requests],
        slots, stops=STOPS, biases=0 if plain else BIASES,
    )  # fmt: skip
    if plain:
        return sampler, None
    answer, prompt = (np.zeros((slots, config.vocab_size), dtype) for dtype in (np.int32, bool))
    for slot, request in requests:
        prompt[slot, request.prompt] = True
        np.add.at(answer[slot], request.tokens, 1)
    counts = Counts(put(answer, BATCH, None), put(prompt, BATCH, None))
    return dataclasses.replace(sampler, greedy=False, penalized=True, alternatives=MAX_ALTERNATIVES), counts


def check_space(sampling: SamplingParams, ends: tuple[int, ...], vocabulary: int) -> None:
    """Raise UserError for tokens outside the vocabulary, or more of them than slots have space for."""
    for what, ids, most in (
        ("stop tokens", ends, STOPS),
        ("tokens in logit_bias", sampling.logit_bias, BIASES),
    ):
        if len(ids) > most:
            raise UserError(f"sampling: {len(ids)} {what}, expected at most {most}")
        if ids and (largest := max(ids)) >= vocabulary:
            raise UserError(
                f"sampling: {what} have id {largest}, the model's vocabulary is 0 … {vocabulary - 1}"
            )


def constrained(sampler: Sampler, requests: InSlots, vocabulary: int) -> Sampler:
    """Return a sampler that draws from the tokens that the requests' constraints allow next."""
    if all(one.constraint is None for _, one in requests):
        return sampler
    allowed = np.ones((sampler.top_k.shape[0], vocabulary), bool)
    for slot, request in requests:
        if request.constraint is not None:
            allowed[slot] = request.constraint.allowed()
    return dataclasses.replace(sampler, allowed=put(allowed, BATCH, None))


def logprobs_of(request: Request, found: Logprobs | None, slot: int, count: int) -> AnswerLogprobs | None:
    """Return the log-probabilities of a request's first `count` tokens of a block [count b], if it wants them."""
    wanted = request.sampling.logprobs
    if wanted is None or found is None:
        return None
    chosen, ids, values = (on_host(x)[:count, slot] for x in (found.chosen, found.tokens, found.values))
    pairs = zip(ids[:, :wanted].tolist(), values[:, :wanted].tolist(), strict=True)
    return AnswerLogprobs(chosen, [dict(zip(*pair, strict=True)) for pair in pairs])
