r"""Answers to mathematics contests: the content of an answer's last \boxed{…}, and its grading.

AIME's answers are integers from 0 to 999; the model's answer may also be an expression with that value. HMMT's answers
are expressions and lists of expressions. math-verify compares expressions.
"""

import importlib
import re
import threading
from typing import Any

from kvjax.errors import UserError, warn

BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|(-?\d[^\s{}$\\]*))")
"""The beginning of a box: a brace, or a number without braces."""
BRACE = re.compile(r"\\[{}]|[{}]")
"""A brace, or an escaped one."""
WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mathbf|boxed)\s*\{([^{}]*)\}")
WORDS = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{[^{}\d]*\}(?:\^\{?\d\}?)?")
"""Words and units that contain no number."""
SPACES = re.compile(r"\\[,;:! ]|~")
DECORATION = re.compile(r"\\?\$|\\left|\\right|\^\{?\\circ\}?|\\\(|\\\)|\\(?:boxed|fbox)(?!\s*\{)")
INTEGER = re.compile(r"(?:[^,;]*=)?\s*0*(\d{1,18})(?:\.0*)?\s*")
"""An integer of at most 18 digits, with at most one "… =" before it."""
LABEL = re.compile(r"^\s*\([A-Z]\)")
"""The letter of an option before its value."""
SIDE_BY_SIDE = re.compile(r"\d\s+\d")
"""Two adjacent numbers, which math-verify would add like a mixed fraction."""
PRODUCT = re.compile(r"([\d)])\s*\(")
"""Factors without a multiplication sign, which math-verify would also add."""
LONGEST = 200
"""The most characters of an expression as an AIME answer. math-verify's time limit is long."""
INSTALL = "pip install 'kvjax[math]'"


def last_box(text: str) -> str | None:
    r"""Return the content of the last \boxed{…} (or \fbox{…}) with balanced braces, or the number after a \boxed
    without braces; None if there is no box. The outermost of nested boxes counts."""
    content, end, closing = None, 0, _closing(text)
    for match in BOX.finditer(text):
        if match.start() < end:
            continue
        if match[1] is not None:
            content, end = match[1].rstrip(".,;:)"), match.end()
        elif (close := closing.get(match.end() - 1)) is not None:
            content, end = text[match.end() : close].strip(), close
    return content


def _closing(text: str) -> dict[int, int]:
    """Return the index of the closing brace for that of each opening one which has one. Escaped braces do not count."""
    closing, opened = {}, []
    for match in BRACE.finditer(text):
        if match[0] == "{":
            opened.append(match.start())
        elif match[0] == "}" and opened:
            closing[opened.pop()] = match.start()
    return closing


def integer(text: str) -> int | None:
    """Return a boxed answer as an integer of at least 0; None for another expression.

    The integer may have leading zeros. TeX's spaces, dollars and degrees, words and units in TeX commands, a full stop,
    and an option's label or "m + n =" before the integer are ignored.
    """
    match = INTEGER.fullmatch(_plain(text))
    return None if match is None else int(match[1])


def _plain(text: str) -> str:
    """Return a boxed answer without the parts that do not change its value."""
    text = SPACES.sub(" ", WRAPPED.sub(r"\1", WORDS.sub(" ", text)))
    return LABEL.sub("", DECORATION.sub("", text))


class Integers:
    """Grader of AIME's answers, integers from 0 to 999.

    The model's answer may be another expression with the same value, if math-verify is installed.
    """

    expects = "an integer from 0 to 999"

    def valid(self, true: str) -> bool:
        """Return True if `true` may be the true answer of a problem."""
        value = integer(true)
        return value is not None and value <= 999

    def __call__(self, answer: str, true: str) -> bool:
        """Return True if the content of the box is the true answer."""
        if (value := integer(answer)) is not None:
            return value == integer(true)
        if len(answer) > LONGEST or not re.search(r"\d", answer):
            return False
        expression = _plain(answer)
        if SIDE_BY_SIDE.search(expression):
            return False
        try:
            grader = Expressions()
        except UserError:
            message = f"AIME answers that are expressions count as wrong, since math-verify is not installed: {INSTALL}"
            warn(message, stacklevel=2)
            return False
        return grader(PRODUCT.sub(r"\1 \\cdot (", expression), str(integer(true)))


class Expressions:
    """Grader of HMMT's answers. math-verify compares them as expressions, or as lists and sets in any order.

    Raises UserError if math-verify is not installed, or if a comparison runs outside the main thread, where the time
    limit of math-verify does not work.
    """

    expects = "an expression in LaTeX"

    def __init__(self):
        try:
            self._verify: Any = importlib.import_module("math_verify")
        except ImportError:
            raise UserError(
                f"HMMT's answers are expressions, which math-verify compares: {INSTALL}"
            ) from None

    def _parsed(self, text: str) -> list[Any]:
        if threading.current_thread() is not threading.main_thread():
            raise UserError(
                "math-verify compares expressions only in the main thread, got a call in another thread"
            )
        config = self._verify.LatexExtractionConfig()
        return self._verify.parse(f"\\boxed{{{text.strip().strip('$')}}}", extraction_config=[config])

    def valid(self, true: str) -> bool:
        """Return True if `true` may be the true answer of a problem."""
        return bool(self._parsed(true))

    def __call__(self, answer: str, true: str) -> bool:
        """Return True if the content of the box is the true answer."""
        return answer == true or bool(self._verify.verify(self._parsed(true), self._parsed(answer)))


Grader = Integers | Expressions
"""A grader decides which true answers are valid, and which boxed answers are right."""
