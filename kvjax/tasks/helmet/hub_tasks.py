"""HELMET's tasks from datasets on the hub: classification after many demonstrations (TREC, BANKING77, CLINC150, NLU),
and questions about novels (InfiniteBench).

The prompts are the published ones. Their contexts contain the demonstrations.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from kvjax.errors import UserError, whole_number
from kvjax.tasks.datasets import Row, row_field, row_text, row_texts
from kvjax.tasks.helmet.records import OPTION, Files, Prompt, Prompts
from kvjax.tasks.helmet.sampling import (
    SEED,
    SHOTS,
    TEXTS,
    balanced,
    row_key,
    shuffled,
    shuffled_numbers,
    split_off_tenth,
    text_seed,
)
from kvjax.tasks.helmet.scores import choice_match, label_match, rouge_f1
from kvjax.tasks.prompt import Scoring

CONVERTED = "refs/convert/parquet"
"""The hub's own copy of a dataset as .parquet files."""
OMITTED = " ... [the rest of the text is omitted]"


@dataclass(frozen=True)
class Texts:
    """A dataset of labelled texts on the hub."""

    hub: str
    label: str
    """The field of the label."""
    labels: int
    """Number of labels."""
    shots: tuple[int, ...]
    """The number of demonstrations for each length in `LENGTHS`."""
    test: str = "test"
    """The split of the questions' texts. If it is `train`, a tenth of that split is used."""
    configuration: str = "default"

    def read(self, files: Files, split: str) -> list[tuple[str, int]]:
        """Return the texts of a split with their labels."""
        file = f"{self.configuration}/{split}/0000.parquet"
        rows = files.hub_rows(self.hub, split, file, CONVERTED)
        if not rows:
            raise UserError(f"{OPTION}: there are no rows in the split {split} of {self.hub}")
        return [
            (
                row_text(fields, "text", at),
                whole_number(at, f"`{self.label}`", row_field(fields, self.label, at), 0, self.labels - 1),
            )
            for at, fields in rows
        ]


def icl(files: Files, texts: Texts) -> Prompts:
    """Return the prompts that ask for a text's label, after demonstrations in which numbers stand for the labels."""
    train = texts.read(files, "train")
    train, test = split_off_tenth(train) if texts.test == "train" else (train, texts.read(files, texts.test))
    if len(test) > TEXTS:
        test = shuffled(test)
        sampled = balanced([label for _, label in test], TEXTS, SEED)
        others = sorted(set(range(len(test))) - set(sampled))
        test = [test[index] for index in (*sampled, *others)]
    shots = texts.shots[files.length_index]
    return [(text, [partial(_icl_prompt, text, label, train, texts.labels, shots)]) for text, label in test]


def _icl_prompt(text: str, label: int, train: Sequence[tuple[str, int]], labels: int, shots: int) -> Prompt:
    seed = text_seed(text, SEED)
    numbers = shuffled_numbers(labels, seed)
    demos = (train[index] for index in balanced([label for _, label in train], shots, seed))
    return Prompt(
        "Use the provided mapping from the text to label to assign a label to the text. Only output "
        '"label: {label}" and nothing else. \n\n',
        "\n\n".join(f"{demo}\nlabel: {numbers[demo_label]}" for demo, demo_label in demos),
        "\n\n",
        text,
        "\nlabel:",
        (str(numbers[label]),),
        label_match,
    )


def infbench(files: Files, choice: bool) -> Prompts:
    """Return the prompts that ask questions about novels. The official loader also drops novels of fewer than 65536
    tokens, but there are none."""
    name = "longbook_choice_eng" if choice else "longbook_qa_eng"
    rows = files.hub_rows("xinrongzhang2022/InfiniteBench", name, f"{name}.jsonl")
    scoring = choice_match if choice else rouge_f1()
    return [
        (row_text(row[1], "context", row[0]), [partial(_infbench_prompt, row, rows, choice, scoring)])
        for row in shuffled(rows)
    ]


def _infbench_prompt(row: Row, rows: Sequence[Row], choice: bool, scoring: Scoring) -> Prompt:
    at, fields = row
    key = row_key(row, "id")
    others = shuffled([other for other in rows if row_key(other, "id") != key])[:SHOTS]
    asked, expected = _question(row, choice)
    demos = "\n\n".join(
        f"[story text]\n{question}\nAnswer: {answers[0]}"
        for question, answers in (_question(other, choice) for other in others)
    )
    task = (
        "You are given a story and a question with multiple choices. Choose the best answer from the options provided. "
        "Only one of the following options is correct, output the answer using one single letter (A, B, C, or D). "
        "Don't say anything else."
        if choice
        else "You are given a story and a question. Answer the question as concisely as you can, using a single phrase "
        "if possible."
    )
    return Prompt(
        f"{task}\n\nFor example:\n\n{demos}\n\nNow, read the following story:\n\n",
        row_text(fields, "context", at),
        "\n\n",
        asked,
        "\n\nAnswer:",
        expected,
        scoring,
        chat=True,
        omitted=OMITTED,
    )


def _question(row: Row, choice: bool) -> tuple[str, tuple[str, ...]]:
    """Return a question about a novel and its answers. With multiple choice, these are the letter, and the letter with
    the option."""
    at, fields = row
    question, answers = f"Question: {row_text(fields, 'input', at)}", row_texts(fields, "answer", at)
    if not choice:
        return question, answers
    options = row_texts(fields, "options", at)
    if len(options) != 4 or answers[0] not in options:
        raise UserError(
            f"{at}: expected four `options`, with the answer {answers[0][:60]}, got {options}"[:300]
        )
    lines = [f"{letter}. {option}" for letter, option in zip("ABCD", options, strict=True)]
    true = lines[options.index(answers[0])]
    return f"{question}\nOptions:\n" + "\n".join(lines), (true[0], true)
