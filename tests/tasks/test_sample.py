"""Test samples: answers' scores, questions that are known in advance, and samples of one question each."""

import numpy as np

from kvjax.tasks import Question, Sample
from kvjax.tasks.sample import one_question, question_aware, score_agreements


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


def test_an_answer_is_right_as_a_whole_and_a_text_token_by_token():
    right, other = np.array([3, 4, 5, 6], np.int32), np.array([3, 9, 5, 6], np.int32)
    exact, text = Question(right[:1], right, ""), Question(right[:1], right, "", teacher_forced=True)
    assert [exact.score(right), exact.score(other), exact.score(right[:3])] == [1, 0, 0]
    assert [text.score(right), text.score(other)] == [1, 0.75]
    worth = Question(right[:1], right, "", scorer=lambda tokens: len(tokens) / 8, reserved=7)
    assert worth.score(right) == 0.5
    assert [(q.answer_tokens, len(q)) for q in (exact, worth)] == [(4, 5), (7, 8)]
    assert Sample(right, (exact, worth)).tokens_after_context == 8


def test_a_text_is_held_against_what_was_said_and_an_answer_is_not():
    right, said = np.array([3, 4], np.int32), np.array([3, 9], np.int32)
    both = Question(right[:1], right, "", teacher_forced=True), Question(right[:1], right, "")
    ((text, exact),) = (s.questions for s in score_agreements([Sample(right, both)], [[said, said]]))
    assert [text.score(said), text.score(right)] == [1, 0.5]
    assert [exact.score(said), exact.score(right)] == [0, 1]
