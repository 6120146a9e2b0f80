"""SmolLM2-135M-Instruct, if `KVJAX_REAL_MODEL` names its GGUF file. CONTRIBUTING.md says how to get it."""

import os
from pathlib import Path

import pytest

from kvjax.models import load_model, load_tokenizer

REAL = os.environ.get("KVJAX_REAL_MODEL", "")


def pytest_collection_modifyitems(items):
    skip = pytest.mark.skip(reason="KVJAX_REAL_MODEL is not set")
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.real)
            if not REAL:
                item.add_marker(skip)


@pytest.fixture(scope="session")
def file() -> Path:
    return Path(REAL)


@pytest.fixture(scope="session")
def model(file):
    return load_model(file)


@pytest.fixture(scope="session")
def tokenizer(file):
    return load_tokenizer(file)
