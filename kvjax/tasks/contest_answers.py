r"""Answers of mathematics contests: the content of an answer's last \boxed{…}, and its grading.

AIME's answers are integers from 0 to 999, and the model's answer may also be an expression of that value. HMMT's
answers are expressions, and lists of them. math-verify compares expressions.
"""

import importlib
import re
import threading
from typing import Any

from kvjax.errors import UserError, warn

BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|(-?\d[^\s{}$\\]*))")
"""The beginning of a box: with a brace, or before a number without one."""
ESCAPED = re.compile(r"\\[{}]")
WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mathbf|boxed)\s*\{([^{}]*)\}")
WORDS = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{[^{}\d]*\}(?:\^\{?\d\}?)?")
"""Words and units, without a number."""
SPACES = re.compile(r"\\[,;:! ]|~")
WORTHLESS = re.compile(r"\\?\$|\\left|\\right|\^\{?\\circ\}?|\\\(|\\\)|\\(?:boxed|fbox)(?!\s*\{)")
INTEGER = re.compile(r"(?:[^,;]*=)?\s*0*(\d{1,18})(?:\.0*)?\s*")
"""An integer of few enough digits for Python, with at most one "… =" before it."""
LABEL = re.compile(r"^\s*\([A-Z]\)")
"""The letter of a choice before its value."""
SIDE_BY_SIDE = re.compile(r"\d\s+\d")
"""Numbers that math-verify would add, as a mixed fraction's."""
PRODUCT = re.compile(r"([\d)])\s*\(")
"""Factors without a multiplication sign, which math-verify would add, too."""
LONGEST = 200
"""The most characters of an expression that may be an AIME answer. math-verify's time is bounded, but not short."""
WITHOUT = "pip install 'kvjax[math]'"


def last_box(text: str) -> str | None:
    r"""Return the content of the last \boxed{…} (or \fbox{…}) whose braces are balanced, or the number after a \boxed
    without braces. Among nested boxes the outer one counts. None: there is no box."""
    found, end = None, 0
    for match in BOX.finditer(text):
        if match.start() < end:
            continue
        if match[1] is not None:
            found, end = match[1].rstrip(".,;:)"), match.end()
        elif (close := _closing(text, match.end())) is not None:
            found, end = text[match.end() : close].strip(), close
    return found


def _closing(text: str, start: int) -> int | None:
    """Return the place of the brace that closes the one right before `start`; None if there is none. Escaped braces do
    not count."""
    depth, escaped = 1, {match.start() + 1 for match in ESCAPED.finditer(text, start)}
    for index in range(start, len(text)):
        if text[index] in "{}" and index not in escaped:
            depth += 1 if text[index] == "{" else -1
            if depth == 0:
                return index
    return None


def integer(text: str) -> int | None:
    """Return the integer of at least 0 that a boxed answer is, with leading zeros or not; None for another expression.

    Around the integer there may be TeX's spaces, dollars, degrees, words and units in their commands, a full stop, and
    before it a choice's label or "m + n =".
    """
    found = INTEGER.fullmatch(_plain(text))
    return None if found is None else int(found[1])


def _plain(text: str) -> str:
    """Return a boxed answer without the parts that do not change its value."""
    text = SPACES.sub(" ", WRAPPED.sub(r"\1", WORDS.sub(" ", text)))
    return LABEL.sub("", WORTHLESS.sub("", text))


class Integers:
    """Grader of AIME's answers, integers from 0 to 999. The model's answer may be another expression of the value,
    which is compared if math-verify is installed."""

    expects = "an integer from 0 to 999"

    def valid(self, true: str) -> bool:
        """Return True if `true` may be the true answer of a problem."""
        value = integer(true)
        return value is not None and value <= 999

    def __call__(self, said: str, true: str) -> bool:
        """Return True if the content of the box is the true answer."""
        if (value := integer(said)) is not None:
            return value == integer(true)
        if len(said) > LONGEST or not re.search(r"\d", said):
            return False
        expression = _plain(said)
        if SIDE_BY_SIDE.search(expression):
            return False
        try:
            compared = Expressions()
        except UserError:
            message = f"AIME answers that are expressions count as wrong, since math-verify is not installed: {WITHOUT}"
            warn(message, stacklevel=2)
            return False
        return compared(PRODUCT.sub(r"\1 \\cdot (", expression), str(integer(true)))


class Expressions:
    """Grader of HMMT's answers. math-verify compares them: as expressions, or as lists and sets in any order.

    Raises UserError if math-verify is not installed, and for a comparison outside the main thread, where its time limit
    does not work.
    """

    expects = "an expression in LaTeX"

    def __init__(self):
        try:
            self._verify: Any = importlib.import_module("math_verify")
        except ImportError:
            raise UserError(
                f"HMMT's answers are expressions, which math-verify compares: {WITHOUT}"
            ) from None

    def _parsed(self, text: str) -> list[Any]:
        if threading.current_thread() is not threading.main_thread():
            raise UserError(
                "math-verify compares expressions in the main thread alone, got one in another thread"
            )
        config = self._verify.LatexExtractionConfig()
        return self._verify.parse(f"\\boxed{{{text.strip().strip('$')}}}", extraction_config=[config])

    def valid(self, true: str) -> bool:
        """Return True if `true` may be the true answer of a problem."""
        return bool(self._parsed(true))

    def __call__(self, said: str, true: str) -> bool:
        """Return True if the content of the box is the true answer."""
        return said == true or bool(self._verify.verify(self._parsed(true), self._parsed(said)))


Grader = Integers | Expressions
"""A grader tells which true answers are valid, and which boxed answers are right."""
