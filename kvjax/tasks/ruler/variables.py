"""Variable tracking: a chain of assignments is hidden in filler, and the question asks for its variables."""

import string
from dataclasses import dataclass

import numpy as np

from kvjax.tasks.prompt import Example, ExampleQuestion
from kvjax.tasks.ruler.haystack import PASSAGE, Lines
from kvjax.tasks.ruler.random_strings import distinct, letters, number
from kvjax.tasks.ruler.writer import generator

RESERVED = 30
HOPS = 4
"""The number of variables after the first."""
EXAMPLE_LINES = 14
"""The lines of filler in the worked example, which takes about 500 tokens."""
OPENING = (
    "The text below sets variables. Keep track of what each of them holds, you will be asked afterwards.\n\n"
)
QUESTION = (
    "Which variables in the text above hold the value {value}, directly or through others? Name all of them."
)
PREFIX = "\nThe {count} variables that hold {value} are"


@dataclass(frozen=True)
class VariableTracking:
    """A variable of five capital letters gets a 5-digit number, and `HOPS` others get it one from another.

    The assignments are in order at random places of the filler. A worked example comes first: a short chain with other
    variables (of three letters) and another value, its question and the answer.
    """

    name: str = "vt"
    fewest = HOPS + 1  # a line of filler after each assignment
    supply = None

    def write(self, seed: int, units: int) -> Example:
        rng = generator(self, seed)
        wording = PASSAGE + OPENING + QUESTION + PREFIX
        example_names, names = (
            distinct(rng, letters(string.ascii_uppercase, count), HOPS + 1, avoid=wording) for count in (3, 5)
        )
        example_value, value = distinct(rng, number(5), 2)
        example = self._chain(rng, EXAMPLE_LINES, example_names, example_value)
        question, prefix = self._question(value)
        solved = "".join([example, *self._question(example_value), " ", " ".join(example_names)])
        context = f"{solved}\n\n{self._chain(rng, units, names, value)}"
        return Example(
            context, (ExampleQuestion(question, prefix, tuple(names), "all", RESERVED, self.name),)
        )

    def _chain(self, rng: np.random.Generator, units: int, names: list[str], value: str) -> str:
        lines = [f"Set {name} = {source}" for name, source in zip(names, [value, *names], strict=False)]
        return f"{OPENING}{Lines().hide(rng, units, lines)}\n"

    def _question(self, value: str) -> tuple[str, str]:
        return QUESTION.format(value=value), PREFIX.format(count=HOPS + 1, value=value)
