r"""Answers of mathematics contests: what stands in an answer's last \boxed{…}, and whether it is the right one.

AIME's are integers from 0 to 999. HMMT's are expressions, and lists of them. What is said may be any expression of
their value, which math-verify compares.
"""

import importlib
import re
from typing import Any

from kvjax.errors import UserError

BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
ESCAPED = re.compile(r"\\[{}]")
WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mathbf|boxed)\s*\{([^{}]*)\}")
SPACES = re.compile(r"\\[,;:! ]|~")
WORTHLESS = re.compile(r"\$|\\left|\\right|\^\{?\\circ\}?|\\\(|\\\)")
CHOICE = re.compile(r"^\\text(?:bf)?\s*\{\s*\([A-E]\)\s*\}")
"""The letter of a choice before its value."""
INTEGER = re.compile(r"(?:[^,;]*=)?\s*0*(\d{1,18})(?:\.0*)?\s*")
"""Of so many digits that Python reads it; with one "… =" before it."""


def last_box(text: str) -> str | None:
    r"""What is within the last \boxed{…} (or \fbox{…}) whose braces are balanced; of boxes within boxes the outer one.
    None: there is none."""
    found, end = None, 0
    for match in BOX.finditer(text):
        if match.start() >= end and (close := _closing(text, match.end())) is not None:
            found, end = text[match.end() : close].strip(), close
    return found


def _closing(text: str, start: int) -> int | None:
    """Where the brace closes that was opened right before `start`; escaped ones do not count."""
    depth, escaped = 1, {match.start() + 1 for match in ESCAPED.finditer(text, start)}
    for index in range(start, len(text)):
        if text[index] in "{}" and index not in escaped:
            depth += 1 if text[index] == "{" else -1
            if depth == 0:
                return index
    return None


def integer(text: str) -> int | None:
    """The integer of at least 0 that a boxed answer is, with leading zeros or not; None: it is another expression.

    Around it there may be TeX's spaces, dollars, degrees, a word's command, a full stop, and "m + n =" before it.
    """
    text = WORTHLESS.sub("", SPACES.sub(" ", WRAPPED.sub(r"\1", text)))
    found = INTEGER.fullmatch(text)
    return None if found is None else int(found[1])


class Expressions:
    """HMMT's answers, compared by math-verify: equal as expressions, lists and sets in any order.

    Raises UserError if math-verify is not installed.
    """

    expects = "an expression in LaTeX"

    def __init__(self):
        try:
            self._verify: Any = importlib.import_module("math_verify")
        except ImportError:
            raise UserError(
                "answers of contests may be expressions, which math-verify compares: pip install 'kvjax[math]'"
            ) from None

    def _parsed(self, text: str) -> list[Any]:
        config = self._verify.LatexExtractionConfig()
        return self._verify.parse(f"\\boxed{{{text.strip().strip('$')}}}", extraction_config=[config])

    def valid(self, true: str) -> bool:
        """Whether it may be the true answer of a problem."""
        return bool(self._parsed(true))

    def __call__(self, said: str, true: str) -> bool:
        """Whether what is in the box is the true answer."""
        return said == true or bool(self._verify.verify(self._parsed(true), self._parsed(said)))


class Integers(Expressions):
    """AIME's answers: integers from 0 to 999. As in MathArena's parser, an expression of that value is right, too."""

    expects = "an integer from 0 to 999"

    def valid(self, true: str) -> bool:
        value = integer(true)
        return value is not None and value <= 999

    def __call__(self, said: str, true: str) -> bool:
        if (value := integer(said)) is not None:
            return value == integer(true)
        return super().__call__(CHOICE.sub("", said), str(integer(true)))


Grader = Integers | Expressions
"""Which boxed answers may be true, and which are."""
