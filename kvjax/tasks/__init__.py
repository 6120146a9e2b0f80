"""Tasks to score a model's memory of its context with, deterministic from a seed and a length.

task, vocabulary, builtin: tasks of token ids in the built-in model's vocabulary, which are recall, needle, copy, text
and mixture (of all, to train on); haystack: what they hide things in. text_sample, text_prompt: tasks of text for real
models, which are ruler's and document_questions (of documents). context: the form in which a model sees any of them.
sources: contexts by the task's name. splits: which are compared, and which calibrated on.

A task of token ids is a class with a `name` and a `sample(seed, length)`, and a line in `TASKS`; a task of text gives a
`TextSample`.
"""

from collections.abc import Callable
from functools import cache

from kvjax.errors import UserError
from kvjax.tasks.builtin import builtin_text, builtin_vocabulary, heldout_files
from kvjax.tasks.copy import Copy
from kvjax.tasks.mixture import Mixture
from kvjax.tasks.needle import Needle
from kvjax.tasks.recall import Recall
from kvjax.tasks.task import Question, Sample, Task, Tokens, packed
from kvjax.tasks.text import Text
from kvjax.tasks.text_prompt import Prompt, PromptEncoder
from kvjax.tasks.text_sample import TextQuestion, TextSample, mean_score
from kvjax.tasks.vocabulary import SPECIAL_TOKENS, Vocabulary

TASKS: dict[str, Callable[[Vocabulary, Tokens], Task]] = {
    "recall": Recall,
    "needle": Needle,
    "copy": Copy,
    "text": Text,
}


def make_task(name: str, vocabulary: Vocabulary | None = None, text: Tokens | None = None) -> Task:
    """The task called `name`, by default in the built-in vocabulary and on the packaged text for evaluation.

    Raises `UserError` naming the known tasks if there is none of that name.
    """
    if name not in TASKS:
        raise UserError(f"no task is called {name!r}; known are {', '.join(TASKS)}")
    if vocabulary is None:
        vocabulary = builtin_vocabulary()
    return TASKS[name](vocabulary, builtin_text("evaluate") if text is None else text)


@cache
def _builtin_mixture() -> Mixture:
    return Mixture(builtin_vocabulary(), builtin_text("train"))


def mixture(seed: int, index: int, length: int) -> Tokens:
    """Sequence `index` of stream `seed` for training gates on the built-in model: int32 [length].

    Its text is kept apart from the text of evaluation.
    """
    return _builtin_mixture()(seed, index, length)[0]


__all__ = [
    "SPECIAL_TOKENS",
    "TASKS",
    "Copy",
    "Mixture",
    "Needle",
    "Prompt",
    "PromptEncoder",
    "Question",
    "Recall",
    "Sample",
    "Task",
    "Text",
    "TextQuestion",
    "TextSample",
    "Tokens",
    "Vocabulary",
    "builtin_text",
    "builtin_vocabulary",
    "heldout_files",
    "make_task",
    "mean_score",
    "mixture",
    "packed",
]
