"""Tasks that score a model's memory of its context. Samples are deterministic from a seed and a length.

sample: a context with its questions as token ids. suite: the interface between tasks and an evaluation; registry: all
tasks by name; splits: samples to compare and samples to calibrate on.

vocabulary, builtin: the built-in model's tokens and text. recall, needle, copy and text: tasks in these tokens; hide:
hiding tokens in text; mixture: training sequences from these tasks.

prompt: samples written as text, for any tokenizer. ruler: RULER's tasks. documents, document_questions, passages:
questions about a user's texts. kvjax_tasks: the suite of all tasks that belong to no benchmark.

contests, contest_answers: AIME and HMMT. longbench, scbench, helmet, longproc, longproc_scores: these benchmarks in
their published form; text_scores: their metrics of texts; benchmark: their samples; datasets: files of published data.
"""

from kvjax.tasks.builtin import builtin_task, builtin_text, builtin_vocabulary, heldout_files
from kvjax.tasks.copy import Copy
from kvjax.tasks.mixture import Mixture, pack
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
    "pack",
]
