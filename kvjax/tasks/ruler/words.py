"""The words of tasks: short, common English words, and invented words if those run out.

No word is part of another, because answers are scored by substrings.
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
    """Return all five-letter words such as `tomel` (consonants and vowels alternate), about 67,000.

    Words that contain an English word of the lists, or are part of one, are left out.
    """
    english = {*ADJECTIVES, *NOUNS}
    parts = {word[i : i + 5] for word in english for i in range(len(word) - 4)}
    candidates = map("".join, itertools.product(CONSONANTS, VOWELS, CONSONANTS, VOWELS, CONSONANTS))
    return tuple(
        word
        for word in candidates
        if word not in parts
        and not any(word[i:j] in english for i, j in itertools.combinations(range(6), 2) if j - i > 2)
    )
