"""Each task at each length, with the samples that all policies are compared on."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kvjax.evaluate.compared import compared_of
from kvjax.evaluate.config import EvaluateConfig
from kvjax.tasks.registry import open_task
from kvjax.tasks.sample import Sample, check_separable, one_question, question_aware
from kvjax.tasks.splits import Split
from kvjax.tasks.suite import Dataset, Inputs

CALIBRATION_SAMPLES = 4
"""Samples that τ is searched on."""


@dataclass(frozen=True)
class SizedTask:
    """A task at one length, with its samples."""

    name: str
    length: int
    """Tokens of a context with a question and its answer, at most."""
    dataset: Dataset
    """Source of its samples."""
    samples: Sequence[Sample]
    """Samples that are compared."""
    calibration: Sequence[Sample]
    """Samples that τ is searched on; empty if it is not searched for."""
    batch: int
    """The most samples, or answers to contests, in a batch."""
    draws: int = 1
    """The number of answers to each problem of a contest."""

    @property
    def drawn(self) -> bool:
        """True if its samples are a contest's problems, whose answers are sampled."""
        return self.samples[0].drawn

    @property
    def tokens(self) -> int:
        """Mean tokens of a context, rounded to a sixteenth of the length. Tasks whose contexts differ by a few tokens
        then get the same windows and run the same programs. For contests it is the whole length."""
        if self.drawn:
            return self.length
        mean, step = np.mean([len(sample.context) for sample in self.samples]), max(1, self.length // 16)
        return step * max(1, round(mean / step))

    @property
    def shortest(self) -> int:
        """Tokens of its shortest context; for contests the whole length."""
        return self.length if self.drawn else min(len(sample.context) for sample in self.samples)

    @cached_property
    def digest(self) -> str:
        """Digest of the tokens of contexts, questions and expected answers."""
        known = hashlib.sha256()
        for sample in self.samples:
            parts = [sample.context, *(part for q in sample.questions for part in (q.prompt, q.answer))]
            for part in parts:
                known.update(np.int64(len(part)).tobytes() + part.astype(np.int32).tobytes())
        return known.hexdigest()[:16]

    @property
    def published(self) -> bool:
        return self.dataset.published


def sized_tasks(config: EvaluateConfig) -> list[SizedTask]:
    """Return every task at every length, with its samples; no model is needed for them.

    Raises UserError for an invalid task, or a length that a task cannot have.
    """
    inputs = Inputs(config.model, config.files, config.chat, config.turns, config.tasks)
    opened = {task: open_task(task, inputs) for task in config.tasks}
    return [
        _sized_task(task, length, opened[task], config) for length in config.context for task in config.tasks
    ]


def _sized_task(task: str, length: int, own: Dataset, config: EvaluateConfig) -> SizedTask:
    count = _count(own, length, config)
    samples = own.samples(Split(config.seed, count), count, length)
    if samples[0].drawn:
        draws = -(-config.samples // len(samples))
        return SizedTask(task, length, own, samples, [], _batch(len(samples) * draws, config), draws)
    searched = any(compared_of(text).searched for text in config.policies)
    others = Split(config.seed, count, calibration=True)
    calibration = own.samples(others, CALIBRATION_SAMPLES, length) if searched else []
    if config.question_aware:
        samples, calibration = question_aware(samples), question_aware(one_question(calibration))
    else:
        check_separable(task, samples)
    return SizedTask(task, length, own, samples, calibration, _batch(len(samples), config))


def _batch(count: int, config: EvaluateConfig) -> int:
    """Return the batch size that splits `count` samples into the fewest batches, all of about the same size."""
    return -(-count // -(-count // config.batch))


def for_rivals(task: SizedTask, config: EvaluateConfig, count: int, length: int) -> list[Sample]:
    """Return `count` samples of a task that are not compared. Head patterns and gates are chosen on them."""
    compared = _count(task.dataset, task.length, config)
    split = Split(config.seed, compared, calibration=True, skipped=CALIBRATION_SAMPLES)
    samples = task.dataset.samples(split, count, length)
    return question_aware(one_question(samples)) if config.question_aware else samples


def _count(own: Dataset, length: int, config: EvaluateConfig) -> int:
    """Return the number of samples for at least --samples answers. It is rounded up to batches of one size, since each
    size is a program of its own. Published samples are not rounded up, since there may be no more of them."""
    count = -(-config.samples // own.answers(length))
    if own.published:
        return count
    batches = -(-count // config.batch)
    return batches * -(-count // batches)
