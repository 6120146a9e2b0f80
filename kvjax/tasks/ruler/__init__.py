"""RULER's thirteen tasks (Hsieh et al., COLM 2024, arXiv:2404.06654), generated locally in our own wording, and its
published data.

`make_ruler_task(name, tokenizer)` returns a task whose `sample(seed, length)` is a `Sample` and whose `example` is its
text. `published_examples` reads RULER's own data. Local and published results are not comparable: the wording, the
words and by default the essays differ.

writer: the interface of a task without a tokenizer and a length; task: fitting it to both. needles, needle_by_depth,
variables, frequent, questions: the writers; haystack, random_strings, words: their building blocks. question_files:
SQuAD and HotpotQA. published: RULER's own samples. A new task is an entry in `RULER_TASKS`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kvjax.errors import UserError, nearest
from kvjax.tasks.prompt import Example, PromptEncoder
from kvjax.tasks.ruler import frequent, needles, questions, variables
from kvjax.tasks.ruler.frequent import CodedWords, CommonWords
from kvjax.tasks.ruler.haystack import Lines, read_essays
from kvjax.tasks.ruler.needle_by_depth import needle_by_depth
from kvjax.tasks.ruler.needles import Needles
from kvjax.tasks.ruler.published import DATA, PublishedSamples, published_example, published_rows
from kvjax.tasks.ruler.question_files import read_hotpotqa, read_squad
from kvjax.tasks.ruler.questions import QuestionAnswering
from kvjax.tasks.ruler.task import RulerTask
from kvjax.tasks.ruler.variables import VariableTracking
from kvjax.tasks.ruler.writer import ExampleWriter
from kvjax.tasks.suite import HOLDS, Dataset, FromSeeds, Inputs, Suite

WriterFactory = Callable[[int, int], ExampleWriter]
"""Returns the writer for a length and the number of tokens of the chat template."""

Files = Mapping[str, Path]
"""Files by name: `essays` is the needles' haystack (by default the packaged text); `squad` and `hotpotqa` are the
datasets' JSON files for qa_1 and qa_2."""
NO_FILES: Files = {}


@dataclass(frozen=True)
class RulerEntry:
    """A task without its files, a tokenizer and a length."""

    reserved: int
    """The most tokens of an answer."""
    open: Callable[[str, Files], WriterFactory]
    """Returns the writers of a task from its name and files."""
    scoring: str = "all"
    """The scoring of published samples: `all` of the expected strings, or `any` of them."""


def _essays(**arguments: Any) -> RulerEntry:
    return RulerEntry(
        needles.RESERVED,
        lambda name, files: _any_length(Needles(name, read_essays(files.get("essays")), **arguments)),
    )


def _among_needles(**arguments: Any) -> RulerEntry:
    return RulerEntry(needles.RESERVED, lambda name, files: _any_length(Needles(name, None, **arguments)))


def _questions(data: str, title: str, read: Callable[[Path, str], QuestionAnswering]) -> RulerEntry:
    def opened(name: str, files: Files) -> WriterFactory:
        if data not in files:
            raise UserError(f"{name} needs the JSON file of {title}, as --data {data}=FILE")
        return _any_length(read(files[data], name))

    return RulerEntry(questions.RESERVED, opened, scoring="any")


def _any_length(writer: ExampleWriter) -> WriterFactory:
    return lambda length, template: writer


def _common_words(name: str, files: Files) -> WriterFactory:
    return lambda length, template: CommonWords(length, name)


def _coded_words(name: str, files: Files) -> WriterFactory:
    return lambda length, template: CodedWords(length - frequent.CODED_RESERVED - template, name)


RULER_TASKS = {
    "niah_single_1": RulerEntry(needles.RESERVED, lambda name, files: _any_length(Needles(name, Lines()))),
    "niah_single_2": _essays(),
    "niah_single_3": _essays(value_kind="UUID"),
    "niah_multikey_1": _essays(keys=4),
    "niah_multikey_2": _among_needles(),
    "niah_multikey_3": _among_needles(key_kind="UUID", value_kind="UUID"),
    "niah_multivalue": _essays(values=4),
    "niah_multiquery": _essays(keys=4, wanted=4),
    "vt": RulerEntry(variables.RESERVED, lambda name, files: _any_length(VariableTracking(name))),
    "cwe": RulerEntry(frequent.LIST_RESERVED, _common_words),
    "fwe": RulerEntry(frequent.CODED_RESERVED, _coded_words),
    "qa_1": _questions("squad", "SQuAD", read_squad),
    "qa_2": _questions("hotpotqa", "HotpotQA", read_hotpotqa),
}


def make_ruler_task(name: str, tokenizer: Any, files: Files = NO_FILES, *, chat: bool = True) -> RulerTask:
    """Return the task called `name`, for a tokenizer of transformers or of tokenizers.

    Args:
        chat: True to use the tokenizer's chat template, if it has one. Lengths include it.

    Raises:
        UserError: an unknown name, or a missing or invalid file.
    """
    return RulerTask(name, _entry(name).open(name, files), PromptEncoder(tokenizer, chat))


def make_needle_task(tokenizer: Any, files: Files = NO_FILES, *, chat: bool = True) -> RulerTask:
    """Return a task of a needle by depth in essays, which is not part of RULER. The arguments are those of
    `make_ruler_task`."""
    writer = needle_by_depth(read_essays(files.get("essays")))
    return RulerTask(writer.name, _any_length(writer), PromptEncoder(tokenizer, chat))


def published_examples(data: Path, name: str, length: int) -> list[Example]:
    """Return RULER's own samples of the task called `name`, from a folder or a hub dataset (see `published`).

    Raises:
        UserError: an unknown name, no samples of the task, or an invalid row.
    """
    entry = _entry(name)
    return [
        published_example(row, name, entry.reserved, entry.scoring, at)
        for at, row in published_rows(data, name, length)
    ]


def _entry(name: str) -> RulerEntry:
    if name not in RULER_TASKS:
        near = nearest(name, RULER_TASKS) or list(RULER_TASKS)
        raise UserError(f"RULER has no task called {name!r}; did you mean {', '.join(near)}?")
    return RULER_TASKS[name]


def _open(name: str, inputs: Inputs) -> Dataset:
    if (data := inputs.data.get(DATA)) is not None:
        return PublishedSamples(name, data, inputs.encode, partial(published_examples, data, name))
    task = make_ruler_task(name, inputs.tokenizer, inputs.data, chat=inputs.chat)
    return FromSeeds(lambda length: task, HOLDS)


SUITE = Suite(
    tuple(RULER_TASKS),
    _open,
    data=(DATA, "essays", "squad", "hotpotqa"),
    note="RULER's own data: {tasks}. The results are not comparable with those of generated RULER tasks.",
)

__all__ = [
    "RULER_TASKS",
    "SUITE",
    "RulerTask",
    "make_needle_task",
    "make_ruler_task",
    "published_examples",
]
