"""Test that tasks in the built-in vocabulary repeat exactly, and keep evaluation text out of training."""

import numpy as np
import pytest

from kvjax.errors import UserError
from kvjax.tasks import (
    Copy,
    Needle,
    Recall,
    Text,
    builtin_task,
    builtin_text,
)
from kvjax.tasks.registry import open_task
from kvjax.tasks.suite import Inputs

LENGTHS = (128, 256, 1024)


@pytest.mark.parametrize("kind", [Recall, Needle, Copy, Text], ids=lambda kind: kind.name)
@pytest.mark.parametrize("length", LENGTHS)
def test_samples_are_deterministic_and_keep_their_lengths(kind, length):
    task = builtin_task(kind)
    first, again, other = task.sample(3, length), task.sample(3, length), task.sample(4, length)
    np.testing.assert_array_equal(first.context, again.context)
    assert len(first.questions) == len(again.questions)
    assert len(first.context) == len(other.context)
    assert not np.array_equal(first.context, other.context)
    assert len(first.context) + max(map(len, first.questions)) <= length
    assert first.context.dtype == np.int32


def test_training_and_evaluation_text_share_no_file():
    train, evaluate = builtin_text("train"), builtin_text("evaluate")
    assert min(len(train), len(evaluate)) > 20_000

    def windows(text):
        return {tuple(text[i : i + 64].tolist()) for i in range(0, len(text) - 64, 64)}

    assert not windows(train) & windows(evaluate)


def test_errors_say_what_is_wrong(vocabulary):
    with pytest.raises(UserError, match="unknown task 'recal'; the nearest known: recall"):
        open_task("recal", Inputs("builtin"))
    with pytest.raises(UserError, match="too few"):
        builtin_task(Recall).sample(0, 16)
    with pytest.raises(UserError, match="the text has 5 tokens"):
        Recall(vocabulary, np.zeros(5, np.int32)).sample(0, 512)
