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
"""The numbers of stop tokens and of biased tokens that a slot has space for. They are fixed, so that no request
compiles a new program."""
InSlots = list[tuple[int, Request]]
"""Requests, with their slots."""


def sampler_of(config: ModelConfig, requests: InSlots, slots: int) -> tuple[Sampler, Counts | None]:
    """Return the sampler of `slots` slots, and the token counts so far where penalties may need them."""
    params = [request.sampling for _, request in requests]
    plain = all(
        x.temperature == 0 and x.logprobs is None and not x.logit_bias and not x.penalized for x in params
    ) and all(request.constraint is None for _, request in requests)
    sampler = make_sampler(
        params, [request.number for _, request in requests], config.eos_ids, config.vocab_size,
        [slot for slot, _ in requests], slots, stops=STOPS, biases=0 if plain else BIASES,
    )  # fmt: skip
    if plain:
        return sampler, None
    answer, prompt = (np.zeros((slots, config.vocab_size), dtype) for dtype in (np.int32, bool))
    for slot, request in requests:
        # the tokens of a named context do not count (`SamplingParams.repetition_penalty`)
        prompt[slot, request.prompt[request.cached if request.context else 0 :]] = True
        np.add.at(answer[slot], request.tokens, 1)
    counts = Counts(put(answer, BATCH, None), put(prompt, BATCH, None))
    return dataclasses.replace(sampler, greedy=False, penalized=True, alternatives=MAX_ALTERNATIVES), counts


def check_space(sampling: SamplingParams, ends: tuple[int, ...], vocabulary: int) -> None:
    """Raise UserError for tokens outside the vocabulary, or more of them than slots have space for."""
    for kind, ids, space in (
        ("stop tokens", ends, STOPS),
        ("tokens in logit_bias", sampling.logit_bias, BIASES),
    ):
        if len(ids) > space:
            raise UserError(f"sampling: {len(ids)} {kind}, expected at most {space}")
        if ids and (largest := max(ids)) >= vocabulary:
            raise UserError(
                f"sampling: {kind} have id {largest}, the model's vocabulary is 0 … {vocabulary - 1}"
            )


def constrained(sampler: Sampler, requests: InSlots, vocabulary: int) -> Sampler:
    """Return a sampler that draws from the tokens that the requests' constraints allow next."""
    if all(request.constraint is None for _, request in requests):
        return sampler
    allowed = np.ones((sampler.top_k.shape[0], vocabulary), bool)
    for slot, request in requests:
        if request.constraint is not None:
            allowed[slot] = request.constraint.allowed()
    return dataclasses.replace(sampler, allowed=put(allowed, BATCH, None))


def logprobs_of(request: Request, logprobs: Logprobs | None, slot: int, count: int) -> AnswerLogprobs | None:
    """Return the log-probabilities of a request's first `count` tokens in a block [count b]; None if it asks for
    none."""
    alternatives = request.sampling.logprobs
    if alternatives is None or logprobs is None:
        return None
    arrays = (on_host(x)[:count, slot] for x in (logprobs.chosen, logprobs.tokens, logprobs.values))
    return AnswerLogprobs.of(*arrays, count=alternatives)
