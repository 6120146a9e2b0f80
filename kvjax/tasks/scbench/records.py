"""SCBench's rows as examples. A row has a `context` (or `input`) and its `multi_turns`. Each turn has `input` and
`answer`; in some tasks also `options`, its own `task`, or the `name` of a function, in a row with `repo` and `lang`.

There are two modes (`kvjax.tasks.suite.TURNS`). In multi-request ("each"), every question is asked by itself, directly
after the context. In multi-turn, every question follows the earlier ones with their true answers ("golden", as
published) or with the model's answers ("own"). As published, an empty line follows the context only in multi-turn.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvjax.errors import UserError
from kvjax.tasks.datasets import (
    Row,
    folder_rows,
    hub_rows,
    is_hub_name,
    row_field,
    row_objects,
    row_text,
    row_texts,
)
from kvjax.tasks.prompt import Example, ExampleQuestion, PromptEncoder, Scoring
from kvjax.tasks.scbench.code import LANGUAGES
from kvjax.tasks.scbench.scores import LETTERS, choice, first_number, function_match
from kvjax.tasks.scbench.tasks import FUNCTION, SCORING, TASKS

DATA = "scbench"
"""The name of its data in --data."""
OPTION = f"--data {DATA}"
HUB = "microsoft/SCBench"
MAX_QUESTIONS = 5
"""The most questions of a context that are asked, as in the official runs."""
TARGET = re.compile(r"(The .+) is")
"""The quantity that a question of scbench_mf asks for."""
Functions = dict[str, dict[tuple[str, str], None]]
"""The expected functions by repository, each with its name, in order and without repetitions."""


class Turn(NamedTuple):
    """A question of a row."""

    fields: Mapping[str, Any]
    """`input`, `answer` and other fields."""
    at: str
    """The turn's position in the data, for errors."""
    kind: str
    """The name of the task that it belongs to."""
    repo: str = ""
    """The repository of a function."""
    language: str = ""
    """The language of a function."""


def scbench_examples(name: str, data: Path | None, turns: str, encode: PromptEncoder) -> list[Example]:
    """Return a task's rows, in their order.

    Args:
        name: one of `TASKS`.
        data: a folder with NAME.jsonl, NAME.parquet or a folder NAME of such files, or a hub dataset, OWNER/NAME, with
            a configuration of that name. None stands for microsoft/SCBench.
        turns: one of `TURNS`.
        encode: makes samples from the examples, and provides the text between turns.

    Raises:
        UserError: the data is missing, a file cannot be read, or a field is missing or invalid.
    """
    rows = [(at, row, _turns(row, name, at)) for at, row in _rows(name, data)]
    functions: Functions = defaultdict(dict)
    for turn in (turn for _, _, row_turns in rows for turn in row_turns if turn.kind == FUNCTION):
        function = row_text(turn.fields, "name", turn.at), row_text(turn.fields, "answer", turn.at)
        functions[turn.repo][function] = None
    return [
        _example(name, _context(row, name, at), row_turns, functions, turns, encode)
        for at, row, row_turns in rows
    ]


def _rows(name: str, data: Path | None) -> list[Row]:
    if data is not None and data.is_dir():
        return list(folder_rows(data, name, OPTION))
    if data is not None and not is_hub_name(data):
        raise UserError(f"{OPTION} {data}: expected a folder or a hub dataset, OWNER/NAME")
    return list(hub_rows(HUB if data is None else data.as_posix(), OPTION, name))


def _context(row: Mapping[str, Any], name: str, at: str) -> str:
    """Return the text of a row's context. In scbench_mf it is a list of numbers."""
    field = "context" if "context" in row else "input"
    if isinstance(row.get(field), list):
        return TASKS[name].context.format(context=str(row[field]))
    return TASKS[name].context.format(context=row_text(row, field, at))


def _turns(row: Mapping[str, Any], name: str, at: str) -> list[Turn]:
    task, turns = TASKS[name], []
    for number, (_, turn) in enumerate(row_objects(row, "multi_turns", at)[:MAX_QUESTIONS], 1):
        where = f"{at}, turn {number}"
        kind = name if isinstance(task.reserved, int) else row_text(turn, "task", where)
        if not isinstance(task.reserved, int) and kind not in task.reserved:
            raise UserError(
                f"{where}: expected `task` to be one of {', '.join(task.reserved)}, got {kind[:60]}"
            )
        code_fields = [row_text(row, field, at) for field in ("repo", "lang")] if kind == FUNCTION else []
        if code_fields and code_fields[1] not in LANGUAGES:
            raise UserError(
                f"{at}: expected `lang` to be one of {', '.join(LANGUAGES)}, got {code_fields[1][:60]}"
            )
        turns.append(Turn(turn, where, kind, *code_fields))
    return turns


def _example(
    name: str, context: str, row_turns: list[Turn], functions: Functions, turns: str, encode: PromptEncoder
) -> Example:
    task, before, questions = TASKS[name], "", []
    for number, turn in enumerate(row_turns, 1):
        expected, scoring = _expected(turn, functions)
        text, kind = before + _question_text(name, turn), turn.kind
        questions.append(
            ExampleQuestion(
                text, "", expected, scoring, task.reserved_for(kind), _report_kind(name, kind, number, turns)
            )
        )
        if turns == "golden":
            before = text + encode.answer_turn(str(turn.fields["answer"]))
        elif turns == "own":
            before = encode.next_turn
    end = "" if turns == "each" else "\n\n"
    return Example(context + end, tuple(questions), conversation=turns == "own")


def _report_kind(name: str, kind: str, number: int, turns: str) -> str:
    """Return the name under which a question's score is reported."""
    if turns == "each":
        return kind
    return f"turn {number}" if kind == name else f"turn {number}, {kind}"


def _question_text(name: str, turn: Turn) -> str:
    text = row_text(turn.fields, "input", turn.at)
    fields = {"input": text}
    if name == "scbench_choice_eng":
        fields |= dict(zip(LETTERS, _options(turn), strict=True))
    if name == "scbench_mf":
        target = TARGET.search(text)
        if target is None:
            raise UserError(f'{turn.at}: expected `input` to have "The … is", got {text[:60]}')
        fields["target"] = target[1].lower()
    return TASKS[name].question.format(**fields)


def _options(turn: Turn) -> tuple[str, ...]:
    options = row_texts(turn.fields, "options", turn.at)
    if len(options) != len(LETTERS):
        raise UserError(f"{turn.at}: expected `options` to be {len(LETTERS)}, got {len(options)}")
    return options


def _expected(turn: Turn, functions: Functions) -> tuple[tuple[str, ...], Scoring | str]:
    """Return the true answers and the scoring of an answer."""
    answer = row_field(turn.fields, "answer", turn.at)
    if turn.kind == "scbench_mf":
        if isinstance(answer, bool) or not isinstance(answer, int | float):
            raise UserError(f"{turn.at}: expected `answer` to be a number, got {str(answer)[:60]}")
        return (str(answer),), first_number(answer)
    texts = row_texts(turn.fields, "answer", turn.at, single=True)
    if turn.kind == FUNCTION:
        name = row_text(turn.fields, "name", turn.at)
        return texts, function_match(name, list(functions[turn.repo]), turn.language)
    if turn.kind == "scbench_choice_eng":
        options = _options(turn)
        if texts[0] not in options:
            raise UserError(f"{turn.at}: expected `answer` to be one of `options`, got {texts[0][:60]}")
        return (texts[0], LETTERS[options.index(texts[0])]), choice
    return texts, SCORING[turn.kind]
