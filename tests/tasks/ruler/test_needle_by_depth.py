"""Test a needle's depth in text."""

import re

from kvjax.tasks.ruler import make_needle_task


def test_the_needle_is_at_its_depth(smol):
    task = make_needle_task(smol)
    for seed in range(11, 22):
        sample = task.example(seed, 2048)
        (question,) = sample.questions
        assert question.kind == f"{(seed - 11) / 10:g}"
        text = sample.context.partition("\n\n")[2].rstrip()
        (needle,) = re.findall(r"A secret number of \S+ is \d{7}\.", text)
        assert question.expected[0] in needle
        depth = text.index(needle) / (len(text) - len(needle))
        assert abs(depth - float(question.kind)) < 0.03
