"""Tasks are answerable from their context, repeat exactly, and keep evaluation text out of training."""

import numpy as np
import pytest

from kvjax.errors import UserError
from kvjax.tasks import (
    Copy,
    Mixture,
    Needle,
    Question,
    Recall,
    Sample,
    Text,
    builtin_task,
    builtin_text,
    builtin_vocabulary,
    heldout_files,
    mixture,
    pack,
)
from kvjax.tasks.recall import TYPES
from kvjax.tasks.ruler import Files
from kvjax.tasks.sources import Material, source
from kvjax.tasks.vocabulary import Vocabulary

LENGTHS = (128, 256, 1024)


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return builtin_vocabulary()


@pytest.fixture(scope="module")
def blank_text(vocabulary):
    """Filler that no hidden token can be mistaken for."""
    return np.full(2000, vocabulary.end, np.int32)


def records_in(context, vocabulary):
    """`(a, b, c)` after each record mark."""
    return [tuple(context[i + 1 : i + 4].tolist()) for i in np.flatnonzero(context == vocabulary.record)]


@pytest.mark.parametrize("kind", [Recall, Needle, Copy, Text], ids=lambda kind: kind.name)
@pytest.mark.parametrize("length", LENGTHS)
def test_samples_repeat_and_keep_their_lengths(kind, length):
    task = builtin_task(kind)
    first, again, other = task.sample(3, length), task.sample(3, length), task.sample(4, length)
    np.testing.assert_array_equal(first.context, again.context)
    assert len(first.questions) == len(again.questions)
    assert len(first.context) == len(other.context)
    assert not np.array_equal(first.context, other.context)
    assert len(first.context) + max(map(len, first.questions)) <= length
    assert first.context.dtype == np.int32


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


def test_recall_asks_no_record_twice_in_the_same_way_and_all_ways_equally(vocabulary):
    for seed in range(10):
        sample = Recall(vocabulary, builtin_text("evaluate"), questions=15).sample(seed, 640)
        assert len({tuple(q.prompt.tolist()) for q in sample.questions}) == 15
        assert sorted(q.kind for q in sample.questions) == sorted(5 * TYPES)


def test_lookalikes_share_a_token_with_a_record_and_nothing_marks_them(vocabulary, blank_text):
    sample = Recall(vocabulary, blank_text, lookalikes=1.0).sample(0, 512)
    records = records_in(sample.context, vocabulary)
    unmarked = np.array(sample.context)
    for i in np.flatnonzero(sample.context == vocabulary.record):
        unmarked[i : i + 4] = vocabulary.end
    unmarked = unmarked[unmarked < vocabulary.ordinary]
    assert len(unmarked) == 3 * len(records)
    assert np.isin(unmarked, records).sum() == len(records)


def test_copy_takes_the_last_two_tokens_to_tell_what_comes_next(vocabulary, blank_text):
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


def test_needle_is_at_its_depth(vocabulary):
    task = builtin_task(Needle)
    for seed in range(5):
        sample = task.sample(seed, 512)
        (at,) = np.flatnonzero(sample.context == vocabulary.record)
        assert at / len(sample.context) == pytest.approx(float(sample.questions[0].kind), abs=0.02)


def test_text_answers_continue_the_context(vocabulary):
    task = Text(vocabulary, builtin_text("evaluate"))
    sample = task.sample(0, 256)
    (question,) = sample.questions
    whole = np.concatenate([sample.context[1:], question.prompt, question.answer])
    text = builtin_text("evaluate")
    starts = np.flatnonzero(text == whole[0])
    assert any(np.array_equal(text[s : s + len(whole)], whole) for s in starts)


def test_token_bytes_are_the_bytes_of_the_decoded_text(vocabulary):
    sources = list(heldout_files().values())
    ends = len(sources[1::2])
    text = builtin_text("evaluate")
    assert vocabulary.bytes_of(text) == sum(len(s.encode()) for s in sources[1::2])
    assert int((text == vocabulary.end).sum()) == ends


def test_packed_puts_each_question_after_the_context_and_weighs_its_answer():
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


def test_mixture_repeats_fills_its_length_and_weighs_answers_only(vocabulary):
    stream = Mixture(vocabulary, builtin_text("train"))
    seen = set()
    for index in range(40):
        tokens, weights = stream(0, index, 256)
        np.testing.assert_array_equal(tokens, mixture(0, index, 256))
        assert tokens.shape == weights.shape == (256,)
        answers = tokens[weights > 0]
        assert (answers < vocabulary.ordinary).all()
        seen.add(len(answers) > 0)
    assert seen == {True, False}


def test_training_and_evaluation_text_share_no_file():
    train, evaluate = builtin_text("train"), builtin_text("evaluate")
    assert min(len(train), len(evaluate)) > 20_000

    def windows(text):
        return {tuple(text[i : i + 64].tolist()) for i in range(0, len(text) - 64, 64)}

    assert not windows(train) & windows(evaluate)


def test_errors_say_what_is_wrong(vocabulary):
    with pytest.raises(UserError, match="unknown task 'recal'; the nearest known: recall"):
        source("recal", Material("builtin", Files(), None, True))
    with pytest.raises(UserError, match="too few"):
        builtin_task(Recall).sample(0, 16)
    with pytest.raises(UserError, match="the text has 5 tokens"):
        Recall(vocabulary, np.zeros(5, np.int32)).sample(0, 512)
