r"""Boxed answers, and which are right: worked examples."""

import pytest

from kvjax.errors import UserError
from kvjax.tasks import contest_answers
from kvjax.tasks.contest_answers import Expressions, Integers, integer, last_box


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"so \boxed{12}.", "12"),
        (r"first \boxed{1}, then \boxed{ \frac{1}{2} } at last", r"\frac{1}{2}"),
        (r"\boxed{\{1, \{2\}\}}", r"\{1, \{2\}\}"),
        (r"a lone escaped brace \boxed{\left\{ 3 \right.}", r"\left\{ 3 \right."),
        (r"\boxed{7} and one without an end: \boxed{\frac{1}{2", "7"),
        (r"\boxed{\text{it is } \boxed{5}}", r"\text{it is } \boxed{5}"),
        (r"\fbox{8}", "8"),
        (r"\boxed {9}", "9"),
        (r"\boxed{}", ""),
        ("no box, 12", None),
        ("", None),
    ],
)
def test_the_last_box_with_balanced_braces_counts(text, box):
    assert last_box(text) == box


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("33", 33), ("033", 33), ("000", 0), ("33.", 33), ("33.0", 33), ("$33$", 33), (r"\,33\;", 33)),
        *((r"\text{33}", 33), (r"\mathbf{033}", 33), (r"\boxed{33}", 33), ("m + n = 33", 33)),
        *(("x = 5, y = 33", None), ("9" * 5000, None)),
        *((r"33^\circ", 33), (r"33^{\circ}", 33), (r"\left(33\right)", None), ("1000", 1000)),
        *(("-33", None), ("3 3", None), ("33.5", None), (r"\frac{66}{2}", None), ("11, 22", None)),
        *(("", None), ("thirty-three", None), ("33 or 34", None)),
    ],
)
def test_aime_s_answers_are_integers(text, value):
    assert integer(text) == value


@pytest.mark.parametrize(
    ("said", "right"),
    [
        *((said, True) for said in ("33", "033", "33.0", r"\boxed{33}", "m + n = 33", "(33)", r"\{33\}")),
        *(
            (said, True)
            for said in (r"\frac{66}{2}", r"\dfrac{66}{2}", "66/2", r"3\cdot 11", "5^2+8", "4!+9")
        ),
        *((said, True) for said in (r"33\text{ cm}", r"33\ \text{units}", r"33^\circ", r"\textbf{(B)}\ 33")),
        *((said, False) for said in ("34", "-33", "33.5", "3 3", "11, 22", "33, 34", "", "thirty-three")),
        *(
            (said, False)
            for said in (r"\frac{67}{2}", r"\frac{66}{", "x = 5, y = 33", "33 or 34", "9" * 5000)
        ),
    ],
)
def test_aime_s_answers_are_right_as_any_expression_of_their_value(said, right):
    """As MathArena's parser grades them, which drops units and evaluates."""
    pytest.importorskip("math_verify")
    assert Integers()(said, "033") == right


@pytest.mark.thorough
def test_a_tower_of_powers_is_given_up():
    pytest.importorskip("math_verify")
    assert not Integers()(r"10^{10^{10}}", "33")


def test_what_aime_can_ask_for():
    pytest.importorskip("math_verify")
    grader = Integers()
    for true, valid in (
        ("0", True),
        ("073", True),
        ("999", True),
        ("1000", False),
        ("x", False),
        ("", False),
    ):
        assert grader.valid(true) == valid


FRACTIONS = r"\frac{-1+\sqrt{17}}{2}, \frac{-1-\sqrt{17}}{2}"


@pytest.mark.parametrize(
    ("true", "said", "right"),
    [
        (r"\frac{1}{576}", "1/576", True),
        (r"\frac{1}{576}", r"\dfrac{2}{1152}", True),
        (r"\frac{1}{576}", r"\frac{1}{575}", False),
        (r"1-\frac{2}{\pi}", r"\frac{\pi-2}{\pi}", True),
        (r"8 \sqrt{10}", r"\sqrt{640}", True),
        (r"2^{25} \cdot 26!", r"26! \cdot 2^{25}", True),
        (r"2^{25} \cdot 26!", r"2^{26} \cdot 26!", False),
        (FRACTIONS, r"\frac{-1-\sqrt{17}}{2}, \frac{-1+\sqrt{17}}{2}", True),
        (FRACTIONS, r"\frac{-1+\sqrt{17}}{2}", False),
        (r"\{1, 2, 3\}", r"\{3, 1, 2\}", True),
        (r"\{1, 2, 3\}", r"\{1, 2\}", False),
        ("(1, 2)", "(1, 2)", True),
        ("(1, 2)", "(2, 1)", False),
        ("103", "103", True),
        ("103", "x = 103", True),
        ("103", "104", False),
        ("103", "", False),
        ("103", r"\frac{", False),
        ("103", "no idea", False),
    ],
)
def test_hmmt_s_answers_are_expressions(true, said, right):
    pytest.importorskip("math_verify")
    grader = Expressions()
    assert grader.valid(true)
    assert grader(said, true) == right


def test_expressions_need_math_verify(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(contest_answers.importlib, "import_module", missing)
    with pytest.raises(UserError, match=r"which math-verify compares: pip install 'kvjax\[math\]'"):
        Expressions()
