"""Haystacks: texts that hide needles (sentences)."""

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
"""Depths in percent."""
LONGEST = 400
"""Sentences with more characters are cut at line ends, since lists, verse and code have no full stops."""

PARAGRAPH = "\n\n"
"""The separator between a text's end and its next repetition."""

WORD = re.compile(r"\S+\s*")
SENTENCE_END = re.compile(r"(?<=[.!?])[\"'”’)\]]*\s+|\n[^\S\n]*\n\s*")
LINE_END = re.compile(r"\s*\n")


@runtime_checkable
class Haystack(Protocol):
    @property
    def text(self) -> str:
        """All text that the haystack may contain. Hidden values must not occur in it."""
        ...

    def hide(self, rng: np.random.Generator, units: int, needles: Sequence[str]) -> str:
        """Return `units` units of haystack that hide the needles, in order."""
        ...


@dataclass(frozen=True)
class Lines:
    """The filler passage on every line. Needles are separate lines, each before a different line of filler."""

    text = PASSAGE

    def hide(self, rng: np.random.Generator, units: int, needles: Sequence[str]) -> str:
        before = dict(zip(np.sort(rng.choice(units, len(needles), replace=False)), needles, strict=True))
        lines = ([before[at], PASSAGE] if at in before else [PASSAGE] for at in range(units))
        return "\n".join(itertools.chain.from_iterable(lines))


@dataclass(frozen=True)
class Essays:
    """The first words of a text, which is repeated if it is too short, with needles between its sentences.

    The needles' depths are sampled without repetition from `depths`. A depth is the percentage of the text before the
    needle: of its sentences, rounded down, or of its characters, rounded to the nearest end of a sentence.
    """

    text: str
    """The whole text."""
    source: str
    """The text's name, for messages."""
    depths: tuple[int, ...] = DEPTHS
    """Depths in percent."""
    depth_of: Literal["sentences", "characters"] = "sentences"
    """The unit that a depth is a percentage of."""
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
                # a needle is followed by the white space before it
                before = words[border - 1] if border else " "
                words.insert(border, needle + before[len(before.rstrip()) :])
        return "".join(words)


def split_sentences(text: str) -> list[str]:
    """Return the text's sentences, each with the white space after it. Joined, they are the stripped text."""
    sentences = []
    for sentence in _cut(text.strip(), SENTENCE_END):
        sentences += _cut(sentence, LINE_END) if len(sentence) > LONGEST else [sentence]
    return sentences


def _cut(text: str, end: re.Pattern[str]) -> list[str]:
    cuts = [0, *(match.end() for match in end.finditer(text)), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(cuts) if a < b]


def read_essays(file: Path | None) -> Essays:
    """Return a text file as a haystack, by default the packaged text.

    Raises:
        UserError: a file that is empty or cannot be read as UTF-8 text.
    """
    if file is None:
        return Essays("\n\n".join(heldout_files().values()), "the packaged text")
    return Essays(read_text(file, "--data essays"), f"--data essays {file}")
