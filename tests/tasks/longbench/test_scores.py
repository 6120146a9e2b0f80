"""Test those LongBench metrics that no other package computes, against figures computed by hand."""

import pytest

from kvjax.tasks.longbench.scores import (
    best,
    class_share,
    code_line,
    first_line,
    number_share,
    paragraph_share,
)

CLASSES = ["Number of something", "Number", "City", "Human", "Human group"]


@pytest.mark.parametrize(
    ("answer", "true", "score"),
    [
        ("Number of something", "Number of something", 1),
        ("Number of something", "Number", 1 / 2),
        ("City or Human", "City", 1 / 2),
        ("Human group", "Human group", 1),
        ("Human", "Human group", 0),
        ("no idea", "City", 0),
    ],
)
def test_class_share_is_one_over_the_number_of_named_classes(answer, true, score):
    assert class_share(CLASSES)(answer, true) == score


def test_a_class_after_one_that_does_not_count_always_counts():
    """The official scorer removes items from the list over which it iterates. Otherwise Number and Human would not
    count."""
    assert class_share(["Number", "City", "Number of"])("Number of City", "Number of") == 1 / 2
    assert class_share(["A", "A b", "A b c"])("A b c", "A b c") == 1 / 2


def test_shares_of_numbers():
    assert [number_share(text, "7") for text in ("7", "07", "7 of 30, so 7", "", "17")] == [1, 0, 2 / 3, 0, 0]
    assert paragraph_share("Paragraph 3 or 4", "Paragraph 3") == paragraph_share("段落3，4", "段落3") == 1 / 2
    assert paragraph_share("3", "none") == 0


def test_parts_of_an_answer():
    assert [first_line(text) for text in ("\n\na\nb", "a", "", " \na")] == ["a", "a", "", " "]
    answer = "\n# a comment\n```py\nx = 1  // too\n  y = 2\nz"
    assert [code_line(text) for text in (answer, "\na", "# only", "", "a\n\nb")] == [
        "  y = 2",
        "a",
        "",
        "",
        "a",
    ]
    assert best(number_share)("1 2 2", ["1", "2"]) == 2 / 3
