"""Test an eviction around another that has metadata of its own, here a bias."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.inference import prefill
from kvjax.policies import Adaptive, CriticalKV, Entries, Policy, Ratio, Schedule, make_policy
from kvjax.policies.base import Eviction, TokenMetadata
from kvjax.struct import struct
from tests.inference.cached import TOKENS
from tests.policies.captured import PAGE, entries, retained_pages
from tests.tiny_models import tiny_model


@struct
class Lowered(TokenMetadata, Eviction):
    """An eviction that lowers every token by 2 and scores by the key's first number."""

    @property
    def metadata(self):
        return {"bias": "float32"}

    def bias(self, state, step):
        return jnp.full(step.k.shape[:3], -2.0)

    def score(self, state, stored):
        return stored.k[..., 0].astype(jnp.float32)


@struct
class Oldest(TokenMetadata, Eviction):
    """An eviction that keeps the oldest entries."""

    @property
    def metadata(self):
        return {"position": "int32"}

    def score(self, state, stored):
        return -stored.metadata["position"].astype(jnp.float32)


def metadata(cache, name):
    """Yield each head with the metadata of its entries."""
    length = np.asarray(cache.layers.length)
    for row in np.ndindex(length.shape):
        pages = retained_pages(cache, *row)
        yield row, np.asarray(cache.pages.metadata[name])[pages].reshape(-1)[: length[row]]


@pytest.mark.parametrize("wrap", [lambda x: x, Adaptive, CriticalKV], ids=["alone", "Adaptive", "CriticalKV"])
def test_an_eviction_writes_a_bias_within_any_wrapper(wrap):
    cache = prefill(
        tiny_model(), TOKENS, policy=Policy(eviction=wrap(Lowered()), schedule=Schedule(Ratio(0.5)))
    )
    for _, bias in metadata(cache, "bias"):
        assert (bias == -2).all()


@pytest.mark.slow
def test_positions_are_written_for_methods_that_name_them():
    """An admission has dropped tokens in between, and an entry is still the token that its position says."""
    model = tiny_model()
    whole = prefill(model, TOKENS, policy=make_policy("full"), page_size=PAGE)
    dropping = make_policy({"random": {"rates": np.full((3, 4), 0.5), "window": 9, "seed": 3}}, model=model)
    policy = Policy(dropping.admission, eviction=Oldest(), window=9, schedule=Schedule(Entries(16)))
    cache = prefill(model, TOKENS, policy=policy, page_size=PAGE, chunk=16)
    for row, position in metadata(cache, "position"):
        assert len(position) == 8
        assert (np.diff(position) > 0).all()
        if row[0] == 0:  # in later layers, tokens that were dropped earlier make a difference
            np.testing.assert_allclose(entries(cache, *row), entries(whole, *row)[position], atol=1e-5)
