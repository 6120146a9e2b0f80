"""LongProc's metrics, and countdown's search in the words that its prompt shows and its partial accuracy compares.

The figures are those of the official scorers, which count some things in an unexpected way; comments say where. An
answer that makes an official scorer fail, or that gets less than 0 from it, gets 0 here.
"""

import csv
import itertools
import operator
import re
import string
from collections.abc import Callable, Sequence

from kvjax.tasks.text_scores import bare_words

LARGEST_RESULT = 2000
"""Countdown's search drops results that are not below this."""
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
EQUATION = re.compile(r"(-?\d{1,9}) *([-+*/]) *(-?\d{1,9}) *= *([-+]?\d{1,9})", re.ASCII)
SEARCH, FOUND = "# Search Procedure", "Now we have found the target"
"""The texts before and after countdown's search."""
BELIEF_FILLER = re.compile(r"\b(a|an|the|on|in|at|step|thinks?|believes?|is|are|of|location|knows?|belief)\b")
Figures = tuple[float, float]
"""Accuracy and partial accuracy."""


def tsv_f1(answer: str, true: str) -> float:
    """Return F1 of a table's rows, in any order. The answer's table is in a block ```tsv, or is the whole answer."""
    _, opened, rest = answer.partition("```tsv")
    body, closed, _ = rest.rpartition("```")
    told, wanted = _tsv_rows((body if closed else rest) if opened else answer), _tsv_rows(true)
    if not told or not wanted or len(told[0]) != len(wanted[0]):
        return 0.0
    precision = sum(row in wanted for row in told) / len(told)
    recall = sum(row in told for row in wanted) / len(wanted)
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def _tsv_rows(text: str) -> list[list[str]]:
    """Return a table's normalised rows without its header; none if it is no table. A row with too few or too many cells
    becomes a row of N/A. If it is the last one it is dropped, since it may be a remark."""
    try:
        header, *rows = csv.reader(text.strip().split("\n"), delimiter="\t")
    except (csv.Error, ValueError):
        return []
    if rows and len(rows[-1]) != len(header):
        rows.pop()
    if len(set(header)) < len(header):  # pandas then does not find columns by their names
        return []
    rows = [row if len(row) == len(header) else ["N/A"] * len(header) for row in rows]
    return [["".join(bare_words(cell)) for cell in row] for row in rows]


def route_figures(answer: str, true: str) -> Figures:
    """Return the figures of a route, the lines between <Route> and </Route>. The first wrong line counts as right in
    the partial accuracy."""
    told, wanted = _tagged(answer, "Route"), _tagged(true, "Route")
    if told is None or wanted is None:
        return 0.0, 0.0
    if told == wanted:
        return 1.0, 1.0
    lines, right = told.split("\n"), wanted.split("\n")
    return 0.0, min(_agreeing(lines, right) + 1, len(lines), len(right)) / len(right)


def belief_figures(answer: str, true: str) -> Figures:
    """Return the figures of a trace of beliefs, the lines that start with a dash."""
    told, wanted = beliefs(answer), beliefs(true)
    if told == wanted:
        return 1.0, 1.0
    return 0.0, _agreeing(told, wanted) / len(wanted)


def beliefs(text: str) -> list[str]:
    """Return the lines that start with a dash, in lower case without punctuation and words that do not matter."""
    lines = [line for line in text.splitlines() if line.strip().startswith("-")]
    lines[:1] = [line.lstrip() for line in lines[:1]]  # the first line alone may be indented
    dropped = str.maketrans("", "", string.punctuation + "’")
    plain = (BELIEF_FILLER.sub(" ", line.lower().translate(dropped)) for line in lines if line[0] == "-")
    return [belief for belief in (" ".join(line.split()) for line in plain) if belief]


def countdown_figures(answer: str, numbers: Sequence[int], target: int, trace: str) -> Figures:
    """Return the figures of a countdown. Three equations between <Solution> and </Solution> must use the numbers and
    reach the target. Otherwise the partial accuracy is the share of the search's lines before the first wrong one."""
    solution = _tagged(answer, "Solution")
    if solution is not None and _solves(solution, numbers, target):
        return 1.0, 1.0
    if SEARCH not in answer:
        return 0.0, 0.0
    told_set, *told = answer.split(SEARCH)[-1].strip().split("\n")
    true_set, *wanted = trace.split(SEARCH)[-1].split(FOUND)[0].strip().split("\n")
    if told_set != true_set or not told:
        return 0.0, 0.0
    # the last line compared does not count if it is right
    return 0.0, min(_agreeing(told, wanted, _same_step), len(told) - 1, len(wanted) - 1) / len(wanted)


def _solves(solution: str, numbers: Sequence[int], target: int) -> bool:
    left, lines = list(numbers), solution.split("\n")
    if len(lines) != len(left) - 1:
        return False
    for line in lines:
        found = EQUATION.fullmatch(line.strip())
        if found is None:
            return False
        sign, (a, b, result) = found[2], (int(found[n]) for n in (1, 3, 4))
        # the official scorer takes the minus of a negative number for the operation
        negative = sign != "+" and "-" in found[1] + found[3]
        if negative or (sign == "/" and b == 0) or OPERATIONS[sign](a, b) != result:
            return False
        for used in (a, b):
            if used not in left:
                return False
            left.remove(used)
        left.append(result)
    return left == [target]


def _same_step(told: str, true: str) -> bool:
    """Return True if two lines of a search agree. Lines that try operations agree, whatever their results, if the
    operations are equal and both lines drop the branch or neither does."""
    if told == true or "|- Try" not in true:
        return told == true
    drop = "drop this branch"
    return told.split("=")[0] == true.split("=")[0] and (drop in told) == (drop in true)


def _tagged(text: str, tag: str) -> str | None:
    """Return the text between a tag's first opening and its first closing; None if one of these is missing."""
    start, end = text.find(f"<{tag}>"), text.find(f"</{tag}>")
    return None if -1 in (start, end) else text[start + len(tag) + 2 : end].strip()


def _agreeing(
    told: Sequence[str], true: Sequence[str], same: Callable[[str, str], bool] = operator.eq
) -> int:
    """Return the number of lines that agree before the first that does not."""
    return sum(1 for _ in itertools.takewhile(lambda pair: same(*pair), zip(told, true, strict=False)))


def countdown_trace(numbers: list[int], target: int) -> str | None:
    """Return the search for a target in the words of the official prompts, with its solution; None without solution."""
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
    """Search on from a set of numbers and append the lines. Returns the equations that reach the target, or None."""
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
            whole = result == int(result)
            shown = str(int(result)) if whole else f"{result:.1f}"
            equation = f"{equation} = {shown}"
            if not whole:
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
