"""Fixture with the results of a real prefill of the two prompts."""

import pytest

from tests.policies.captured import captured_prompts


@pytest.fixture(scope="session")
def captured():
    return captured_prompts()
