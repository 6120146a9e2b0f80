"""Tasks to score a model's memory of its context with, deterministic from a seed and a length.

sample: what every task gives, a context with its questions as token ids. vocabulary, builtin: the built-in model's
tokens and text; tasks of them are recall, needle, copy and text; hide: how they hide things in text; mixture: all of
them, to train on. prompt: samples that are written as text, for any tokenizer, as those of ruler and
document_questions (of documents, cut into passages). contests, contest_answers: AIME and HMMT, answered at length.
longbench, scbench, helmet, longproc: the benchmarks in their published form; text_scores: what they score texts by;
benchmark: samples of them, long contexts cut in the middle. datasets: files of published data. suite: what a task gives
an evaluation; registry: every task by its name; own: those that are none of a benchmark; documents: questions about a
user's texts. splits: which samples are compared, and which calibrated on.
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
