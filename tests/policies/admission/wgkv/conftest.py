"""Fixture with write gates for the tiny model."""

import pytest

from tests.tiny_models import tiny_gates


@pytest.fixture(scope="module")
def gates(model):
    return tiny_gates(model)
