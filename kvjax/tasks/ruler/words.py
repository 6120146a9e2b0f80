"""The words that tasks are written with: short, common English ones, and invented ones if those run out.

None of them is part of another, so no expected word is found inside another one when answers are scored by substrings.
"""

import itertools
from functools import cache
from importlib import resources


def _words(file: str) -> tuple[str, ...]:
    return tuple((resources.files("kvjax.tasks.ruler") / file).read_text(encoding="utf-8").split())


ADJECTIVES = _words("adjectives.txt")
NOUNS = _words("nouns.txt")

CONSONANTS, VOWELS = "bdfgjklmnrstvw", "aeiou"


@cache
def invented_words() -> tuple[str, ...]:
    """Return all five-letter words of consonant, vowel, consonant, vowel and consonant, such as `tomel`, except those
    that contain an English word of the lists or are part of one. There are about 67,000."""
    english = {*ADJECTIVES, *NOUNS}
    parts = {word[i : i + 5] for word in english for i in range(len(word) - 4)}
    spelt = map("".join, itertools.product(CONSONANTS, VOWELS, CONSONANTS, VOWELS, CONSONANTS))
    return tuple(
        word
        for word in spelt
        if word not in parts
        and not any(word[i:j] in english for i, j in itertools.combinations(range(6), 2) if j - i > 2)
    )
