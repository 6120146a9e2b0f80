"""Test that records are asked for in three ways, and that each question has one answer."""

import numpy as np
import pytest

from kvjax.tasks import (
    Needle,
    Recall,
    builtin_task,
    builtin_text,
)
from kvjax.tasks.recall import TYPES

LENGTHS = (128, 256, 1024)


def records_in(context, vocabulary):
    """Return `(a, b, c)` after each record mark."""
    return [tuple(context[i + 1 : i + 4].tolist()) for i in np.flatnonzero(context == vocabulary.record)]


@pytest.mark.parametrize("kind", [Recall, Needle], ids=lambda kind: kind.name)
@pytest.mark.parametrize("length", LENGTHS)
def test_record_questions_have_one_answer_in_the_context(kind, length, vocabulary):
    read = {"F": (0, 1), "S": (0, 2), "R": (1, 0)}
    for seed in range(10):
        sample = builtin_task(kind).sample(seed, length)
        records = records_in(sample.context, vocabulary)
        for question in sample.questions:
            mark, key, way = question.prompt.tolist()
            assert mark == vocabulary.question
            at, wanted = read[TYPES[vocabulary.types.index(way)]]
            assert [r[wanted] for r in records if r[at] == key] == question.answer.tolist()


def test_recall_uses_all_question_types_equally_without_repetition(vocabulary):
    for seed in range(10):
        sample = Recall(vocabulary, builtin_text("evaluate"), questions=15).sample(seed, 640)
        assert len({tuple(q.prompt.tolist()) for q in sample.questions}) == 15
        assert sorted(q.kind for q in sample.questions) == sorted(5 * TYPES)


def test_lookalikes_share_a_token_with_a_record_and_have_no_mark(vocabulary, blank_text):
    sample = Recall(vocabulary, blank_text, lookalikes=1.0).sample(0, 512)
    records = records_in(sample.context, vocabulary)
    unmarked = np.array(sample.context)
    for i in np.flatnonzero(sample.context == vocabulary.record):
        unmarked[i : i + 4] = vocabulary.end
    unmarked = unmarked[unmarked < vocabulary.ordinary]
    assert len(unmarked) == 3 * len(records)
    assert np.isin(unmarked, records).sum() == len(records)
