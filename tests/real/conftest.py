"""Fixtures of SmolLM2-135M-Instruct, if `KVJAX_REAL_MODEL` names its GGUF file, and Gemma 3 270M, if `KVJAX_GEMMA3`
does. CONTRIBUTING.md says how to get them."""

import os
from pathlib import Path

import pytest

from kvjax.models import load_model, load_tokenizer

REAL = os.environ.get("KVJAX_REAL_MODEL", "")


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.real)
            needed = "KVJAX_GEMMA3" if item.path.name == "test_gemma3.py" else "KVJAX_REAL_MODEL"
            if not os.environ.get(needed):
                item.add_marker(pytest.mark.skip(reason=f"{needed} is not set"))


@pytest.fixture(scope="session")
def file() -> Path:
    return Path(REAL)


@pytest.fixture(scope="session")
def model(file):
    return load_model(file)


@pytest.fixture(scope="session")
def tokenizer(file):
    return load_tokenizer(file)
