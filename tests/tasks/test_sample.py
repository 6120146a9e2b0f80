"""Test samples: answers' scores, questions that are known in advance, and samples of one question each."""

import dataclasses

import numpy as np

from kvjax.tasks import Question, Sample
from kvjax.tasks.sample import one_question, question_aware, score_agreements


def test_question_aware_contexts_have_all_but_the_last_question_token():
    def question(*ids):
        return Question(np.array(ids, np.int32), np.array([9], np.int32), "")

    sample = Sample(np.array([1, 2], np.int32), (question(3, 4, 5), question(6)))
    one, other = question_aware([sample])
    assert one.context.tolist() == [1, 2, 3, 4]
    assert [q.prompt.tolist() for q in one.questions] == [[5]]
    assert other.context.tolist() == [1, 2]
    assert [q.prompt.tolist() for q in other.questions] == [[6]]
    assert [one.source, other.source] == [0, 0]
    known = question_aware([dataclasses.replace(sample, source=source) for source in (0, 1, 0)])
    assert [aware.source for aware in known] == [0, 0, 1, 1, 0, 0]


def test_one_question_takes_the_questions_in_turn():
    ids = np.array([1], np.int32)
    both = Sample(ids, (Question(ids, ids, "a"), Question(ids, ids, "b")))
    assert [sample.questions[0].kind for sample in one_question([both] * 3)] == ["a", "b", "a"]


def test_answers_are_scored_as_a_whole_and_texts_token_by_token():
    right, other = np.array([3, 4, 5, 6], np.int32), np.array([3, 9, 5, 6], np.int32)
    exact, text = Question(right[:1], right, ""), Question(right[:1], right, "", teacher_forced=True)
    assert [exact.score(right), exact.score(other), exact.score(right[:3])] == [1, 0, 0]
    assert [text.score(right), text.score(other)] == [1, 0.75]
    scored = Question(right[:1], right, "", scorer=lambda tokens: len(tokens) / 8, reserved=7)
    assert scored.score(right) == 0.5
    assert [(q.answer_tokens, len(q)) for q in (exact, scored)] == [(4, 5), (7, 8)]
    assert Sample(right, (exact, scored)).tokens_after_context == 8


def test_only_teacher_forced_questions_are_scored_by_agreement():
    right, reference = np.array([3, 4], np.int32), np.array([3, 9], np.int32)
    both = Question(right[:1], right, "", teacher_forced=True), Question(right[:1], right, "")
    ((text, exact),) = (
        s.questions for s in score_agreements([Sample(right, both)], [[reference, reference]])
    )
    assert [text.score(reference), text.score(right)] == [1, 0.5]
    assert [exact.score(reference), exact.score(right)] == [0, 1]
