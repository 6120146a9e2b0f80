"""Test chains of variables."""

import re

from kvjax.tasks.ruler import make_ruler_task
from kvjax.tasks.ruler.haystack import PASSAGE


def test_a_chain_of_variables_follows_a_solved_example(builtin):
    task = make_ruler_task("vt", builtin)
    for sample in (task.example(seed, 1500) for seed in range(5)):
        (question,) = sample.questions
        solved, asked = sample.context.split("\n\nThe text below")
        value = re.findall(r"\d{5}", question.text)[0]
        (shown_value,) = set(re.findall(r"\d{5}", solved))
        assert sample.context.count(value) == 1
        shown = re.findall(r"^Set ([A-Z]{3}) = \w+$", solved, re.MULTILINE)
        assert len(set(shown)) == len(shown) == 5
        # the example ends like a right answer to its question
        asks = (question.text + question.answer_prefix).replace(value, shown_value)
        assert solved.endswith(f"\n{asks} {' '.join(shown)}")
        for text, first, names in ((solved, shown_value, shown), (asked, value, question.expected)):
            lines = re.findall(r"^Set (\w+) = (\w+)\n(.*)$", text, re.MULTILINE)
            assert [(name, source) for name, source, _ in lines] == list(
                zip(names, [first, *names], strict=False)
            )
            assert all(after == PASSAGE for *_, after in lines)
        assert [sample.context.count(name) for name in question.expected] == [2, 2, 2, 2, 1]
        assert solved.count(PASSAGE) == 14
