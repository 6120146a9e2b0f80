"""LongProc's metrics, and the text of countdown's search, which the prompt shows and the partial accuracy compares.

The scores are those of the official scorers, including their quirks, which comments point out. An answer that makes an
official scorer fail, or that gets less than 0 from it, gets 0 here.
"""

import csv
import itertools
import operator
import re
import string
from collections.abc import Callable, Sequence

from kvjax.tasks.text_scores import bare_words

LARGEST_RESULT = 2000
"""Countdown's search drops results of at least this."""
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
EQUATION = re.compile(r"(-?\d{1,9}) *([-+*/]) *(-?\d{1,9}) *= *([-+]?\d{1,9})", re.ASCII)
SEARCH, FOUND = "# Search Procedure", "Now we have found the target"
"""The texts before and after countdown's search."""
BELIEF_FILLER = re.compile(r"\b(a|an|the|on|in|at|step|thinks?|believes?|is|are|of|location|knows?|belief)\b")
Figures = tuple[float, float]
"""Accuracy and partial accuracy."""


def tsv_f1(answer: str, true: str) -> float:
    """Return F1 of a table's rows, in any order. The table is in a block ```tsv, or else the whole answer."""
    _, opened, rest = answer.partition("```tsv")
    body, closed, _ = rest.rpartition("```")
    table = (body if closed else rest) if opened else answer
    answer_rows, true_rows = _tsv_rows(table), _tsv_rows(true)
    if not answer_rows or not true_rows or len(answer_rows[0]) != len(true_rows[0]):
        return 0.0
    precision = sum(row in true_rows for row in answer_rows) / len(answer_rows)
    recall = sum(row in answer_rows for row in true_rows) / len(true_rows)
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def _tsv_rows(text: str) -> list[list[str]]:
    """Return a table's normalised rows without its header; no rows if it is not a table.

    A row with too few or too many cells becomes a row of N/A. Such a last row is dropped, since it may be a remark.
    """
    try:
        header, *rows = csv.reader(text.strip().split("\n"), delimiter="\t")
    except (csv.Error, ValueError):
        return []
    if rows and len(rows[-1]) != len(header):
        rows.pop()
    if len(set(header)) < len(header):  # pandas then does not find the columns by name
        return []
    rows = [row if len(row) == len(header) else ["N/A"] * len(header) for row in rows]
    return [["".join(bare_words(cell)) for cell in row] for row in rows]


def route_figures(answer: str, true: str) -> Figures:
    """Return the figures of a route, the lines between <Route> and </Route>."""
    route, true_route = _tagged(answer, "Route"), _tagged(true, "Route")
    if route is None or true_route is None:
        return 0.0, 0.0
    if route == true_route:
        return 1.0, 1.0
    lines, true_lines = route.split("\n"), true_route.split("\n")
    # the official scorer counts the first wrong line as right
    return 0.0, min(_agreeing(lines, true_lines) + 1, len(lines), len(true_lines)) / len(true_lines)


def belief_figures(answer: str, true: str) -> Figures:
    """Return the figures of a trace of beliefs, the lines that start with a dash."""
    lines, true_lines = beliefs(answer), beliefs(true)
    if lines == true_lines:
        return 1.0, 1.0
    return 0.0, _agreeing(lines, true_lines) / len(true_lines)


def beliefs(text: str) -> list[str]:
    """Return the lines that start with a dash, in lower case without punctuation and filler words."""
    lines = [line for line in text.splitlines() if line.strip().startswith("-")]
    lines[:1] = [line.lstrip() for line in lines[:1]]  # the first line alone may be indented
    dropped = str.maketrans("", "", string.punctuation + "’")
    plain = (BELIEF_FILLER.sub(" ", line.lower().translate(dropped)) for line in lines if line[0] == "-")
    return [belief for belief in (" ".join(line.split()) for line in plain) if belief]


def countdown_figures(answer: str, numbers: Sequence[int], target: int, trace: str) -> Figures:
    """Return the figures of a countdown.

    An answer is right if three equations between <Solution> and </Solution> use the numbers and reach the target.
    Otherwise the partial accuracy is the share of the search's lines before the first wrong one.
    """
    solution = _tagged(answer, "Solution")
    if solution is not None and _solves(solution, numbers, target):
        return 1.0, 1.0
    if SEARCH not in answer:
        return 0.0, 0.0
    first, *lines = answer.split(SEARCH)[-1].strip().split("\n")
    true_first, *true_lines = trace.split(SEARCH)[-1].split(FOUND)[0].strip().split("\n")
    if first != true_first or not lines:
        return 0.0, 0.0
    # the official scorer never counts the last compared line
    agreeing = _agreeing(lines, true_lines, _same_step)
    return 0.0, min(agreeing, len(lines) - 1, len(true_lines) - 1) / len(true_lines)


def _solves(solution: str, numbers: Sequence[int], target: int) -> bool:
    remaining, lines = list(numbers), solution.split("\n")
    if len(lines) != len(remaining) - 1:
        return False
    for line in lines:
        match = EQUATION.fullmatch(line.strip())
        if match is None:
            return False
        sign, (a, b, result) = match[2], (int(match[n]) for n in (1, 3, 4))
        # the official scorer mistakes the minus of a negative number for the operation
        negative = sign != "+" and "-" in match[1] + match[3]
        if negative or (sign == "/" and b == 0) or OPERATIONS[sign](a, b) != result:
            return False
        for used in (a, b):
            if used not in remaining:
                return False
            remaining.remove(used)
        remaining.append(result)
    return remaining == [target]


def _same_step(line: str, true: str) -> bool:
    """Return True if two lines of a search agree.

    Lines that try operations agree if the operations are equal and both or neither drop the branch. Their results do
    not matter.
    """
    if line == true or "|- Try" not in true:
        return line == true
    drop = "drop this branch"
    return line.split("=")[0] == true.split("=")[0] and (drop in line) == (drop in true)


def _tagged(text: str, tag: str) -> str | None:
    """Return the text between the first opening and the first closing of a tag; None if one of them is missing."""
    start, end = text.find(f"<{tag}>"), text.find(f"</{tag}>")
    return None if -1 in (start, end) else text[start + len(tag) + 2 : end].strip()


def _agreeing(
    lines: Sequence[str], true: Sequence[str], same: Callable[[str, str], bool] = operator.eq
) -> int:
    """Return the number of lines before the first that does not agree."""
    return sum(1 for _ in itertools.takewhile(lambda pair: same(*pair), zip(lines, true, strict=False)))


def countdown_trace(numbers: list[int], target: int) -> str | None:
    """Return the search for a target in the official wording, with its solution; None if there is no solution."""
    lines = [
        SEARCH,
        f"Initial number set: {numbers}, target: {target}. Options for choosing two numbers: {_pairs(numbers)}.",
    ]
    solution = _explore(lines, numbers, target, 1)
    if solution is None:
        return None
    first, second, last = solution
    return "\n".join(lines) + (
        f"\n\n{FOUND}, let's trace back the solution:\nFinal step: {last}\nThe step before: {second}\n"
        f"The first step: {first}\n\nOutput the solution in the required format:\n"
        f"<Solution>\n{first}\n{second}\n{last}\n</Solution>\n"
    )


def _pairs(numbers: list[int]) -> list[tuple[int, int]]:
    return list(itertools.combinations(numbers, 2))


def _explore(lines: list[str], numbers: list[int], target: int, depth: int) -> list[str] | None:
    """Search from a set of numbers, append the lines, and return the equations that reach the target, or None."""
    for i, j in itertools.combinations(range(len(numbers)), 2):
        left = [number for k, number in enumerate(numbers) if k not in (i, j)]
        small, large = sorted((numbers[i], numbers[j]))
        begin = _indent(depth + 1 if left else depth)
        if left:
            pair = f"({numbers[i]}, {numbers[j]}) (numbers left: {left})"
            lines.append(f"{_indent(depth)}Pick two numbers {pair}. Try possible operations.")
        for sign, operation in OPERATIONS.items():
            equation = f"{large} {sign} {small}"
            if sign == "/" and small == 0:
                lines.append(f"{begin}Try {equation} (invalid operation). drop this branch.")
                continue
            result = operation(large, small)
            is_integer = result == int(result)
            shown = str(int(result)) if is_integer else f"{result:.1f}"
            equation = f"{equation} = {shown}"
            if not is_integer:
                outcome = f"{shown} is a decimal, drop this branch."
            elif result >= LARGEST_RESULT:
                outcome = f"{shown} exceeds the maximum intermediate result, drop this branch."
            elif not left and result == target:
                outcome = f"Evaluate {shown} == {target}, target found!"
            elif not left:
                outcome = f"Evaluate {shown} != {target}, drop this branch."
            else:
                after = [int(result), *left]
                choice = (
                    f". Options for choosing two numbers: {_pairs(after)}."
                    if left[1:]
                    else ", just two numbers left."
                )
                outcome = (
                    f"Add {shown} to the number set. Current number set: {after}, target: {target}{choice}"
                )
            lines.append(f"{begin}Try {equation}. {outcome}")
            if outcome.endswith("target found!"):
                return [equation]
            if outcome.startswith("Add"):
                rest = _explore(lines, [int(result), *left], target, depth + 2)
                if rest is not None:
                    return [equation, *rest]
    return None


def _indent(level: int) -> str:
    return f"{' ' * level}|- " if level else ""
