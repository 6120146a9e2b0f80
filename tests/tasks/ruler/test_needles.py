"""Test how often each needle occurs, and which are asked for."""

import re

import pytest

from kvjax.tasks.ruler import make_ruler_task
from kvjax.tasks.ruler.needles import join_words


@pytest.mark.parametrize(
    ("name", "keys", "values", "asked"),
    [
        ("niah_single_1", 1, 1, 1),
        ("niah_single_2", 1, 1, 1),
        ("niah_single_3", 1, 1, 1),
        ("niah_multikey_1", 4, 1, 1),
        ("niah_multikey_2", None, 1, 1),
        ("niah_multikey_3", None, 1, 1),
        ("niah_multivalue", 1, 4, 1),
        ("niah_multiquery", 4, 1, 4),
    ],
)
def test_needles_occur_once_and_questions_ask_for_their_values(name, keys, values, asked, builtin):
    word, number, uuid = (
        r"[a-z]+-[a-z]+",
        r"\d{7}",
        r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}",
    )
    key = uuid if name == "niah_multikey_3" else word
    value = uuid if name in ("niah_multikey_3", "niah_single_3") else number
    kind = "UUID" if value == uuid else "number"
    task = make_ruler_task(name, builtin)
    for seed in range(5):
        sample = task.example(seed, 1500)
        (question,) = sample.questions
        found = re.findall(rf"A secret {kind} of ({key}) is ({value})\.", sample.context)
        count = keys or task.units(seed, 1500)
        assert len(found) == count * values == len({v for _, v in found})
        assert len({k for k, _ in found}) == count
        assert all(sample.context.count(v) == 1 for _, v in found)
        assert len(question.expected) == asked * values
        wanted = {k for k, v in found if v in question.expected}
        assert [v for k, v in found if k in wanted] == [v for _, v in found if v in question.expected]
        plural = len(question.expected) > 1
        assert f"secret {kind}{'s' if plural else ''} of " in question.text
        assert sorted(re.findall(key, question.text)) == sorted(wanted)
        if not keys:
            assert sample.context.count("\n") == count + 2  # the context has only needles


def test_words_are_joined():
    assert join_words(["a"]) == "a"
    assert join_words(["a", "b", "c", "d"]) == "a, b, c, and d"
