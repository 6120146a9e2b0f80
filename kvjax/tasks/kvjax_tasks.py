"""Tasks of no benchmark: recall and copy for the built-in model; needle, text and documents for any model."""

from kvjax.errors import UserError
from kvjax.tasks.builtin import builtin_task, builtin_text, builtin_vocabulary
from kvjax.tasks.copy import Copy
from kvjax.tasks.documents import DATA, DocumentQuestions, Documents, DocumentText
from kvjax.tasks.needle import Needle
from kvjax.tasks.recall import Recall
from kvjax.tasks.ruler import RULER_TASKS, make_needle_task
from kvjax.tasks.sample import Sample, Task
from kvjax.tasks.splits import Split
from kvjax.tasks.suite import HOLDS, RIGHT, SAME_AS_FULL, Dataset, FromSeeds, Inputs, Suite
from kvjax.tasks.text import ANSWERS_PER_TEXT, Text, split_text


class BuiltInText:
    """Slices of the packaged text, of which the model predicts the end."""

    metric = SAME_AS_FULL
    published = False

    def answers(self, length: int) -> int:
        return ANSWERS_PER_TEXT

    def samples(self, split: Split, count: int, length: int) -> list[Sample]:
        compared, calibration = split_text(builtin_text("evaluate"))
        task = Text(builtin_vocabulary(), calibration if split.calibration else compared)
        return [task.sample(split.first + index, length) for index in range(count)]


def _open(name: str, inputs: Inputs) -> Dataset:
    if name in ("recall", "copy"):
        if not inputs.is_builtin:
            raise UserError(
                f"--tasks {name} needs the built-in model's tokens, which {inputs.model} does not have; expected "
                f"needle, documents, text, {', '.join(RULER_TASKS)}, or a benchmark"
            )
        return FromSeeds(_copy if name == "copy" else lambda length: builtin_task(Recall), RIGHT)
    if name == "needle":
        if inputs.is_builtin:
            return FromSeeds(lambda length: builtin_task(Needle), RIGHT)
        task = make_needle_task(inputs.tokenizer, inputs.data, chat=inputs.chat)
        return FromSeeds(lambda length: task, HOLDS)
    if name == "text" and DATA not in inputs.data and inputs.is_builtin:
        return BuiltInText()
    documents = Documents(inputs)
    _ = documents.texts  # so that a missing file is found before any sample is made
    return DocumentText(documents) if name == "text" else DocumentQuestions(documents)


def _copy(length: int) -> Task:
    """Return the task with the number of families that the built-in model was trained with at that length."""
    return Copy(builtin_vocabulary(), builtin_text("evaluate"), families=max(1, length // 256))


SUITE = Suite(("recall", "needle", "copy", "text", "documents"), _open, data=(DATA, "essays"))
