"""The two counting tasks, which ask for the most common words of a list or of a coded text."""

import string
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvjax.tasks.prompt import Example, ExampleQuestion
from kvjax.tasks.ruler.random_strings import distinct, letters, single_words
from kvjax.tasks.ruler.words import ADJECTIVES, NOUNS, invented_words
from kvjax.tasks.ruler.writer import Supply, generator

LIST_RESERVED = 120
COMMON = 10
"""The number of words that occur often."""
LIST_OPENING = "Below is a numbered list of words. Some occur more often than others: remember which.\n\n"
LIST_QUESTION = "Which {count} words are the most common in the list above?"
LIST_PREFIX = "\nThe {count} most common words are:"

CODED_RESERVED = 50
CODED_OPENING = "Below is a coded text. Keep count of how often each coded word occurs.\n\n"
CODED_QUESTION = 'Which three coded words occur most often in the text above? The dots "..." do not count.'
CODED_PREFIX = "\nThe three most frequent coded words are:"
NOISE = "..."
ZETA_2 = np.pi**2 / 6


@dataclass(frozen=True)
class CommonWords:
    """Ten words occur often in a numbered list, the others (the units) rarely. A short worked example comes first.

    Below 4096 tokens all words occur less often, so that there are enough other words. Words are English. When they run
    out (at 16K to 32K tokens), some common and some other words are invented.
    """

    length: int
    """Tokens of a context, which determine how often words occur."""
    name: str = "cwe"
    fewest = 1

    @property
    def repeats(self) -> tuple[int, int]:
        """The numbers of occurrences of a common word and of any other word."""
        return (6, 1) if self.length < 4096 else (30, 3)

    @property
    def example(self) -> tuple[int, int, int]:
        """The number of words in the worked example, and how often a common word and any other word occur in it."""
        return (20, 3, 1) if self.length < 4096 else (40, 10, 3)

    @property
    def supply(self) -> Supply:
        words = len(ADJECTIVES) + len(NOUNS) + len(invented_words())
        return Supply(words - COMMON - self.example[0], "words")

    def write(self, seed: int, units: int) -> Example:
        rng = generator(self, seed)
        n_example, *example_repeats = self.example
        words = single_words(rng, n_example + COMMON + units)
        example_answer, answer = words[:COMMON], words[n_example : n_example + COMMON]
        example = self._list(rng, words[:n_example], *example_repeats)
        last = self._list(rng, words[n_example:], *self.repeats)
        question, prefix = (part.format(count=COMMON) for part in (LIST_QUESTION, LIST_PREFIX))
        context = f"{example}{question}{prefix} {number_words(example_answer)}\n\n{last}"
        return Example(
            context, (ExampleQuestion(question, prefix, tuple(answer), "all", LIST_RESERVED, self.name),)
        )

    def _list(self, rng: np.random.Generator, words: list[str], often: int, rarely: int) -> str:
        items = words[:COMMON] * often + words[COMMON:] * rarely
        return f"{LIST_OPENING}{number_words([items[i] for i in rng.permutation(len(items))])}\n"


def number_words(words: Sequence[str]) -> str:
    """Return the words as `1. a 2. b 3. c`."""
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))


@dataclass(frozen=True)
class CodedWords:
    """A shuffled text of `tokens` / 50 random words of six letters. The first one is replaced by noise (dots).

    The k-th word occurs ⌊units · k⁻² / ζ(2)⌋ times, which may be 0.
    """

    tokens: int
    """The length without the tokens reserved for the answer and the tokens of the chat template."""
    name: str = "fwe"
    fewest = 73  # from here on, the fourth word occurs more often than the fifth
    supply = None

    def write(self, seed: int, units: int) -> Example:
        rng = generator(self, seed)
        ranks = np.arange(1, max(5, self.tokens // 50) + 1)
        counts = np.floor(units / ZETA_2 / ranks**2).astype(int)
        wording = CODED_OPENING + CODED_QUESTION + CODED_PREFIX
        coded = distinct(rng, letters(string.ascii_lowercase, 6), len(ranks) - 1, avoid=wording)
        text = np.repeat([NOISE, *coded], counts)
        context = f"{CODED_OPENING}{' '.join(rng.permutation(text))}\n"
        question = ExampleQuestion(
            CODED_QUESTION, CODED_PREFIX, tuple(coded[:3]), "all", CODED_RESERVED, self.name
        )
        return Example(context, (question,))
