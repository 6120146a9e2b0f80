"""The model and the prompts that evictions and selections are tested with."""

import numpy as np
import pytest

from tests.tiny_models import tiny_model

LENGTHS = 60, 41


@pytest.fixture(scope="module")
def model():
    """Without QK-norm, which would give all keys one norm."""
    return tiny_model(qk_norm=False)


@pytest.fixture(scope="module")
def prompts():
    """No token twice: the first layer's scores would be equal up to their last bit."""
    random = np.random.default_rng(3)
    return [random.permutation(61)[:length] for length in LENGTHS]
