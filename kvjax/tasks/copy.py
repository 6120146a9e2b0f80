"""Copying a passage among others that have the same tokens in another order.

The eleven tokens of a family are arranged in a circle, and passage number s of the family walks around it in steps of
s. The circle's length is prime, so a passage visits every token once, a token has a different successor in each passage
of the family, and two consecutive tokens belong to only one passage. The next token therefore depends on the last two
tokens, and one matching head is not enough.
"""

from dataclasses import dataclass

import numpy as np

from kvjax.tasks.hide import hide
from kvjax.tasks.sample import Question, Sample, Tokens, as_tokens
from kvjax.tasks.vocabulary import Vocabulary

PASSAGE = 11
PROMPT_TOKENS = 2


@dataclass(frozen=True)
class Copy:
    """`families` of `passages` passages each (2 to 10), hidden in text, with one question for each family.

    A question has a mark and the first two tokens of a passage. The answer is the other nine tokens.
    """

    vocabulary: Vocabulary
    """The special tokens of the task."""
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
            target = walks[0]
            prompt = as_tokens([v.question, v.copy, *target[:PROMPT_TOKENS]])
            questions.append(Question(prompt, target[PROMPT_TOKENS:], "copy"))
        body = length - len(questions[0]) - 2
        hidden = hide(rng, self.text, body, segments)
        context = np.concatenate([as_tokens([v.begin]), hidden, as_tokens([v.separator])])
        return Sample(context, tuple(questions))
