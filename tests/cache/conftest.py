"""Fixtures of the cache tests: the tiny model and two sequences of tokens."""

import pytest

from tests.inference.cached import TOKENS
from tests.tiny_models import tiny_model


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def tokens():
    return TOKENS
