"""The server that most tests share."""

import pytest

from tests.serve.running import running


@pytest.fixture(scope="package")
def served():
    with running() as server:
        yield server
