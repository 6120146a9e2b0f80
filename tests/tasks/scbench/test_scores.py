"""Test SCBench's metrics against figures computed by hand."""

import pytest

from kvjax.errors import UserError
from kvjax.tasks.scbench import code
from kvjax.tasks.scbench.code import finder
from kvjax.tasks.scbench.scores import (
    choice,
    contains_expected,
    first_integer,
    first_number,
    function_match,
    share_contained,
)
from tests.tasks.benchmark_inputs import FUNCTIONS

TRUE = "Rome", "B"


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        *(("B. Rome", 1), ("A. Rome", 0), (" Rome ", 1), ("", 0), ("\n", 0), ("But Oslo", 1)),
        *(("the correct answer is: Rome", 1), ("the answer is B", 1), ("the answer is C, not B", 0)),
        *(("it is option is", 0), ('"the answer: B"', 1), ("so it must be B, or A", 1), ("so A or B", 0)),
        *(("in Rome", 0), ("no idea", 0), ("x AB", 0)),
    ],
)
def test_choices(answer, right):
    assert choice(answer, TRUE) == right


def test_numbers():
    assert [first_number(7)(text, ()) for text in ("7", "7.9", "-7", "17", "", "is 7 or 8")] == [
        1,
        1,
        1,
        0,
        0,
        1,
    ]
    assert [first_number(3.5)(text, ()) for text in ("3.5", "3.50", "3", "3.")] == [1, 1, 0, 0]
    assert [first_integer(text, ("12",)) for text in ("12", "is 12.", "012", "1 2", "")] == [1, 1, 0, 0, 0]


def test_strings():
    assert [contains_expected(text, ("ab-1",)) for text in ('"ab-1"', "AB-1", "")] == [1, 0, 0]
    assert share_contained("x1 and X2", ["X1", "x2", "x3"]) == 0.67


def test_the_most_similar_function_counts_if_it_is_similar_enough():
    pytest.importorskip("tree_sitter_python")
    add, take = FUNCTIONS["add"], FUNCTIONS["take"]
    match = {name: function_match(name, list(FUNCTIONS.items()), "python") for name in FUNCTIONS}

    def scores(answer):
        return match["add"](answer, ()), match["take"](answer, ())

    assert scores(f"```python\n{add}```") == scores(add) == (1, 0)
    assert scores(f"Here:\n```\nimport math\n\n{take}\n{add}```\n") == (0, 1), "the first in the block"
    assert scores(f"```\nno function\n```\n```py\n{add}```") == (1, 0)
    assert scores(f"```python\n{add.replace('* 2', '* 4')}```") == (1, 0), "a BLEU of 0.83"
    assert scores("def add(a, b): return a") == scores("") == (0, 0)


@pytest.mark.parametrize(
    ("language", "text", "function"),
    [
        (
            "python",
            "class A:\n    @deco\n    def f(self):\n        return 1\n",
            "def f(self):\n        return 1",
        ),
        ("java", "class A { int f() { return 1; } int g() { return 2; } }\n", "int f() { return 1; }"),
        ("typescript", "class A { m() {} }\nfunction g(a: number) {}\n", "function g(a: number) {}"),
        ("rust", "impl A { pub fn f(&self) -> i32 { 1 } }\n", "pub fn f(&self) -> i32 { 1 }"),
        ("cpp", "int A::f() { return 1; }\nint g(int a) { return a; }\n", "int g(int a) { return a; }"),
        ("go", "package a\nfunc (x T) M() {}\nfunc F() int { return 1 }\n", "func F() int { return 1 }"),
    ],
)
def test_functions_are_found_in_every_language(language, text, function):
    """The functions are those that tree_sitter_languages 1.10 finds with RepoQA's queries."""
    pytest.importorskip(f"tree_sitter_{language}")
    assert finder(language)(f"It is\n```{language}\n{text}```") == function
    assert finder(language)(text) == text.strip()


def test_deeply_nested_code_is_searched():
    pytest.importorskip("tree_sitter_python")
    code = "x" + " + x" * 3000
    assert finder("python")(f"```\n{code}\n```") == f"{code}\n"


def test_functions_need_tree_sitter(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(name)

    code._parser.cache_clear()
    monkeypatch.setattr(code.importlib, "import_module", missing)
    with pytest.raises(UserError, match=r"scores need tree-sitter, .* pip install 'kvjax\[code\]'"):
        finder("go")
    code._parser.cache_clear()
