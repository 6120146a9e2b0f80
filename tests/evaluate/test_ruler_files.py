"""RULER's own data and the question files: how they are read, and what is said of damaged ones."""

import json

import pytest

from kvjax.errors import UserError
from kvjax.evaluate.tasks.ruler import RULER_TASKS, Files, make_ruler_task, published_samples
from tests.evaluate.ruler_inputs import builtin, files, hotpotqa, squad

__all__ = ["builtin", "files"]  # fixtures

PUBLISHED = {
    "index": 3,
    "input": "Some numbers are hidden.\nWhat is hidden?\nfiller filler\nWhat is the number for x in the text?",
    "outputs": ["123", "456"],
    "length": 40,
    "answer_prefix": " The number is",
}


def written(tmp_path, *rows):
    file = tmp_path / "validation.jsonl"
    file.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return file


def test_published_data_is_cut_before_its_question(tmp_path):
    whole = {**PUBLISHED, "input": PUBLISHED["input"] + PUBLISHED["answer_prefix"]}
    bare = {"input": "docs\n\nQuestion: Who?\nAnswer:", "outputs": ["A", "B"], "length": 9}
    one, two, three = published_samples(written(tmp_path, PUBLISHED, whole, bare), "niah_multivalue")
    assert one == two
    assert one.published
    assert one.context == "Some numbers are hidden.\nWhat is hidden?\nfiller filler\n"
    (question,) = one.questions
    assert question.text == "What is the number for x in the text?"
    assert (question.answer_prefix, question.expected) == (" The number is", ("123", "456"))
    assert (question.scoring, question.reserved, question.kind) == ("all", 128, "niah_multivalue")
    assert (three.context, three.questions[0].text) == ("docs\n\n", "Question: Who?\nAnswer:")
    (asked,) = published_samples(written(tmp_path, bare), "qa_1")[0].questions
    assert (asked.scoring, asked.reserved) == ("any", 32)


@pytest.mark.parametrize("text", ["no question", "a\nWhat is it?\n" + "far from the end. " * 100])
def test_published_data_without_a_question_at_its_end_is_not_cut(text, tmp_path):
    (sample,) = published_samples(written(tmp_path, {"input": text, "outputs": ["1"]}), "vt")
    assert not sample.separable
    assert sample.questions[0].text == text


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input": "x", "length": 1}, "line 2 has no field `outputs`, it has input, length"),
        ({"input": "x", "outputs": "1"}, "line 2: expected `outputs` to be a list of strings, got 1"),
        ({"input": 1, "outputs": ["1"]}, "line 2: expected `input` and `answer_prefix` to be strings"),
        ("[1]", r"line 2 is no JSON object, it starts \[1\]"),
        ("{", "line 2 is no JSON object"),
    ],
)
def test_bad_published_lines_are_named(row, message, tmp_path):
    with pytest.raises(UserError, match=message) as error:
        published_samples(written(tmp_path, PUBLISHED, row), "vt")
    assert "\n" not in str(error.value)


def test_errors_say_what_is_wrong(builtin, files, tmp_path):
    with pytest.raises(UserError, match="RULER has no task called 'niah_single'; did you mean niah_single_3"):
        make_ruler_task("niah_single", builtin)
    with pytest.raises(UserError, match="no task called 'x'; did you mean niah_single_1, .*, qa_2"):
        published_samples(tmp_path / "none", "x")
    for name in RULER_TASKS:
        with pytest.raises(UserError, match=rf"{name}: 60 tokens are too few, the shortest .* take \d+"):
            make_ruler_task(name, builtin, files).sample(0, 60)
    short = tmp_path / "short.txt"
    short.write_text("One. Two. Three.")
    with pytest.raises(
        UserError, match=r"niah_single_2: 1500 tokens are too many, \d+ use up all 3 sentences of .*short"
    ):
        make_ruler_task("niah_single_2", builtin, Files(essays=short)).sample(0, 1500)
    with pytest.raises(UserError, match="use up all 150 documents of .*squad.json"):
        make_ruler_task("qa_1", builtin, files).sample(0, 50_000)
    with pytest.raises(UserError, match="give its JSON file as `squad`"):
        make_ruler_task("qa_1", builtin)
    with pytest.raises(UserError, match="give its JSON file as `hotpotqa`"):
        make_ruler_task("qa_2", builtin)
    for content, message in ((b"", "there is no text in it"), (b"\xff\xfe\xfa", "is not UTF-8 text")):
        short.write_bytes(content)
        with pytest.raises(UserError, match=message):
            make_ruler_task("niah_single_2", builtin, Files(essays=short))
    for read in (
        lambda: published_samples(tmp_path / "none", "vt"),
        lambda: (
            make_ruler_task("vt", builtin)
            and make_ruler_task("niah_single_2", builtin, Files(essays=tmp_path / "no"))
        ),
        lambda: make_ruler_task("qa_1", builtin, Files(squad=tmp_path / "none")),
    ):
        with pytest.raises(UserError, match=r"cannot be read \(No such file"):
            read()


def spoil(record, path, change):
    """A record changed at a place in it."""
    *into, last = path
    inner = record
    for step in into:
        inner = inner[step]
    if change is None:
        del inner[last]
    else:
        inner[last] = change
    return record


def refused(tokenizer, folder, data_set, content, message):
    """Content of a data set's file is refused in one line that begins with the file."""
    file = folder / "bad.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(UserError, match=message) as error:
        make_ruler_task({"squad": "qa_1", "hotpotqa": "qa_2"}[data_set], tokenizer, Files(**{data_set: file}))
    assert str(error.value).startswith(str(file))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("path", "change", "message"),
    [
        (["data"], None, "has no field `data`"),
        (["data", 2, "paragraphs"], None, r"data\[2\] has no field `paragraphs`"),
        (
            ["data", 0, "paragraphs", 1, "context"],
            5,
            r"data\[0\].paragraphs\[1\]: expected `context` to be a str, got a int",
        ),
        (["data", 0, "paragraphs", 1, "qas"], None, r"data\[0\].paragraphs\[1\] has no field `qas`"),
        (["data", 0, "paragraphs", 1, "qas", 0, "answers"], None, r"qas\[0\] has no field `answers`"),
        (["data", 0, "paragraphs", 1, "qas", 0, "answers", 0], "A", r"answers\[0\] has no field `text`"),
        (["data"], [], "there is no question with an answer in it"),
    ],
)
def test_missing_fields_of_squad_are_named(path, change, message, builtin, tmp_path):
    refused(builtin, tmp_path, "squad", spoil(squad(), path, change), message)


@pytest.mark.parametrize(
    ("path", "change", "message"),
    [
        ([1, "answer"], None, r"\[1\] has no field `answer`"),
        ([1, "context"], None, r"\[1\] has no field `context`"),
        (
            [1, "context", 0],
            ["title"],
            r"\[1\]: expected `supporting_facts` \[title, sentence\] and `context`",
        ),
        ([1, "context"], [["a", ["b"]]], r"\[1\]: `context` has no document 'acorn 3'"),
        ([1, "supporting_facts"], [], r"\[1\]: `supporting_facts` names no document"),
    ],
)
def test_missing_fields_of_hotpotqa_are_named(path, change, message, builtin, tmp_path):
    refused(builtin, tmp_path, "hotpotqa", spoil(hotpotqa(), path, change), message)


@pytest.mark.parametrize(
    ("content", "data_set", "message"),
    [
        ("{", "squad", "is not JSON"),
        ("[]", "squad", "has no field `data`"),
        ("{}", "hotpotqa", "expected a JSON list of questions"),
        ("[]", "hotpotqa", "there is no question"),
    ],
)
def test_question_files_of_another_kind_are_refused(content, data_set, message, builtin, tmp_path):
    refused(builtin, tmp_path, data_set, content, message)
