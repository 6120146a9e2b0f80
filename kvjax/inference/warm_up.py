"""Compiling ahead: the programs that contexts, questions and answers up to some length run."""

import numpy as np

from kvjax.errors import named_arguments, whole_number
from kvjax.inference.forward import SIZES
from kvjax.inference.sampling import BLOCK, CHUNK, prefill, sample
from kvjax.models.decoder import Decoder
from kvjax.policies.budget import Ratio
from kvjax.policies.policy import Policy
from kvjax.struct import changed

QUESTIONS = 16, 64
"""Tokens of the questions that are asked: a longer one is read by one more program."""


@named_arguments()
def warm_up(
    model: Decoder,
    policy: Policy | None = None,
    *,
    max_tokens: int,
    batch: int = 1,
    chunk: int = CHUNK,
    page_size: int | None = None,
    block: int = BLOCK,
) -> None:
    """Compile what `prefill` and `sample` run with the same `max_tokens`, whatever the lengths: at most as many
    programs of prefill as there are `kvjax.inference.forward.SIZES`. They serve all policies that differ in numbers
    alone.

    Args:
        max_tokens: the longest prompt with its answer.
        batch: prompts of a call.
        chunk, page_size, block: as the calls to come are given them.

    Raises:
        UserError: as `prefill` and `sample`.
    """
    max_tokens = whole_number("warm_up", "max_tokens", max_tokens)
    batch, chunk = whole_number("warm_up", "batch", batch), whole_number("warm_up", "chunk", chunk)
    block = whole_number("warm_up", "block", block)
    if policy is not None and policy.eviction is not None and policy.eviction.rereads:
        # the shorter prompts may have fewer places than their beginning takes
        policy = changed(policy, budget=Ratio(1.0))
    options = {"policy": policy, "page_size": page_size, "chunk": chunk}

    def prompts(tokens: int) -> list[np.ndarray]:
        return [np.zeros(tokens, np.int32)] * batch

    longest = min(chunk, max_tokens)
    for size in [size for size in SIZES if size < longest] + [longest]:
        prefill(model, prompts(size), max_tokens=max_tokens, **options)
    cache = prefill(model, prompts(1), max_tokens=max_tokens, **options)
    for size in QUESTIONS:
        if size + block + 4 <= max_tokens:
            sample(
                model, prompts(size), cache=cache, max_new_tokens=block + 3, block=block, eos=(), **options
            )
