"""Samples whose question is known, and with one question each."""

import numpy as np

from kvjax.tasks import Question, Sample
from kvjax.tasks.sample import one_question, question_aware


def test_a_question_joins_its_context_but_for_the_token_that_is_asked():
    def question(*ids):
        return Question(np.array(ids, np.int32), np.array([9], np.int32), "")

    sample = Sample(np.array([1, 2], np.int32), (question(3, 4, 5), question(6)))
    one, other = question_aware([sample])
    assert one.context.tolist() == [1, 2, 3, 4]
    assert [q.prompt.tolist() for q in one.questions] == [[5]]
    assert other.context.tolist() == [1, 2]
    assert [q.prompt.tolist() for q in other.questions] == [[6]]


def test_each_context_asks_another_question():
    ids = np.array([1], np.int32)
    both = Sample(ids, (Question(ids, ids, "a"), Question(ids, ids, "b")))
    assert [sample.questions[0].kind for sample in one_question([both] * 3)] == ["a", "b", "a"]
