"""Test continuous plain text."""

import numpy as np

from kvjax.tasks import (
    Text,
    builtin_text,
)


def test_text_answers_continue_the_context(vocabulary):
    task = Text(vocabulary, builtin_text("evaluate"))
    sample = task.sample(0, 256)
    (question,) = sample.questions
    whole = np.concatenate([sample.context[1:], question.prompt, question.answer])
    text = builtin_text("evaluate")
    starts = np.flatnonzero(text == whole[0])
    assert any(np.array_equal(text[s : s + len(whole)], whole) for s in starts)
