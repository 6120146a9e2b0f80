"""Copying a passage from a random distance, among others that have the same tokens in another order.

The eleven tokens of a family stand in a circle, and passage number s of the family walks round it in steps of s. The
circle's length is prime, so a passage visits every token once, a token has another successor in each passage of the
family, and two consecutive tokens belong to one passage only. So the next token follows from the last two tokens, and
more than one matching head is needed.
"""

from dataclasses import dataclass

import numpy as np

from kvjax.tasks.hide import hide
from kvjax.tasks.sample import Question, Sample, Tokens, as_tokens
from kvjax.tasks.vocabulary import Vocabulary

PASSAGE = 11
GIVEN = 2


@dataclass(frozen=True)
class Copy:
    """`families` of `passages` each (2 to 10), hidden in text, with one question for each family.

    A question gives a mark and the first two tokens of a passage, and asks for the other nine.
    """

    vocabulary: Vocabulary
    """The marks that the task is written with."""
    text: Tokens
    """Source of the filler."""
    families: int = 2
    """The number of families."""
    passages: int = 4
    """The number of passages of each family."""
    name: str = "copy"

    def sample(self, seed: int, length: int) -> Sample:
        v, rng = self.vocabulary, np.random.default_rng((seed, length))
        circles = rng.choice(v.ordinary, size=(self.families, PASSAGE), replace=False)
        segments, questions = [], []
        for circle in circles:
            steps = 1 + rng.permutation(PASSAGE - 1)[: self.passages]
            starts = rng.integers(PASSAGE, size=self.passages)
            walks = as_tokens(circle[(starts[:, None] + steps[:, None] * np.arange(PASSAGE)) % PASSAGE])
            segments += [np.concatenate([as_tokens([v.copy]), walk]) for walk in walks]
            wanted = walks[0]
            prompt = as_tokens([v.question, v.copy, *wanted[:GIVEN]])
            questions.append(Question(prompt, wanted[GIVEN:], "copy"))
        body = length - len(questions[0]) - 2
        hidden = hide(rng, self.text, body, segments)
        context = np.concatenate([as_tokens([v.begin]), hidden, as_tokens([v.separator])])
        return Sample(context, tuple(questions))
