"""The built-in model's tokenizer and the packaged text, for tasks."""

from collections.abc import Callable, Iterable
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np

from kvjax.tasks.sample import Task, Tokens, as_tokens
from kvjax.tasks.vocabulary import Vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Kind = TypeVar("Kind", bound=Task)

FILE_HEADING = "#### "
"""Starts the line before each file of the packaged text, which has the file's path in the standard library."""


@cache
def _tokenizer() -> "Tokenizer":
    from tokenizers import Tokenizer

    return Tokenizer.from_str(
        (resources.files("kvjax.builtin") / "model" / "tokenizer.json").read_text(encoding="utf-8")
    )


@cache
def builtin_vocabulary() -> Vocabulary:
    """Return the built-in model's vocabulary."""
    return Vocabulary.from_tokenizer(_tokenizer())


def split_files(packaged: str) -> dict[str, str]:
    """Return the sources by path of the files in a text with the format of `heldout.txt`."""
    files = {}
    for part in packaged.split(f"\n{FILE_HEADING}")[1:]:
        path, _, source = part.partition("\n")
        files[path] = source
    return files


def encode_files(tokenizer: "Tokenizer", sources: Iterable[str]) -> Tokens:
    """Return the token ids of the sources, joined, each followed by `<|end|>`."""
    end = as_tokens([tokenizer.get_vocab()["<|end|>"]])
    encodings = tokenizer.encode_batch(list(sources), add_special_tokens=False)
    return np.concatenate([piece for e in encodings for piece in (as_tokens(e.ids), end)])


def heldout_files() -> dict[str, str]:
    """Return the sources of the packaged files by path in the standard library. The built-in model was not trained on
    them."""
    return split_files((resources.files("kvjax.builtin") / "heldout.txt").read_text(encoding="utf-8"))


@cache
def builtin_text(split: Literal["train", "evaluate"]) -> Tokens:
    """Return token ids of the packaged text. Every other file is for training gates, the rest for evaluation."""
    sources = list(heldout_files().values())
    return encode_files(_tokenizer(), sources[["train", "evaluate"].index(split) :: 2])


def builtin_task(kind: Callable[[Vocabulary, Tokens], Kind]) -> Kind:
    """Return a task such as `Recall` in the built-in vocabulary, with the packaged text for evaluation."""
    return kind(builtin_vocabulary(), builtin_text("evaluate"))
