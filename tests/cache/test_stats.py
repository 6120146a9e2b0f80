"""Tests of a cache's stats and errors: the bytes are really allocated, and the capacity that an error names is
enough."""

import re

import jax
import numpy as np
import pytest

from kvjax import cache as caches
from kvjax import inference
from kvjax.cache import CapacityError
from kvjax.errors import UserError
from kvjax.policies import make_policy
from kvjax.sampling_params import SamplingParams
from tests.tiny_models import tiny_gates


@pytest.mark.slow
def test_stats_count_the_allocated_bytes(model):
    """With a quarter of the entries admitted, a third of the full cache's memory is enough for the prompt. It is not
    enough for the full policy."""
    prompt = [np.random.default_rng(1).integers(0, 61, 600)]
    policy = make_policy("random:ratio=0.25,window=8", model=model)
    third = 600 // 3
    cache = inference.prefill(model, prompt, policy=policy, capacity=third)
    sizes = caches.stats(cache)
    assert sizes.bytes <= sizes.full_bytes * 0.36
    assert 0.2 < sizes.kv_ratio < 0.32
    assert sum(a.nbytes for a in jax.live_arrays() if a.shape == cache.pages.pool.shape) == sizes.bytes
    for sequences in (0, len(prompt) + 1):
        with pytest.raises(UserError, match="^stats: sequences must be a whole number of at "):
            caches.stats(cache, sequences)
    with pytest.raises(CapacityError, match=r"policy full needs at least \d+ pages .* the pool has \d+"):
        inference.prefill(model, prompt, capacity=third)
    with pytest.raises(CapacityError, match="policy full"):
        inference.generate(
            model, [prompt[0][:190]], SamplingParams(max_new_tokens=40, ignore_eos=True), capacity=192
        )


@pytest.mark.thorough
@pytest.mark.parametrize("chunk", [pytest.param(256, marks=pytest.mark.thorough), 64])
def test_the_capacity_that_an_error_names_is_enough(model, chunk):
    """It is enough for the rest of the prompt and for the tokens generated after it."""
    prompt = [np.random.default_rng(3).integers(0, 61, 190)]
    policy = make_policy("wgkv:tau=0.5,window=8", model=model, gates=tiny_gates(model))
    sampling = SamplingParams(max_new_tokens=40, ignore_eos=True)
    options = {"sampling": sampling, "policy": policy, "chunk": chunk}
    with pytest.raises(CapacityError) as error:
        inference.generate(model, prompt, capacity=20, **options)
    named = re.search(r"a capacity of (\d+) entries per kv head, which is enough for", str(error.value))
    assert named is not None
    found = inference.generate(model, prompt, capacity=int(named[1]), **options)
    assert found.tokens[0].size == 40
    assert int(named[1]) <= 190 + 40 + 16
