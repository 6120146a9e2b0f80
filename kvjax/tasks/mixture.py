"""Training sequences from all tasks in the built-in vocabulary, for the built-in model and its gates."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from jaxtyping import Float, Int

from kvjax.errors import UserError
from kvjax.tasks.builtin import builtin_text, builtin_vocabulary
from kvjax.tasks.copy import Copy
from kvjax.tasks.needle import Needle
from kvjax.tasks.recall import QUESTION_TOKENS, Recall
from kvjax.tasks.sample import Sample, Tokens
from kvjax.tasks.text import Text
from kvjax.tasks.vocabulary import Vocabulary


@dataclass(frozen=True)
class Mixture:
    """A stream of sequences, each from a random task (with weights `shares`) of random difficulty.

    A sequence is deterministic from (seed, index, length), so that a run can be resumed or sharded at any index.
    """

    vocabulary: Vocabulary
    """The special tokens of the task."""
    text: Tokens
    """Source of the filler."""
    shares: Sequence[float] = (0.6, 0.1, 0.1, 0.2)
    """Weights of recall, needle, copy and text."""

    def __call__(
        self, seed: int, index: int, length: int
    ) -> tuple[Int[np.ndarray, " t"], Float[np.ndarray, " t"]]:
        """Return `length` tokens and the weight of each in the answer loss (int32 and float32 [length])."""
        sample, learned = self._sample(seed, index, length)
        tokens, weights = pack(sample, length, self.vocabulary.end)
        return tokens, weights if learned else np.zeros(length, np.float32)

    def sample(self, seed: int, index: int, length: int) -> Sample:
        """Return the context and the questions of a sequence."""
        return self._sample(seed, index, length)[0]

    def _sample(self, seed: int, index: int, length: int) -> tuple[Sample, bool]:
        """Return the sample, and True if its answers are learned."""
        rng = np.random.default_rng((seed, index, length))
        v, text = self.vocabulary, self.text
        sample_seed = int(rng.integers(2**31))
        choice = rng.choice(4, p=np.asarray(self.shares) / np.sum(self.shares))
        if choice == 0:
            spacing = 1 / float(rng.uniform(0.012, 0.03))
            n_questions = int(max(4, min(length // 20, 2 * length / spacing)))
            task = Recall(v, text, spacing, float(rng.uniform(0.5, 1.5)), n_questions)
            return task.sample(sample_seed, length - (n_questions - 1) * QUESTION_TOKENS), True
        if choice == 1:
            task = Needle(v, text, depths=(float(rng.uniform()),))
            return task.sample(sample_seed, length - 2 * QUESTION_TOKENS), True
        if choice == 2:
            families = max(1, int(length / 256 * rng.uniform(0.5, 2)))
            task = Copy(v, text, families, passages=int(rng.integers(2, 5)))
            question_tokens = len(task.sample(0, length).questions[0])
            return task.sample(sample_seed, length - (families - 1) * question_tokens), True
        return Text(v, text).sample(sample_seed, length), False


@cache
def builtin_mixture() -> Mixture:
    """Return the stream that gates for the built-in model are trained on. Evaluation uses other text."""
    return Mixture(builtin_vocabulary(), builtin_text("train"))


def pack(sample: Sample, length: int, end: int) -> tuple[Int[np.ndarray, " t"], Float[np.ndarray, " t"]]:
    """Return a training sequence of `length` tokens: the context, the questions with answers that fit, and padding.

    The padding is the token `end`. Returns the tokens and their weights: 1.0 in answers and 0.0 elsewhere (float32
    [length]). Raises UserError if the first question does not fit.
    """
    tokens = np.full(length, end, np.int32)
    weights = np.zeros(length, np.float32)
    at = len(sample.context)
    if at + len(sample.questions[0]) > length:
        first = len(sample.questions[0])
        raise UserError(f"a context of {at} tokens and a question of {first} do not fit into {length}")
    tokens[:at] = sample.context
    for question in sample.questions:
        answer_start, stop = at + len(question.prompt), at + len(question)
        if stop > length:
            break
        tokens[at:answer_start] = question.prompt
        tokens[answer_start:stop] = question.answer
        weights[answer_start:stop] = 1.0
        at = stop
    return tokens, weights
