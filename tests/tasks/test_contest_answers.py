r"""Test which boxed answers are right, on worked examples."""

import time
from concurrent.futures import ThreadPoolExecutor

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
        (r"so \boxed 42.", "42"),
        (r"$\boxed{41}$, no, $\boxed 42$", "42"),
        (r"\boxed x", None),
        ("no box, 12", None),
        ("", None),
    ],
)
def test_the_last_box_with_balanced_braces_counts(text, box):
    assert last_box(text) == box


def test_the_braces_of_all_boxes_are_matched_in_one_pass():
    started = time.process_time()
    assert last_box(r"\boxed{" * 8000 + "5}") == "5"
    assert time.process_time() - started < 2


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("33", 33), ("033", 33), ("000", 0), ("33.", 33), ("33.0", 33), ("$33$", 33), (r"\,33\;", 33)),
        *(
            (r"\text{33}", 33),
            (r"\mathbf{033}", 33),
            (r"\boxed{33}", 33),
            (r"\boxed 33", 33),
            ("m + n = 33", 33),
        ),
        *(("x = 5, y = 33", None), ("9" * 5000, None)),
        *((r"33^\circ", 33), (r"33^{\circ}", 33), ("1000", 1000), (r"\$33", 33)),
        *((r"33\text{ cm}^2", 33), (r"\textbf{(B)}\ 33", 33), ("(B) 33", 33), (r"\text{(B) }34", 34)),
        *(("-33", None), ("3 3", None), ("33.5", None), ("11, 22", None), (r"32\text{ or }33", None)),
        *(("", None), ("thirty-three", None), ("33 or 34", None)),
    ],
)
def test_aime_answers_are_integers(text, value):
    assert integer(text) == value
    assert Integers()(text, "33") == (value == 33)


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        *(
            (r"\frac{84}{2}", True),
            (r"\dfrac{84}2", True),
            ("84/2", True),
            (r"2\cdot 21", True),
            ("6^2+6", True),
        ),
        *(
            (r"\sqrt{1764}", True),
            (r"\left(42\right)", True),
            ("21(2)", True),
            (r"\text{(B) }\frac{84}{2}", True),
        ),
        *(
            (r"m+n = 40 + 2", True),
            ("42 cm", True),
            (r"\frac{85}{2}", False),
            ("6^2+7", False),
            ("40 2", False),
        ),
        *(
            ("42.0000001", False),
            (r"\{41, 42\}", False),
            ("42x", False),
            ("1+" * 100 + "1", False),
            (r"\frac{4", False),
        ),
    ],
)
def test_aime_answers_may_be_expressions(answer, right):
    pytest.importorskip("math_verify")
    assert Integers()(answer, "042") == right


@pytest.mark.thorough
def test_a_tower_of_powers_times_out_as_wrong():
    pytest.importorskip("math_verify")
    assert not Integers()("10^{10^{10}}", "42")


def test_without_math_verify_expressions_are_wrong_with_a_warning(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(contest_answers.importlib, "import_module", missing)
    assert Integers()(r"42\text{ cm}", "42")
    with pytest.warns(
        UserWarning, match=r"^AIME answers that are expressions count as wrong, .*'kvjax\[math\]'$"
    ):
        assert not Integers()(r"\frac{84}{2}", "42")


def test_expressions_are_compared_only_in_the_main_thread():
    """math-verify's time limit works only in the main thread."""
    pytest.importorskip("math_verify")
    with ThreadPoolExecutor(1) as pool, pytest.raises(UserError, match="only in the main thread"):
        pool.submit(Integers(), "6^2+6", "42").result()


def test_valid_true_answers_of_aime():
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
    ("true", "answer", "right"),
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
def test_hmmt_answers_are_expressions(true, answer, right):
    pytest.importorskip("math_verify")
    grader = Expressions()
    assert grader.valid(true)
    assert grader(answer, true) == right


def test_expressions_need_math_verify(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(contest_answers.importlib, "import_module", missing)
    with pytest.raises(UserError, match=r"which math-verify compares: pip install 'kvjax\[math\]'"):
        Expressions()
