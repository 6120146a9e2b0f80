"""What most of these tests run: the tiny model and two sequences; of evictions the prompts, and what a prefill of them
computes by the model without QK-norm, which their files take."""

import numpy as np
import pytest

from tests.inference.cached import LENGTH
from tests.policies.captured import captured_prompts, two_prompts
from tests.tiny_models import tiny_model


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(0).integers(0, 61, (2, LENGTH))


@pytest.fixture(scope="session")
def prompts():
    return two_prompts()


@pytest.fixture(scope="session")
def captured():
    return captured_prompts()
