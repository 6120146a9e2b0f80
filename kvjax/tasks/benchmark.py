"""A benchmark's published samples, of any length: contexts that are too long are cut in the middle."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvjax.errors import UserError
from kvjax.tasks.prompt import Example, PromptEncoder
from kvjax.tasks.sample import Sample, Tokens
from kvjax.tasks.splits import Split


@dataclass(frozen=True)
class BenchmarkSamples:
    """The samples of a benchmark's task, in their order. Raises UserError if there are none."""

    name: str
    """The task's name."""
    where: str
    """The option that was read and its value, for errors."""
    examples: Sequence[Example]
    """All examples of the task."""
    encode: PromptEncoder
    """Makes samples of the examples."""
    metric: str
    """Description of the score."""
    published = True

    def __post_init__(self):
        if not self.examples:
            raise UserError(f"{self.where}: there are no samples of {self.name}")

    def answers(self, length: int) -> int:
        """Return the number of questions of the context with the fewest."""
        return min(len(example.questions) for example in self.examples)

    def samples(self, split: Split, count: int, length: int) -> list[Sample]:
        """Return the first samples to compare, or those after them to calibrate on. A context that is too long is cut
        in the middle, as the benchmarks cut their prompts: its beginning is as long as its end with the first question.
        Questions are never cut.

        Raises UserError if there are too few samples, or for a length that leaves a context no end before its question.
        """
        return [
            self._sample(example, length)
            for example in split.of_published(self.examples, count, self.where, f"samples of {self.name}")
        ]

    def _sample(self, example: Example, length: int) -> Sample:
        sample = self.encode(example)
        room, behind = length - sample.room, len(sample.questions[0].prompt)
        if len(sample.context) <= room:
            return sample
        if room <= behind + 1:
            raise UserError(
                f"--context {length}: a sample of {self.name} needs {sample.room + behind + 2} tokens at least: "
                f"{sample.room} for its questions and answers, and a context longer than its first question's {behind}"
            )
        return replace(sample, context=cut_middle(sample.context, room, behind))


def cut_middle(context: Tokens, room: int, behind: int) -> Tokens:
    """Return at most `room` tokens of a context: its beginning, and its end, which together with the `behind`
    tokens after it is as long."""
    half = (room + behind) // 2
    return np.concatenate([context[:half], context[len(context) - (half - behind) :]])
