"""LongProc (Ye et al., 2025, arXiv:2501.05414): long answers that follow a procedure, with the published prompts,
answer lengths and metrics.

A published prompt is a single text. It is cut into a context and a question before the section that asks. The context
has the instructions and worked examples, and then the web page of html_to_tsv, the connections of path_traversal or the
story of tom_tracking. In countdown the whole problem is in the question.

Tasks whose names end in _partial score answers by partial accuracy. Two published tasks are left out: the scorer of
pseudo_to_code runs code that the model wrote, and the prompt and partial accuracy of travel_planning need a long search
with a fixed wording.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from string import Formatter
from typing import NamedTuple

from kvjax.errors import UserError, whole_number
from kvjax.files import read_text
from kvjax.tasks.benchmark import BenchmarkSamples
from kvjax.tasks.datasets import json_rows, row_field, row_text, row_texts
from kvjax.tasks.longproc_scores import (
    belief_figures,
    beliefs,
    countdown_figures,
    countdown_trace,
    route_figures,
    tsv_f1,
)
from kvjax.tasks.prompt import Example, ExampleQuestion
from kvjax.tasks.suite import RIGHT, Dataset, Inputs, Suite

DATA = "longproc"
"""The name of its data in --data."""
OPTION = f"--data {DATA}"
PREFIX, PARTIAL = "longproc_", "_partial"
RESERVED = {"0.5k": 1024, "2k": 3072, "8k": 10240}
"""The most tokens of an answer, by the size of the task."""
ROWS = "F1 of the table's rows"
FOLLOWED = "share of the procedure before the first wrong line"
DEMONSTRATED = ([40, 19, 23, 7], 29), ([9, 16, 6, 18], 12)
"""Numbers and targets of countdown's worked examples."""


@dataclass(frozen=True)
class Problem:
    """A published record."""

    fields: Mapping[str, str]
    """Texts for the fields of the prompt."""
    answer: str
    """A right answer."""
    figures: Callable[[str], Sequence[float]]
    """Returns an answer's score by the task's metric, and its partial accuracy if the task has one."""


def _html_to_tsv(folder: Path, size: str) -> Iterator[Problem]:
    for at, row in json_rows(folder / f"html_to_tsv_{size}.json", OPTION):
        page, true = Path(row_text(row, "html_path", at)), row_text(row, "gt", at)
        if page.is_absolute() or ".." in page.parts:
            raise UserError(f"{at}: expected `html_path` to be a file in the folder, got {page}")
        names = "task_topic", "task_description", "filtering_instruction", "tsv_header"
        fields = {name: row_text(row, name, at) for name in names}
        fields["html_str"] = read_text(folder / page, f"{at}: `html_path`")
        yield Problem(fields, f"```tsv\n{true}\n```", lambda answer, true=true: [tsv_f1(answer, true)])


def _path_traversal(folder: Path, size: str) -> Iterator[Problem]:
    for at, row in json_rows(folder / f"path_traversal_{size}.json", OPTION):
        cities = row_texts(row, "question_repr", at)
        if len(cities) != 2:
            raise UserError(f"{at}: expected `question_repr` to be two cities, got {len(cities)}")
        fields = {
            "city_context": row_text(row, "context_nl", at),
            "src_city": cities[0],
            "dst_city": cities[1],
        }
        true = f"<Route>\n{row_text(row, 'answer_nl', at)}\n</Route>"
        yield Problem(fields, true, partial(route_figures, true=true))


def _tom_tracking(folder: Path, size: str) -> Iterator[Problem]:
    for at, row in json_rows(folder / f"tom_tracking_{size}.json", OPTION):
        fields = {name: row_text(row, name, at) for name in ("story", "question")}
        true = row_text(row, "solution", at)
        if not beliefs(true):
            raise UserError(f"{at}: expected `solution` to have lines that start with -, got {true[:60]}")
        yield Problem(fields, true, partial(belief_figures, true=true))


def _countdown(folder: Path, size: str) -> Iterator[Problem]:
    demonstration = "\n\n".join(
        f"# Example\nNumbers: {numbers}\nTarget: {target}\n\n{countdown_trace(numbers, target)}"
        for numbers, target in DEMONSTRATED
    )
    for at, row in json_rows(folder / f"countdown_{size}.json", OPTION):
        values = row_field(row, "nums", at)
        if not isinstance(values, list) or len(values) != 4:
            raise UserError(f"{at}: expected `nums` to be four numbers, got {str(values)[:60]}")
        numbers = [whole_number(at, "`nums`", value) for value in values]
        target = whole_number(at, "`target`", row_field(row, "target", at))
        trace = countdown_trace(numbers, target)
        if trace is None:
            raise UserError(f"{at}: expected `target` to be within reach of {numbers}, got {target}")
        fields = {"demonstration": demonstration, "nums": str(numbers), "target": str(target)}
        figures = partial(countdown_figures, numbers=numbers, target=target, trace=trace)
        yield Problem(fields, trace, figures)


class LongProcTask(NamedTuple):
    """A task of all sizes."""

    problems: Callable[[Path, str], Iterator[Problem]]
    """Reads the records of a size from the task's folder."""
    question_start: str
    """The first words of the question in the prompt."""


TASKS = {
    "html_to_tsv": LongProcTask(_html_to_tsv, "[TARGET INFORMATION]"),
    "path_traversal": LongProcTask(_path_traversal, "Now find the route from {src_city}"),
    "tom_tracking": LongProcTask(_tom_tracking, "[QUESTION]"),
    "countdown": LongProcTask(_countdown, "[Problem]"),
}
NAMES = tuple(
    f"{PREFIX}{task}_{size}{end}"
    for task in TASKS
    for size in RESERVED
    for end in (("",) if task == "html_to_tsv" else ("", PARTIAL))
)


def longproc_examples(name: str, data: Path) -> list[Example]:
    """Return a task's records, in their order.

    Args:
        name: one of `NAMES`.
        data: the published folder `data`, with a folder for each task.

    Raises:
        UserError: a file or a field is missing or invalid.
    """
    task, size = name.removeprefix(PREFIX).removesuffix(PARTIAL).rsplit("_", 1)
    folder, figure = data / task, int(name.endswith(PARTIAL))
    file = folder / "prompts.yaml"
    template = _prompt(file, TASKS[task].question_start)
    examples = []
    for problem in TASKS[task].problems(folder, size):
        context, question = (_fill(part, problem.fields, f"{OPTION} {file}") for part in template)
        scoring = lambda answer, _, figures=problem.figures: figures(answer)[figure]  # noqa: E731
        asked = ExampleQuestion(question, "", (problem.answer,), scoring, RESERVED[size], name)
        examples.append(Example(context, (asked,), only_instructions=task == "countdown"))
    return examples


def _prompt(file: Path, question_start: str) -> tuple[str, str]:
    """Return the template of a task's prompts in two parts. The second begins with `question_start`."""
    import yaml

    try:
        template = yaml.safe_load(read_text(file, OPTION))["USER_PROMPT"]
        context, separator, question = template.partition(question_start)
    except (yaml.YAMLError, RecursionError, KeyError, TypeError, AttributeError):
        raise UserError(f"{OPTION} {file}: expected a YAML file with a text USER_PROMPT") from None
    if not separator:
        raise UserError(f"{OPTION} {file}: expected USER_PROMPT to have {question_start}")
    return context, separator + question


def _fill(template: str, fields: Mapping[str, str], where: str) -> str:
    """Return the template with its fields filled. Unlike `str.format`, it allows no attributes of fields."""
    try:
        parts = [
            text + ("" if name is None else fields[name]) for text, name, _, _ in Formatter().parse(template)
        ]
    except (ValueError, KeyError) as error:
        raise UserError(
            f"{where}: expected USER_PROMPT to have the fields {', '.join(fields)}, got {error}"
        ) from None
    return "".join(parts)


def _open(name: str, inputs: Inputs) -> Dataset:
    data = inputs.path(DATA, "the folder data of princeton-pli/LongProc")
    metric = ROWS if "html_to_tsv" in name else FOLLOWED if name.endswith(PARTIAL) else RIGHT
    examples = longproc_examples(name, data)
    return BenchmarkSamples(name, f"{OPTION} {data}", examples, inputs.encode, metric, cuts=False)


SUITE = Suite(NAMES, _open, data=(DATA,))
