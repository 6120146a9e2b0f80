"""Tasks to score a model's memory of its context with, deterministic from a seed and a length.

sample: a context with its questions as token ids, which every task gives. vocabulary, builtin: the built-in model's
tokens and text; recall, needle, copy and text are tasks of them; hide: hiding tokens in text; mixture: all of them, to
train on. prompt: samples that are written as text, for any tokenizer, such as those of ruler and document_questions (of
documents, cut into passages). contests, contest_answers: AIME and HMMT, answered at length. longbench, scbench, helmet,
longproc: the benchmarks in their published form; text_scores: their scores of texts; benchmark: their samples, long
contexts cut in the middle. datasets: files of published data. suite: the interface between tasks and an evaluation;
registry: every task by its name; own: the tasks of no benchmark; documents: questions about a user's texts. splits: the
samples that are compared, and those that are calibrated on.
"""

from kvjax.tasks.builtin import builtin_task, builtin_text, builtin_vocabulary, heldout_files
from kvjax.tasks.copy import Copy
from kvjax.tasks.mixture import Mixture, mixture, pack
from kvjax.tasks.needle import Needle
from kvjax.tasks.prompt import Example, ExampleQuestion, PromptEncoder
from kvjax.tasks.recall import Recall
from kvjax.tasks.sample import Question, Sample, Task, Tokens
from kvjax.tasks.text import Text
from kvjax.tasks.vocabulary import SPECIAL_TOKENS, Vocabulary

__all__ = [
    "SPECIAL_TOKENS",
    "Copy",
    "Example",
    "ExampleQuestion",
    "Mixture",
    "Needle",
    "PromptEncoder",
    "Question",
    "Recall",
    "Sample",
    "Task",
    "Text",
    "Tokens",
    "Vocabulary",
    "builtin_task",
    "builtin_text",
    "builtin_vocabulary",
    "heldout_files",
    "mixture",
    "pack",
]
