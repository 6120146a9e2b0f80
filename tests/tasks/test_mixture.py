"""Test training sequences: samples in a row, and a stream of all tasks."""

import numpy as np
import pytest

from kvjax.errors import UserError
from kvjax.tasks import (
    Mixture,
    Question,
    Sample,
    builtin_text,
    pack,
)
from kvjax.tasks.mixture import builtin_mixture


def test_pack_puts_questions_after_the_context_and_weighs_answers():
    def ids(*x):
        return np.array(x, np.int32)

    questions = (
        Question(ids(1, 2), ids(3), "x"),
        Question(ids(4), ids(5, 6), "x"),
        Question(ids(7), ids(8), "x"),
    )
    tokens, weights = pack(Sample(ids(9, 9), questions), 9, end=0)
    assert tokens.tolist() == [9, 9, 1, 2, 3, 4, 5, 6, 0]
    assert weights.tolist() == [0, 0, 0, 0, 1, 0, 1, 1, 0]
    with pytest.raises(UserError, match="do not fit into 4"):
        pack(Sample(ids(9, 9), questions), 4, end=0)


def test_the_mixture_is_deterministic_and_weighs_only_answers(vocabulary):
    stream = Mixture(vocabulary, builtin_text("train"))
    seen = set()
    for index in range(40):
        tokens, weights = stream(0, index, 256)
        np.testing.assert_array_equal(tokens, builtin_mixture()(0, index, 256)[0])
        assert tokens.shape == weights.shape == (256,)
        answers = tokens[weights > 0]
        assert (answers < vocabulary.ordinary).all()
        seen.add(len(answers) > 0)
    assert seen == {True, False}
