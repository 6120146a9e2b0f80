"""Vocabularies, tokenizers, question files and documents that the tests of several tasks read."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer

from kvjax.builtin import builtin_model
from kvjax.tasks import builtin_vocabulary
from tests.tasks.document_inputs import paragraph_text
from tests.tasks.model_tokenizers import smol_tokenizer, spaced_tokenizer
from tests.tasks.ruler.question_data import hotpotqa, squad


@pytest.fixture(scope="session")
def vocabulary():
    return builtin_vocabulary()


@pytest.fixture(scope="session")
def blank_text(vocabulary):
    """Return filler that cannot be mistaken for a hidden token."""
    return np.full(2000, vocabulary.end, np.int32)


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ruler")
    (folder / "squad.json").write_text(json.dumps(squad()))
    (folder / "hotpot.json").write_text(json.dumps(hotpotqa()))
    return {"squad": folder / "squad.json", "hotpotqa": folder / "hotpot.json"}


@pytest.fixture(scope="session")
def builtin():
    return Tokenizer.from_file(str(builtin_model() / "tokenizer.json"))


@pytest.fixture(scope="session")
def smol():
    return smol_tokenizer()


@pytest.fixture(scope="session")
def chatty():
    return spaced_tokenizer()


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("documents")
    (folder / "more").mkdir()
    (folder / "one.txt").write_text(paragraph_text(1, 60))
    (folder / "more" / "two.txt").write_text(paragraph_text(2, 60))
    (folder / "not.rst").write_text("not read")
    return folder
