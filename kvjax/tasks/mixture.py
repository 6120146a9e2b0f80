"""A stream of training sequences drawn from all tasks: for the built-in model and for gates on it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvjax.tasks.copy import Copy
from kvjax.tasks.needle import Needle
from kvjax.tasks.recall import QUESTION_TOKENS, Recall
from kvjax.tasks.task import Tokens, packed
from kvjax.tasks.text import Text
from kvjax.tasks.vocabulary import Vocabulary


@dataclass(frozen=True)
class Mixture:
    """Sequence `index` of a stream: a task drawn with weights `shares`, its difficulty drawn at random.

    The shares are those of recall, needle, copy and text. Deterministic from (seed, index, length), so that a
    run can be resumed, or cut into shards, at any index.
    """

    vocabulary: Vocabulary
    text: Tokens
    shares: Sequence[float] = (0.6, 0.1, 0.1, 0.2)

    def __call__(self, seed: int, index: int, length: int) -> tuple[Tokens, np.ndarray]:
        """`length` tokens and the weight of each in the answer loss (int32 and float32 [length])."""
        rng = np.random.default_rng((seed, index, length))
        v, text = self.vocabulary, self.text
        sample_seed = int(rng.integers(2**31))
        choice = rng.choice(4, p=np.asarray(self.shares) / np.sum(self.shares))
        if choice == 0:
            spacing = 1 / float(rng.uniform(0.012, 0.03))
            n_questions = int(max(4, min(length // 20, 2 * length / spacing)))
            task = Recall(v, text, spacing, float(rng.uniform(0.5, 1.5)), n_questions)
            sample = task.sample(sample_seed, length - (n_questions - 1) * QUESTION_TOKENS)
        elif choice == 1:
            task = Needle(v, text, depths=(float(rng.uniform()),))
            sample = task.sample(sample_seed, length - 2 * QUESTION_TOKENS)
        elif choice == 2:
            families = max(1, int(length / 256 * rng.uniform(0.5, 2)))
            task = Copy(v, text, families, passages=int(rng.integers(2, 5)))
            question_tokens = len(task.sample(0, length).questions[0])
            sample = task.sample(sample_seed, length - (families - 1) * question_tokens)
        else:
            sample = Text(v, text).sample(sample_seed, length)
            return packed(sample, length, v.end)[0], np.zeros(length, np.float32)
        return packed(sample, length, v.end)
