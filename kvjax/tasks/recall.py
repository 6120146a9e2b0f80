"""Typed records hidden in text among look-alikes.

A record is a mark and three ordinary tokens, `<|record|> a b c`. A look-alike shares `a` or `b` with a
record, has other tokens in the other places and no mark. Questions are `<|question|> key type` and want one
token:

    F   a -> b        S   a -> c        R   b -> a

Each type reads the record in another way, so that it takes a kv head of its own. Every token of a record is an
ordinary one, so that only its surroundings tell that it must be kept.
"""

from dataclasses import dataclass

import numpy as np

from kvjax.errors import UserError
from kvjax.tasks.hide import hide
from kvjax.tasks.sample import Question, Sample, Tokens, as_tokens
from kvjax.tasks.vocabulary import Vocabulary

TYPES = ("F", "S", "R")
QUESTION_TOKENS = 4


def question(vocabulary: Vocabulary, record: Tokens, way: int, kind: str | None = None) -> Question:
    """Return the question of type `TYPES[way]` about a record `(a, b, c)`. The type is also its kind unless one is
    given."""
    a, b, c = record
    key, answer = ((a, b), (a, c), (b, a))[way]
    prompt = as_tokens([vocabulary.question, key, vocabulary.types[way]])
    return Question(prompt, as_tokens([answer]), kind or TYPES[way])


def mark_record(vocabulary: Vocabulary, record: Tokens) -> Tokens:
    """Return the record with the mark before it."""
    return as_tokens([vocabulary.record, *record])


@dataclass(frozen=True)
class Recall:
    """A record for every `spacing` tokens of context (at least 4), `lookalikes` for each record on average.

    Up to `questions` questions (at most three a record) ask for them, in the three ways in turn.
    """

    vocabulary: Vocabulary
    """The marks that the task is written with."""
    text: Tokens
    """Source of the filler."""
    spacing: float = 64
    """Tokens of context for a record, at least 4."""
    lookalikes: float = 0.5
    """The number of look-alikes for each record, on average."""
    questions: int = 16
    """The most questions of a sample."""
    name: str = "recall"

    def sample(self, seed: int, length: int) -> Sample:
        v, rng = self.vocabulary, np.random.default_rng((seed, length))
        n_records = max(4, int(length / self.spacing))
        n_like = int(n_records * self.lookalikes)
        fresh = as_tokens(rng.permutation(v.ordinary))
        if 3 * (n_records + n_like) > len(fresh):
            raise UserError(
                f"{length} tokens hold {n_records} records, more than {v.ordinary} different tokens can write"
            )
        records, rest = fresh[: 3 * n_records].reshape(-1, 3), fresh[3 * n_records :]
        likes = rest[: 3 * n_like].reshape(-1, 3).copy()
        shared = rng.choice(2, size=n_like, p=(0.6, 0.4))
        likes[np.arange(n_like), shared] = records[rng.integers(n_records, size=n_like), shared]
        body = length - QUESTION_TOKENS - 2
        hidden = hide(rng, self.text, body, [*(mark_record(v, r) for r in records), *likes])
        # Every record is asked about once before one is asked about again, each time in another way.
        order, turn = rng.permutation(n_records), int(rng.integers(3))
        questions = tuple(
            question(v, records[order[i % n_records]], (i + i // n_records * (n_records % 3 == 0) + turn) % 3)
            for i in range(min(self.questions, 3 * n_records))
        )
        context = np.concatenate([as_tokens([v.begin]), hidden, as_tokens([v.separator])])
        return Sample(context, questions)
