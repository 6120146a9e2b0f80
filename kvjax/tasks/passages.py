"""Documents from text files, cut into passages of whole paragraphs."""

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from kvjax.errors import UserError
from kvjax.files import is_there, read_text
from kvjax.tasks.splits import Split

PARAGRAPH_END = re.compile(r"\n[^\S\n]*\n\s*")
LEAST = 0.9
"""The least share of its maximum length that a passage has."""
CALIBRATION_SHARE = 0.25
"""The least share of the documents' tokens that is kept to calibrate on."""

Item = TypeVar("Item")
Count = Callable[[Sequence[str]], list[int]]
"""A function that returns the number of tokens of each text."""


def read_documents(path: Path) -> list[str]:
    """Return the text of a file, or of each .txt file in a folder and its subfolders, in the order of their names.

    Raises:
        UserError: no such file, a file that is not UTF-8, or a folder without .txt files.
    """
    is_folder = is_there(path, "--data documents") and path.is_dir()
    files = sorted(x for x in path.rglob("*.txt") if not x.is_dir()) if is_folder else [path]
    if not files:
        raise UserError(f"--data documents {path}: the folder has no .txt file")
    return [read_text(file, "--data documents") for file in files]


@dataclass(frozen=True)
class Paragraph:
    """A paragraph of a document."""

    text: str
    """The paragraph's text, with the white space after it."""
    tokens: int
    """The number of tokens of that text."""


Document = Sequence[Paragraph]


def paragraphs(text: str, count: Count) -> list[Paragraph]:
    """Return a document's paragraphs, whose joined texts are the document's text."""
    ends = [0, *(match.end() for match in PARAGRAPH_END.finditer(text)), len(text)]
    texts = [text[a:b] for a, b in itertools.pairwise(ends) if a < b]
    return list(map(Paragraph, texts, count(texts)))


def split_documents(documents: Sequence[Document]) -> tuple[list[Document], list[Document]]:
    """Return the text to compare on and the text to calibrate on, which share no paragraph.

    The calibration text has `CALIBRATION_SHARE` of all tokens. It consists of whole documents in random order, the last
    one cut before a paragraph.
    """
    left = CALIBRATION_SHARE * sum(paragraph.tokens for document in documents for paragraph in document)
    compared, calibration = [], []
    for index in np.random.default_rng(0).permutation(len(documents)):
        document = documents[index]
        cut = len(document)
        while cut and left > 0:
            cut -= 1
            left -= document[cut].tokens
        compared.append(document[:cut])
        calibration.append(document[cut:])
    return compared, calibration


def passages(documents: Sequence[Document], length: int) -> list[str]:
    """Return runs of whole paragraphs with at most `length` tokens, and at least nine tenths of it.

    No two passages share a paragraph. Their order mixes the documents.
    """
    ordered = [passage for document in documents for passage in _passages(document, length)]
    return [ordered[i] for i in np.random.default_rng(0).permutation(len(ordered))]


def _passages(document: Document, length: int) -> list[str]:
    texts, start = [], 0
    while start < len(document):
        stop, tokens = start, 0
        while stop < len(document) and tokens + document[stop].tokens <= length:
            tokens, stop = tokens + document[stop].tokens, stop + 1
        if stop > start and tokens >= LEAST * length:
            texts.append("".join(paragraph.text for paragraph in document[start:stop]).strip())
            start = stop
        else:
            # the document ends here, or the next paragraph is too long
            start += 1
    return texts


def sample_items(items: Sequence[Item], split: Split, count: int, description: str) -> list[Item]:
    """Return `count` different items, chosen at random with the split's seed.

    Raises UserError if there are fewer. description: the items and their source, for the error.
    """
    if count > len(items):
        raise UserError(
            f"{description}: found {len(items)}, needed {count}; give more text or shorter contexts"
        )
    order = np.random.default_rng(split.seed).permutation(len(items))
    return [items[i] for i in (order[-count:] if split.skipped else order[:count])]
