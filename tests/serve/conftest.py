"""The server that most tests share, and servers that compile only what their tests run."""

import pytest

from kvjax.engine import Engine
from tests.serve.running import running


@pytest.fixture(scope="package", autouse=True)
def without_warming_up():
    """tests/engine/test_warm_up.py tests the warming up, which takes longer than the answers of these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "warm_up", lambda self, constrained, say: None)
        yield


@pytest.fixture(scope="package")
def served():
    with running() as server:
        yield server
