r"""Mathematics contests in their published forms: AIME and HMMT, problems that are answered at length.

A row has the problem (`problem` or `question`), its `answer`, and usually a name (`id` or `problem_idx`), in upper or
lower case. AIME 2024 is published in this form as HuggingFaceH4/aime_2024 and Maxwell-Jia/AIME_2024, AIME 2025 as
MathArena/aime_2025, opencompass/AIME2025, math-ai/aime25 and yentinglin/aime_2025, HMMT as MathArena/hmmt_feb_2025 and
hmmt_nov_2025. The user's turn has the instruction that MathArena gave for these contests (arXiv:2505.23281; its
repository's configs/competitions), an empty line and the problem. The model answers freely, and thinks first if its
template does so by default.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kvjax.errors import UserError
from kvjax.models.chat import encode
from kvjax.tasks.contest_answers import Expressions, Grader, Integers, last_box
from kvjax.tasks.datasets import SUFFIXES, Row, file_rows, folder_rows, hub_rows, is_hub_name
from kvjax.tasks.sample import Question, Sample, Tokens, as_tokens
from kvjax.tasks.splits import Split
from kvjax.tasks.suite import Dataset, Inputs, Suite

DATA = "contests"
"""The name of the data in --data."""
OPTION = f"--data {DATA}"
INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."
INTEGERS = "\nThe answer is an integer between 0 and 999 inclusive."
MIN_ANSWER = 16
"""The least number of tokens for an answer."""
PROBLEM, ANSWER, NAME = ("problem", "question"), ("answer",), ("id", "problem_idx")
"""The names of a row's columns, in lower case."""
PASS_AT_1 = r"pass@1: the last \boxed{…} is right"


@dataclass(frozen=True)
class Contest:
    """A contest: its dataset, the instruction before its problems, and its grader."""

    hub: str
    """The default dataset on the hub."""
    instruction: str
    """The text before a problem."""
    grader: Callable[[], Grader]
    """Makes the grader of answers."""


def _aime(hub: str) -> Contest:
    return Contest(hub, INSTRUCTION + INTEGERS, Integers)


def _hmmt(hub: str) -> Contest:
    return Contest(hub, INSTRUCTION, Expressions)


CONTESTS = {
    "aime_2024": _aime("HuggingFaceH4/aime_2024"),
    "aime_2025": _aime("MathArena/aime_2025"),
    "hmmt_feb_2025": _hmmt("MathArena/hmmt_feb_2025"),
    "hmmt_nov_2025": _hmmt("MathArena/hmmt_nov_2025"),
}


@dataclass(frozen=True)
class Problem:
    """A row of a contest."""

    name: str
    """The number or name under which the problem is reported."""
    text: str
    """The problem's text in LaTeX."""
    answer: str
    """The true answer."""


def read_problems(contest: str, data: Path | None, grader: Grader) -> list[Problem]:
    """Return the problems of a contest, in their order.

    Args:
        data: a .jsonl or .parquet file; a folder with CONTEST.jsonl, CONTEST.parquet or a folder CONTEST of such files;
            or a hub dataset, OWNER/NAME. None stands for the contest's default dataset on the hub.

    Raises:
        UserError: there is no data, a file cannot be read, or a row has no problem or no valid answer.
    """
    problems = [_problem(row, at, index, grader) for index, (at, row) in enumerate(_rows(contest, data), 1)]
    if not problems:
        raise UserError(f"{OPTION} {data}: there are no problems of {contest}")
    if len({problem.name for problem in problems}) < len(problems):
        # the two contests of a year both number their problems from 1
        return [
            Problem(str(index), problem.text, problem.answer) for index, problem in enumerate(problems, 1)
        ]
    return problems


def _problem(row: Mapping[str, Any], at: str, index: int, grader: Grader) -> Problem:
    columns = {name.lower(): value for name, value in row.items()}

    def value(names: tuple[str, ...]) -> str | None:
        """Return the first of these columns that is a text or a number, as text; None if there is none."""
        values = [columns[name] for name in names if isinstance(columns.get(name), str | int | float)]
        return str(values[0]).strip() if values else None

    text, answer = value(PROBLEM), value(ANSWER)
    for names, content in ((PROBLEM, text), (ANSWER, answer)):
        if not content:
            raise UserError(f"{at} has no field `{'` or `'.join(names)}`, it has {', '.join(row) or 'none'}")
    assert text is not None
    assert answer is not None
    if not grader.valid(answer):
        raise UserError(f"{at}: expected the answer to be {grader.expects}, got {answer[:60]}")
    return Problem(value(NAME) or str(index), text, answer)


def _rows(contest: str, data: Path | None) -> Iterator[Row]:
    if data is None:
        return hub_rows(CONTESTS[contest].hub, OPTION)
    if data.is_file() and data.suffix in SUFFIXES:
        return file_rows(data, OPTION)
    if data.is_dir():
        return folder_rows(data, contest, OPTION)
    if not is_hub_name(data):
        raise UserError(
            f"{OPTION} {data}: expected a .jsonl or .parquet file, a folder of them, or a hub dataset, OWNER/NAME"
        )
    return hub_rows(data.as_posix(), OPTION)


@dataclass(frozen=True)
class ContestProblems:
    """The problems of a contest as samples. The context is the whole prompt; the answer may fill the rest."""

    contest: str
    """A name in `CONTESTS`."""
    data: Path | None
    """The source of the problems, see `read_problems`."""
    tokenizer: Any
    """The model's tokenizer."""
    chat: bool = True
    """True if prompts go through the chat template, if there is one."""
    metric = PASS_AT_1
    published = True

    @cached_property
    def grader(self) -> Grader:
        return CONTESTS[self.contest].grader()

    @cached_property
    def problems(self) -> list[Problem]:
        return read_problems(self.contest, self.data, self.grader)

    def answers(self, length: int) -> int:
        return 1

    def samples(self, split: Split, count: int, length: int) -> list[Sample]:
        """Return all problems of the contest, for any `split` and `count`.

        All have the same number of tokens for an answer. Raises UserError if these are too few.
        """
        prompts = [self._prompt(problem) for problem in self.problems]
        longest = max(map(len, prompts))
        answer_tokens = length - longest
        if answer_tokens < MIN_ANSWER:
            raise UserError(
                f"--context {length}: the longest prompt of {self.contest} takes {longest} tokens, which leaves "
                f"fewer than {MIN_ANSWER} for an answer"
            )
        return [
            Sample(prompt, (self._question(problem, answer_tokens),))
            for prompt, problem in zip(prompts, self.problems, strict=True)
        ]

    def _prompt(self, problem: Problem) -> Tokens:
        text = f"{CONTESTS[self.contest].instruction}\n\n{problem.text}"
        if self.chat:
            return as_tokens(encode(self.tokenizer, text))
        return as_tokens(self.tokenizer(text, verbose=False)["input_ids"])

    def _question(self, problem: Problem, answer_tokens: int) -> Question:
        def conclusion(tokens: Tokens) -> str | None:
            return last_box(self.tokenizer.decode(tokens.tolist(), skip_special_tokens=True))

        def score(tokens: Tokens) -> float:
            box = conclusion(tokens)
            return float(box is not None and self.grader(box, problem.answer))

        true = self.tokenizer(problem.answer, add_special_tokens=False, verbose=False)["input_ids"]
        return Question(
            as_tokens([]),
            as_tokens(true),
            problem.name,
            score,
            answer_tokens,
            stops=True,
            concluded=conclusion,
        )


def _open(name: str, inputs: Inputs) -> Dataset:
    data, contests = inputs.data.get(DATA), [task for task in inputs.tasks if task in CONTESTS]
    if data is not None and not data.is_dir() and len(contests) > 1:
        raise UserError(
            f"{OPTION} {data} holds one contest, got --tasks {' '.join(contests)}: give a folder with a file for each"
        )
    dataset = ContestProblems(name, data, inputs.tokenizer, inputs.chat)
    _ = dataset.problems  # so that errors in the data are found now
    return dataset


SUITE = Suite(tuple(CONTESTS), _open, data=(DATA,), is_contest=True)
