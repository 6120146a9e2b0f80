"""Fixtures of most of these tests: the tiny model without QK-norm and two sequences, and for evictions two prompts with
the values that a prefill of them computes."""

import numpy as np
import pytest

from kvjax import cache as caches
from tests.inference.cached import TOKENS
from tests.policies.captured import WINDOW, captured_prompts, two_prompts, unnormed


@pytest.fixture(scope="session")
def model():
    return unnormed()


@pytest.fixture(scope="session")
def tokens():
    return TOKENS


@pytest.fixture(scope="module")
def admitted(model):
    """Return the options of a random admission with its own rate for each head."""
    rates = np.tile([0.9, 0.5, 0.7, 0.2], (3, 1)).astype(np.float32)
    return {"random": {"rates": rates, "window": WINDOW}}


@pytest.fixture(scope="session")
def prompts():
    return two_prompts()


@pytest.fixture(scope="session")
def captured():
    return captured_prompts()


@pytest.fixture
def exact(monkeypatch):
    """Size small pools as large ones are sized: at most an eighth larger than is needed."""
    monkeypatch.setattr(caches.sizes, "SMALL_POOL", 0)
