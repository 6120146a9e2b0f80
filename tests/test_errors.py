"""Tests of messages for users: each is one printable line."""

import re

import pytest

from kvjax.errors import UserError, printable, shown, warn


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("two\nlines\tand  spaces", "two lines and spaces"),
        ("a\x1b[31mred\x00\x7f\x9b", r"a\x1b[31mred\x00\x7f\x9b"),
        ("right \u202eto left\u2069 \u200b", r"right \u202eto left\u2069 \u200b"),
        ("half \ud83d", r"half \ud83d"),
        ("Länge λ: 3 × 4 … 文", "Länge λ: 3 × 4 … 文"),
    ],
)
def test_message_is_one_printable_line(text, line):
    assert str(UserError(text)) == line
    assert str(UserError(f"{UserError(text)}")) == line, "cleaning it again changes nothing"
    with pytest.warns(UserWarning, match=f"^{re.escape(line)}$"):
        warn(text)


def test_long_message_keeps_its_beginning_and_end():
    line = str(UserError("begin " + "\x1b" * 100_000 + " end"))
    assert len(line) == 490
    assert line.startswith("begin ")
    assert line.endswith(" end")


def test_values_are_shown_without_control_characters():
    class Odd:
        def __repr__(self):
            return "odd\x1b\n"

    assert shown(Odd()) == r"odd\x1b"
    assert printable("a\x1b\nb") == "a\\x1b\nb"
