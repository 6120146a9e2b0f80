"""Fixtures that the tests of all ops share."""

import pytest
from jaxtyping import config as jaxtyping_config


@pytest.fixture
def shapes_unchecked():
    """Turn off jaxtyping's checks, which would raise before the op does."""
    jaxtyping_config.update("jaxtyping_disable", True)
    yield
    jaxtyping_config.update("jaxtyping_disable", False)
