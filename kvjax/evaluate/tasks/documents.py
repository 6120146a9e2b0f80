"""Natural documents: text files, cut into passages of whole paragraphs."""

import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from kvjax.errors import UserError
from kvjax.text_file import read_text

PARAGRAPH_END = re.compile(r"\n[^\S\n]*\n\s*")
LEAST = 0.9
"""Of the room, a passage fills at least so much."""

Item = TypeVar("Item")
Count = Callable[[Sequence[str]], list[int]]
"""Tokens of each of some texts."""


def read_documents(path: Path) -> list[str]:
    """The text of a file, or of each .txt file in a folder and those below it, in the order of their names.

    Raises:
        UserError: no such file, one that is not UTF-8, or a folder without any.
    """
    files = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
    if not files:
        raise UserError(f"--documents {path}: the folder has no .txt file")
    return [read_text(file, "--documents") for file in files]


def passages(documents: Sequence[str], count: Count, room: int) -> list[str]:
    """Runs of whole paragraphs that fill `room` tokens, or at least nine tenths of it; no two share a paragraph.

    They come in an order that mixes the documents.
    """
    found = [passage for document in documents for passage in _passages(document, count, room)]
    return [found[i] for i in np.random.default_rng(0).permutation(len(found))]


def _passages(document: str, count: Count, room: int) -> list[str]:
    ends = [0, *(match.end() for match in PARAGRAPH_END.finditer(document)), len(document)]
    paragraphs = [document[a:b] for a, b in itertools.pairwise(ends)]
    sizes = count(paragraphs)
    found, start = [], 0
    while start < len(paragraphs):
        stop, tokens = start, 0
        while stop < len(paragraphs) and tokens + sizes[stop] <= room:
            tokens, stop = tokens + sizes[stop], stop + 1
        if tokens >= LEAST * room:
            found.append("".join(paragraphs[start:stop]).strip())
            start = stop
        else:
            # the document ends here, or a paragraph follows that is too long for what is left
            start += 1
    return found


def chosen(items: Sequence[Item], first: int, count: int, made_of: str) -> list[Item]:
    """`count` different items, consecutive ones from that of the seed `first` on.

    Raises UserError if there are not so many. `made_of`: what they are and come from.
    """
    if count > len(items):
        raise UserError(f"{made_of}: {len(items)}, {count} are needed")
    return [items[(first + index) % len(items)] for index in range(count)]
