"""Typed records hidden in text among look-alikes.

A record is a mark and three ordinary tokens, `<|record|> a b c`. A look-alike shares `a` or `b` with a record; its
other tokens differ, and it has no mark. A question is `<|question|> key type`; its answer is one token:

    F   a -> b        S   a -> c        R   b -> a

Each type reads the record in a different way, so that it needs another kv head. The tokens of a record are ordinary
tokens, so that only their surroundings show that they must be kept.
"""

from dataclasses import dataclass

import numpy as np

from kvjax.errors import UserError
from kvjax.tasks.hide import hide
from kvjax.tasks.sample import Question, Sample, Tokens, as_tokens
from kvjax.tasks.vocabulary import Vocabulary

TYPES = ("F", "S", "R")
QUESTION_TOKENS = 4


def question(vocabulary: Vocabulary, record: Tokens, type_index: int, kind: str | None = None) -> Question:
    """Return the question of type `TYPES[type_index]` about a record `(a, b, c)`. Its kind is by default its type."""
    a, b, c = record
    key, answer = ((a, b), (a, c), (b, a))[type_index]
    prompt = as_tokens([vocabulary.question, key, vocabulary.types[type_index]])
    return Question(prompt, as_tokens([answer]), kind or TYPES[type_index])


def mark_record(vocabulary: Vocabulary, record: Tokens) -> Tokens:
    """Return the record after its mark."""
    return as_tokens([vocabulary.record, *record])


@dataclass(frozen=True)
class Recall:
    """Records and look-alikes hidden in text. At most three questions for each record take the three types in turn."""

    vocabulary: Vocabulary
    """The special tokens of the task."""
    text: Tokens
    """Source of the filler."""
    spacing: float = 64
    """Tokens of context for each record. There are at least four records."""
    lookalikes: float = 0.5
    """The number of look-alikes for each record, on average."""
    questions: int = 16
    """The most questions of a sample."""
    name: str = "recall"

    def sample(self, seed: int, length: int) -> Sample:
        v, rng = self.vocabulary, np.random.default_rng((seed, length))
        n_records = max(4, int(length / self.spacing))
        n_lookalikes = int(n_records * self.lookalikes)
        fresh = as_tokens(rng.permutation(v.ordinary))
        if 3 * (n_records + n_lookalikes) > len(fresh):
            raise UserError(
                f"{length} tokens need {n_records} records, more than {v.ordinary} different tokens allow"
            )
        records, rest = fresh[: 3 * n_records].reshape(-1, 3), fresh[3 * n_records :]
        lookalikes = rest[: 3 * n_lookalikes].reshape(-1, 3).copy()
        shared = rng.choice(2, size=n_lookalikes, p=(0.6, 0.4))
        lookalikes[np.arange(n_lookalikes), shared] = records[
            rng.integers(n_records, size=n_lookalikes), shared
        ]
        body = length - QUESTION_TOKENS - 2
        hidden = hide(rng, self.text, body, [*(mark_record(v, r) for r in records), *lookalikes])
        # Every record is asked about once before any is asked about again, each time with another type.
        order, turn = rng.permutation(n_records), int(rng.integers(3))
        questions = tuple(
            question(v, records[order[i % n_records]], (i + i // n_records * (n_records % 3 == 0) + turn) % 3)
            for i in range(min(self.questions, 3 * n_records))
        )
        context = np.concatenate([as_tokens([v.begin]), hidden, as_tokens([v.separator])])
        return Sample(context, questions)
