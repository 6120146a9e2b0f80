"""Haystacks of text, and hiding sentences in them."""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int

from kvjax.errors import UserError
from kvjax.files import read_text
from kvjax.tasks.builtin import heldout_files

PASSAGE = "The river is wide. The hills are low. The boat is slow. We left at dawn. We will be back by dusk."
DEPTHS = tuple(np.linspace(0, 100, 40).round().astype(int).tolist())
"""Percent."""
LONGEST = 400
"""Characters after which a sentence without an end is cut at line ends: lists, verse and program text have no stops."""

PARAGRAPH = "\n\n"
"""Between a text's end and its beginning again."""

WORD = re.compile(r"\S+\s*")
SENTENCE_END = re.compile(r"(?<=[.!?])[\"'”’)\]]*\s+|\n[^\S\n]*\n\s*")
LINE_END = re.compile(r"\s*\n")


@runtime_checkable
class Haystack(Protocol):
    @property
    def text(self) -> str:
        """All that it may be made of: hidden values must not occur here."""
        ...

    def hide(self, rng: np.random.Generator, units: int, needles: Sequence[str]) -> str:
        """So many units of haystack with the needles hidden in it, in their order."""
        ...


@dataclass(frozen=True)
class Lines:
    """The filler passage repeated, one a line. Needles are lines of their own, before different ones of these lines."""

    text = PASSAGE

    def hide(self, rng: np.random.Generator, units: int, needles: Sequence[str]) -> str:
        before = dict(zip(np.sort(rng.choice(units, len(needles), replace=False)), needles, strict=True))
        lines = ([before[at], PASSAGE] if at in before else [PASSAGE] for at in range(units))
        return "\n".join(itertools.chain.from_iterable(lines))


@dataclass(frozen=True)
class Essays:
    """The first words of a text, which is repeated where it is too short. Needles stand between its sentences, at
    depths drawn without repetition from `depths`.

    A depth is the percent of what stands before the needle: of sentences, rounded down to whole ones, or of characters,
    to the nearest sentence.
    """

    text: str
    """All of it."""
    source: str
    """Its name, for messages."""
    depths: tuple[int, ...] = DEPTHS
    """Percent."""
    depth_of: Literal["sentences", "characters"] = "sentences"
    """Unit that a depth is a percent of."""
    _words: tuple[str, ...] = field(init=False, repr=False)
    _starts: Int[np.ndarray, " sentences"] = field(init=False, repr=False)

    def __post_init__(self):
        sentences = [WORD.findall(sentence) for sentence in split_sentences(self.text)]
        if not sentences:
            raise UserError(f"{self.source}: there is no text in it")
        sentences[-1][-1] += PARAGRAPH
        object.__setattr__(self, "_words", tuple(itertools.chain.from_iterable(sentences)))
        object.__setattr__(self, "_starts", np.cumsum([0, *map(len, sentences[:-1])]))

    def hide(self, rng: np.random.Generator, units: int, needles: Sequence[str]) -> str:
        times = -(-units // len(self._words))
        words = list((self._words * times)[:units])
        words[-1] = words[-1].rstrip()
        starts = (len(self._words) * np.arange(times)[:, None] + self._starts).ravel()
        borders = np.append(starts[starts < units], units)
        depths = np.sort(rng.choice(self.depths, len(needles), replace=False))
        if self.depth_of == "sentences":
            places = borders[(len(borders) - 1) * depths // 100]
        else:
            ends = np.cumsum([0, *map(len, words)])
            places = borders[np.abs(ends[borders] - depths[:, None] * ends[-1] / 100).argmin(1)]
        for border, needle in reversed(list(zip(places.tolist(), needles, strict=True))):
            if border == units:
                words.insert(border, f" {needle}")
            else:
                # a needle is followed by the white space that was found at its place
                before = words[border - 1] if border else " "
                words.insert(border, needle + before[len(before.rstrip()) :])
        return "".join(words)


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
    return Essays(read_text(file, "--data essays"), f"--data essays {file}")
