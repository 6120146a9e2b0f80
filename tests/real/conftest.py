"""Fixtures of a real model. `KVJAX_REAL_MODEL` names the GGUF file of SmolLM2-135M-Instruct, and `KVJAX_GEMMA3` that of
Gemma 3 270M; without them these tests are skipped. CONTRIBUTING.md says how to get the files."""

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
