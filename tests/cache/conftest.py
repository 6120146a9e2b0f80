"""The tiny model, and two sequences."""

import numpy as np
import pytest

from tests.inference.cached import LENGTH
from tests.tiny_models import tiny_model


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(0).integers(0, 61, (2, LENGTH))
