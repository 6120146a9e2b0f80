"""A benchmark's published samples, of any length: contexts that are too long are cut in the middle, or refused."""

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
    """The --data option and its value, for errors."""
    examples: Sequence[Example]
    """All examples of the task."""
    encode: PromptEncoder
    """Makes samples from the examples."""
    metric: str
    """Description of the score."""
    cuts: bool = True
    """True if contexts that are too long are cut in the middle, False if they are refused."""
    published = True

    def __post_init__(self):
        if not self.examples:
            raise UserError(f"{self.where}: there are no samples of {self.name}")

    def answers(self, length: int) -> int:
        """Return the number of questions of the example with the fewest questions."""
        return min(len(example.questions) for example in self.examples)

    def samples(self, split: Split, count: int, length: int) -> list[Sample]:
        """Return the first samples to compare, or the next ones to calibrate on.

        Contexts that are too long are cut in the middle, as the benchmarks cut their prompts (`cut_middle`). Questions
        are never cut.

        Raises UserError if there are too few samples, or if the length leaves no end of a context or needs a cut that
        the benchmark does not allow.
        """
        examples = [(example.source, example) for example in self.examples]
        taken = split.take_published(examples, count, self.where, f"samples of {self.name}")
        return [replace(self._sample(example, length), source=source) for source, example in taken]

    def _sample(self, example: Example, length: int) -> Sample:
        sample = self.encode(example)
        after = sample.tokens_after_context
        space, asked = length - after, len(sample.questions[0].prompt)
        if len(sample.context) <= space:
            return sample
        if not self.cuts:
            raise UserError(
                f"--context {length}: a sample of {self.name} needs {len(sample.context) + after} tokens, {after} of "
                "them for its question and answer; its contexts are not cut"
            )
        if space <= asked + 1:
            raise UserError(
                f"--context {length}: a sample of {self.name} needs {after + asked + 2} tokens at least: {after} for "
                f"its questions and answers, and a context longer than its first question's {asked}"
            )
        return replace(sample, context=cut_middle(sample.context, space, asked))


def cut_middle(context: Tokens, length: int, after: int) -> Tokens:
    """Return at most `length` tokens of a context: its beginning and its end.

    The beginning is as long as the end together with the `after` tokens that follow the context.
    """
    half = (length + after) // 2
    return np.concatenate([context[:half], context[len(context) - (half - after) :]])
