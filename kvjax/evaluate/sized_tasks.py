"""The tasks of an evaluation: each task at each length, with its samples."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kvjax.evaluate.compared import parse_compared
from kvjax.evaluate.config import EvaluateConfig
from kvjax.tasks.registry import open_task
from kvjax.tasks.sample import Sample, check_separable, one_question, question_aware
from kvjax.tasks.splits import Split
from kvjax.tasks.suite import Dataset, Inputs

CALIBRATION_SAMPLES = 4
"""The number of samples on which τ is searched."""


@dataclass(frozen=True)
class SizedTask:
    """A task at one length, with its samples."""

    name: str
    length: int
    """Tokens of a context with a question and its answer, at most."""
    dataset: Dataset
    """Source of its samples."""
    samples: Sequence[Sample]
    """Samples on which policies are compared."""
    calibration: Sequence[Sample]
    """Samples on which τ is searched; empty if it is not searched."""
    batch: int
    """The most samples, or answers to contests, in a batch."""
    draws: int = 1
    """The number of answers to each problem of a contest."""

    @property
    def is_contest(self) -> bool:
        """True if its samples are a contest's problems, whose answers are sampled."""
        return self.samples[0].is_contest

    @property
    def tokens(self) -> int:
        """Mean tokens of a context, rounded to a sixteenth of the length; for contests the whole length.

        Rounding lets tasks with slightly different contexts share windows, and with them programs.
        """
        if self.is_contest:
            return self.length
        mean, step = np.mean([len(sample.context) for sample in self.samples]), max(1, self.length // 16)
        return step * max(1, round(mean / step))

    @property
    def shortest(self) -> int:
        """Tokens of its shortest context; for contests the whole length."""
        return self.length if self.is_contest else min(len(sample.context) for sample in self.samples)

    @cached_property
    def digest(self) -> str:
        """Digest of the tokens of contexts, questions and expected answers."""
        digest = hashlib.sha256()
        for sample in self.samples:
            parts = [sample.context, *(part for q in sample.questions for part in (q.prompt, q.answer))]
            for part in parts:
                digest.update(np.int64(len(part)).tobytes() + part.astype(np.int32).tobytes())
        return digest.hexdigest()[:16]

    @property
    def published(self) -> bool:
        return self.dataset.published


def sized_tasks(config: EvaluateConfig) -> list[SizedTask]:
    """Return every task at every length, with its samples. Needs the tokenizer, but no weights.

    Raises UserError for an invalid task, or a length that a task cannot have.
    """
    inputs = Inputs(config.model, config.files, config.chat, config.turns, config.tasks)
    opened = {task: open_task(task, inputs) for task in config.tasks}
    return [
        _sized_task(task, length, opened[task], config) for length in config.context for task in config.tasks
    ]


def _sized_task(task: str, length: int, dataset: Dataset, config: EvaluateConfig) -> SizedTask:
    count = _count(dataset, length, config)
    samples = dataset.samples(Split(config.seed, count), count, length)
    if samples[0].is_contest:
        draws = -(-config.samples // len(samples))
        return SizedTask(task, length, dataset, samples, [], _batch(len(samples) * draws, config), draws)
    searches_tau = any(parse_compared(text).searches_tau for text in config.policies)
    split = Split(config.seed, count, calibration=True)
    calibration = dataset.samples(split, CALIBRATION_SAMPLES, length) if searches_tau else []
    if config.question_aware:
        samples, calibration = question_aware(samples), question_aware(one_question(calibration))
    else:
        check_separable(task, samples)
    return SizedTask(task, length, dataset, samples, calibration, _batch(len(samples), config))


def _batch(count: int, config: EvaluateConfig) -> int:
    """Return the batch size that splits `count` samples into the fewest batches, all of about the same size."""
    return -(-count // -(-count // config.batch))


def calibration_samples(task: SizedTask, config: EvaluateConfig, count: int, length: int) -> list[Sample]:
    """Return `count` samples on which head patterns and gates are chosen. They differ from those that are compared."""
    compared = _count(task.dataset, task.length, config)
    split = Split(config.seed, compared, calibration=True, skipped=CALIBRATION_SAMPLES)
    samples = task.dataset.samples(split, count, length)
    return question_aware(one_question(samples)) if config.question_aware else samples


def _count(dataset: Dataset, length: int, config: EvaluateConfig) -> int:
    """Return the number of samples for at least --samples answers.

    It is rounded up to batches of equal size, since each batch size needs its own program. Published samples are not
    rounded up, since there may be no more of them.
    """
    count = -(-config.samples // dataset.answers(length))
    if dataset.published:
        return count
    batches = -(-count // config.batch)
    return batches * -(-count // batches)
