"""Fixtures with the model and the prompts that methods are tested with."""

import pytest

from tests.policies.captured import two_prompts, unnormed


@pytest.fixture(scope="session")
def model():
    return unnormed()


@pytest.fixture(scope="session")
def prompts():
    return two_prompts()
