"""What most of these tests run: the tiny model and two sequences; of evictions the prompts, and what a prefill of them
computes by the model without QK-norm, which their files take."""

import numpy as np
import pytest

from tests.inference.cached import TOKENS
from tests.policies.captured import WINDOW, captured_prompts, two_prompts
from tests.tiny_models import tiny_model


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def tokens():
    return TOKENS


@pytest.fixture(scope="module")
def admitted(model):
    """Chance with its own rate for each head."""
    rates = np.tile([0.9, 0.5, 0.7, 0.2], (3, 1)).astype(np.float32)
    return {"random": {"rates": rates, "window": WINDOW}}


@pytest.fixture(scope="session")
def prompts():
    return two_prompts()


@pytest.fixture(scope="session")
def captured():
    return captured_prompts()
