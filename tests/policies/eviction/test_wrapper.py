"""An eviction around another, which is asked for its metadata: here for a bias of its own."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.inference import prefill
from kvjax.policies import Adaptive, CriticalKV, Policy, Ratio, Schedule
from kvjax.policies.base import Eviction, TokenMetadata
from kvjax.struct import struct
from tests.inference.cached import TOKENS
from tests.tiny_models import tiny_model


@struct
class Lowered(TokenMetadata, Eviction):
    """Every token by 2; it looks at nothing else."""

    @property
    def planes(self):
        return {"bias": "float32"}

    def bias(self, state, step):
        return jnp.full(step.k.shape[:3], -2.0)

    def score(self, state, stored):
        return stored.k[..., 0].astype(jnp.float32)


@pytest.mark.parametrize("wrap", [lambda x: x, Adaptive, CriticalKV], ids=["alone", "Adaptive", "CriticalKV"])
def test_an_eviction_may_write_it_whatever_is_around_it(wrap):
    cache = prefill(
        tiny_model(), TOKENS, policy=Policy(eviction=wrap(Lowered()), schedule=Schedule(Ratio(0.5)))
    )
    table, length = np.asarray(cache.layers.page_table), np.asarray(cache.layers.length)
    bias = np.asarray(cache.pages.planes["bias"])
    for row in np.ndindex(length.shape):
        used = table[row][: -(-length[row] // cache.page_size)]
        assert (bias[used].reshape(-1)[: length[row]] == -2).all()
