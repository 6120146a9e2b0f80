"""Contexts, questions about them, and policies of every kind that a cache may be made with."""

import dataclasses

import numpy as np

from kvjax.policies import make_policy
from kvjax.sampling_params import SamplingParams
from tests.inference.delayed import delayed
from tests.tiny_models import tiny_gates, tiny_sink_gates

RANDOM = np.random.default_rng(3)
CONTEXTS = [RANDOM.integers(0, 61, 63), RANDOM.integers(0, 61, 40)]
"""Both are read in one call of 64 tokens, or in two of 32."""
QUESTIONS = [RANDOM.integers(0, 61, length) for length in (5, 1, 9)]
NEW = 17
"""Number of new tokens: one token and one block of 16."""
SAMPLING = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
WITH_LOGPROBS = dataclasses.replace(SAMPLING, logprobs=0)


def policies(model):
    often = {"entries": 24, "when": "every", "every": 8}
    return {
        "full": lambda: make_policy("full"),
        "wgkv": lambda: make_policy("wgkv:tau=0.5,window=6", model=model, gates=tiny_gates(model)),
        "max_entries": lambda: delayed(window=6, max_entries=7, delay=3),
        "snapkv": lambda: make_policy("snapkv:ratio=0.5,observed=4"),
        "quest": lambda: make_policy("quest:ratio=0.5"),
        # these compact during decoding: they move entries and change the metadata of entries
        "r_kv": lambda: make_policy({"r_kv": often}, model=model),
        "h2o": lambda: make_policy({"h2o": often}, model=model),
        "fast_kvzip": lambda: make_policy(
            "fast_kvzip:entries=24,when=position,every=8,buffer=8,protected.last=8", model=model,
            gates=tiny_sink_gates(model),
        ),
    }  # fmt: skip
