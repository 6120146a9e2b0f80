"""The packaged tokenizer and text as the tasks need them."""

from functools import cache
from importlib import resources
from typing import Literal

import numpy as np

from kvjax.evaluate.tasks.task import Tokens, as_tokens
from kvjax.evaluate.tasks.vocabulary import Vocabulary

FILE_HEADING = "#### "
"""Starts the line before each file of the packaged text; the file's path in the standard library follows."""


@cache
def _tokenizer():
    from tokenizers import Tokenizer

    return Tokenizer.from_str(
        (resources.files("kvjax.builtin") / "model" / "tokenizer.json").read_text(encoding="utf-8")
    )


@cache
def builtin_vocabulary() -> Vocabulary:
    """The built-in model's vocabulary."""
    return Vocabulary.from_tokenizer(_tokenizer())


def heldout_files() -> dict[str, str]:
    """Path in the standard library -> source of each packaged file. The built-in model has seen none."""
    packaged = (resources.files("kvjax.builtin") / "heldout.txt").read_text(encoding="utf-8")
    files = {}
    for part in packaged.split(f"\n{FILE_HEADING}")[1:]:
        path, _, source = part.partition("\n")
        files[path] = source
    return files


@cache
def builtin_text(split: Literal["train", "evaluate"]) -> Tokens:
    """Token ids of the packaged text: every other file for training gates, the others for evaluation."""
    sources = list(heldout_files().values())[["train", "evaluate"].index(split) :: 2]
    end = builtin_vocabulary().end
    pieces: list[np.ndarray] = []
    for encoding in _tokenizer().encode_batch(sources, add_special_tokens=False):
        pieces += [as_tokens(encoding.ids), as_tokens([end])]
    return np.concatenate(pieces)
