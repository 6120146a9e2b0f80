"""Test that two tokens determine the next one, and a single token does not."""

import numpy as np

from kvjax.tasks import (
    Copy,
)


def test_the_last_two_tokens_determine_the_next_one(vocabulary, blank_text):
    followers = []
    for seed in range(10):
        sample = Copy(vocabulary, blank_text, families=2, passages=4).sample(seed, 512)
        tokens = sample.context.tolist()
        for question in sample.questions:
            passage = [*question.prompt[2:].tolist(), *question.answer.tolist()]
            for x, y, following in zip(passage, passage[1:], passage[2:], strict=False):
                triples = list(zip(tokens, tokens[1:], tokens[2:], strict=False))
                after_pair = {c for a, b, c in triples if (a, b) == (x, y) and c < vocabulary.ordinary}
                assert after_pair == {following}
                followers.append(len({c for _, b, c in triples if b == y and c < vocabulary.ordinary}))
    # A walk's last token has no successor, so a token may have fewer than one a passage.
    assert np.mean(followers) > 3
