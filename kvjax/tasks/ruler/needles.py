"""The eight needle tasks: sentences with a value of a key, hidden in text or among other needles."""

from dataclasses import dataclass
from typing import Literal

from kvjax.tasks.prompt import Example, ExampleQuestion
from kvjax.tasks.ruler.haystack import Haystack
from kvjax.tasks.ruler.random_strings import WORD_PAIRS, distinct, number, random_uuid, word_pairs
from kvjax.tasks.ruler.writer import Supply, generator

RESERVED = 128
NEEDLE = "A secret {kind} of {key} is {value}."
ONE = (
    "The text below tells a secret {kind}. Remember it, you will be asked for it afterwards.\n\n",
    "What is the secret {kind} of {keys} in the text above?",
    "\nThe secret {kind} of {keys} in the text is",
)
SEVERAL = (
    "The text below tells secret {kind}s. Remember them, you will be asked for them afterwards.\n\n",
    "What are all the secret {kind}s of {keys} in the text above?",
    "\nThe secret {kind}s of {keys} in the text are",
)


@dataclass(frozen=True)
class Needles:
    """Keys with values, hidden in a haystack. The question asks for all values of some of the keys.

    Without a haystack the units are needles, each with its own key, one per line.
    """

    name: str
    haystack: Haystack | None
    """The haystack; None if needles are hidden among other needles."""
    keys: int = 1
    """The number of keys, if there is a haystack."""
    values: int = 1
    """The number of values of each key."""
    wanted: int = 1
    """The number of keys that are asked for."""
    key_kind: Literal["words", "UUID"] = "words"
    """The kind of the keys: word pairs or UUIDs."""
    value_kind: Literal["number", "UUID"] = "number"
    """The kind of the values: 7-digit numbers or UUIDs."""
    fewest = 1

    @property
    def supply(self) -> Supply | None:
        unlimited = self.haystack or self.key_kind == "UUID"
        return None if unlimited else Supply(WORD_PAIRS, "pairs of words")

    def write(self, seed: int, units: int) -> Example:
        rng = generator(self, seed)
        avoid = self.haystack.text if self.haystack else ""
        n_keys = self.keys if self.haystack else units
        keys = word_pairs(rng, n_keys) if self.key_kind == "words" else distinct(rng, random_uuid, n_keys)
        make = number(7) if self.value_kind == "number" else random_uuid
        values = distinct(rng, make, n_keys * self.values, avoid)
        pairs = [(keys[i // self.values], value) for i, value in enumerate(values)]
        needles = [NEEDLE.format(kind=self.value_kind, key=key, value=value) for key, value in pairs]
        shuffled = [needles[i] for i in rng.permutation(len(needles))]
        hidden = self.haystack.hide(rng, units, shuffled) if self.haystack else "\n".join(shuffled)
        expected = tuple(values[: self.wanted * self.values])
        opening, question, prefix = (
            part.format(kind=self.value_kind, keys=join_words(keys[: self.wanted]))
            for part in (ONE if len(expected) == 1 else SEVERAL)
        )
        asked = ExampleQuestion(question, prefix, expected, "all", RESERVED, self.name)
        return Example(f"{opening}{hidden}\n", (asked,))


def join_words(words: list[str]) -> str:
    """Return the words as `a`, or `a, b, and c`."""
    return ", and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
