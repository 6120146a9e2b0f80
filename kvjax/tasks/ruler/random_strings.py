"""Random keys and values to hide. They are distinct, and do not occur in the text that hides them."""

import uuid
from collections.abc import Callable

import numpy as np

from kvjax.tasks.ruler.words import ADJECTIVES, NOUNS, invented_words

Make = Callable[[np.random.Generator], str]

WORD_PAIRS = len(ADJECTIVES) * len(NOUNS)


def distinct(rng: np.random.Generator, make: Make, count: int, avoid: str = "") -> list[str]:
    """Return `count` distinct strings from `make` that do not occur in `avoid`, ignoring case."""
    avoid, strings = avoid.lower(), {}
    while len(strings) < count:
        string = make(rng)
        if string.lower() not in avoid:
            strings[string] = None
    return list(strings)


def word_pairs(rng: np.random.Generator, count: int) -> list[str]:
    """Return `count` distinct pairs (at most `WORD_PAIRS`) such as `quiet-lantern`."""
    indices = rng.choice(WORD_PAIRS, size=count, replace=False)
    return [f"{ADJECTIVES[i // len(NOUNS)]}-{NOUNS[i % len(NOUNS)]}" for i in indices]


def single_words(rng: np.random.Generator, count: int) -> list[str]:
    """Return `count` distinct words: English words, and invented words only if those are too few."""
    english = [*ADJECTIVES, *NOUNS]
    if count <= len(english):
        return [english[i] for i in rng.permutation(len(english))[:count]]
    invented = invented_words()
    indices = rng.permutation(len(invented))[: count - len(english)]
    words = [*english, *(invented[i] for i in indices)]
    return [words[i] for i in rng.permutation(count)]


def number(digits: int) -> Make:
    return lambda rng: str(rng.integers(10 ** (digits - 1), 10**digits))


def letters(alphabet: str, count: int) -> Make:
    return lambda rng: "".join(alphabet[i] for i in rng.integers(len(alphabet), size=count))


def random_uuid(rng: np.random.Generator) -> str:
    return str(uuid.UUID(bytes=rng.bytes(16), version=4))
