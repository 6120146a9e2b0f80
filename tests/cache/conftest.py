"""The tiny model, and two sequences."""

import pytest

from tests.inference.cached import TOKENS
from tests.tiny_models import tiny_model


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def tokens():
    return TOKENS
