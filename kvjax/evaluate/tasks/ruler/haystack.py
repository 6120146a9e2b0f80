"""Haystacks of text, and hiding sentences in them."""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from kvjax.errors import UserError
from kvjax.evaluate.tasks.builtin import heldout_files
from kvjax.evaluate.tasks.ruler.recipe import Supply

PASSAGE = "The river is wide. The hills are low. The boat is slow. We left at dawn. We will be back by dusk."
DEPTHS = tuple(np.linspace(0, 1, 40).tolist())
LONGEST = 400
"""Characters after which a sentence without an end is cut at line ends: lists, verse and program text have no stops."""

SENTENCE_END = re.compile(r"(?<=[.!?])[\"'”’)\]]*\s+|\n[^\S\n]*\n\s*")
LINE_END = re.compile(r"\s*\n")


@runtime_checkable
class Haystack(Protocol):
    @property
    def supply(self) -> Supply | None: ...

    @property
    def text(self) -> str:
        """All that it may be made of: hidden values must not occur here."""
        ...

    def hide(self, rng: np.random.Generator, units: int, needles: Sequence[str]) -> str:
        """So many units of haystack with the needles hidden in it, in their order."""
        ...


@dataclass(frozen=True)
class Lines:
    """The filler passage repeated, one a line. Needles are lines of their own at random places."""

    supply: Supply | None = None
    text: str = PASSAGE

    def hide(self, rng: np.random.Generator, units: int, needles: Sequence[str]) -> str:
        lines = [PASSAGE] * (units + len(needles))
        for at, needle in zip(
            np.sort(rng.choice(len(lines), len(needles), replace=False)), needles, strict=True
        ):
            lines[at] = needle
        return "\n".join(lines)


@dataclass(frozen=True)
class Essays:
    """The first sentences of a text. Needles stand between them, at depths drawn without repetition from `depths`.

    A depth is a share of the characters; the border nearest to it is taken.
    """

    text: str
    source: str
    depths: tuple[float, ...] = DEPTHS
    _sentences: tuple[str, ...] = field(init=False, repr=False)

    def __post_init__(self):
        sentences = tuple(split_sentences(self.text))
        if not sentences:
            raise UserError(f"{self.source}: there is no text in it")
        object.__setattr__(self, "_sentences", sentences)

    @property
    def supply(self) -> Supply:
        return Supply(len(self._sentences), f"sentences of {self.source}; name a longer text as `essays`")

    def hide(self, rng: np.random.Generator, units: int, needles: Sequence[str]) -> str:
        sentences = [*self._sentences[: units - 1], self._sentences[units - 1].rstrip()]
        ends = np.cumsum([0, *map(len, sentences)])
        depths = np.sort(rng.choice(self.depths, len(needles), replace=False))
        borders = np.abs(ends[None] - depths[:, None] * ends[-1]).argmin(1)
        pieces = []
        for index in range(units + 1):
            # a needle is followed by the white space that was found at its place
            before = sentences[index - 1] if index else " "
            gap = before[len(before.rstrip()) :] or " "
            hidden = [needle for border, needle in zip(borders, needles, strict=True) if border == index]
            if index == units:
                pieces += [gap + needle for needle in hidden]
            else:
                pieces += [*(needle + gap for needle in hidden), sentences[index]]
        return "".join(pieces)


def split_sentences(text: str) -> list[str]:
    """The text's sentences, each with the white space after it: joined they are the text, but for its outer space."""
    sentences = []
    for sentence in _cut(text.strip(), SENTENCE_END):
        sentences += _cut(sentence, LINE_END) if len(sentence) > LONGEST else [sentence]
    return sentences


def _cut(text: str, end: re.Pattern[str]) -> list[str]:
    cuts = [0, *(match.end() for match in end.finditer(text)), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(cuts) if a < b]


def read_essays(file: Path | None) -> Essays:
    """A text file as a haystack, by default the packaged text.

    Raises:
        UserError: a file that cannot be read as UTF-8 text, or has none.
    """
    if file is None:
        return Essays("\n\n".join(heldout_files().values()), "the packaged text")
    try:
        return Essays(file.read_text(encoding="utf-8"), str(file))
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror or error})") from None
    except UnicodeDecodeError:
        raise UserError(f"{file}: is not UTF-8 text") from None
