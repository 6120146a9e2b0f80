"""Test the errors for damaged files of SQuAD and HotpotQA."""

import json

import pytest

from kvjax.errors import UserError
from kvjax.tasks.ruler import make_ruler_task
from tests.tasks.ruler.question_data import hotpotqa, squad


def spoil(record, path, change):
    """Return a record that is changed at one place."""
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
    """Check that the content of a dataset's file is refused in one line that begins with the file."""
    file = folder / "bad.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(UserError, match=message) as error:
        make_ruler_task({"squad": "qa_1", "hotpotqa": "qa_2"}[data_set], tokenizer, {data_set: file})
    assert str(error.value).startswith(f"--data {data_set} {file}")


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
def test_errors_name_missing_fields_of_squad(path, change, message, builtin, tmp_path):
    refused(builtin, tmp_path, "squad", spoil(squad(), path, change), message)


@pytest.mark.parametrize(
    ("path", "change", "message"),
    [
        ([1, "answer"], None, r"\[1\] has no field `answer`"),
        ([1, "context"], None, r"\[1\] has no field `context`"),
        (
            [1, "context", 0],
            ["title"],
            r"\[1\]: expected `context` to be a list of \[title, \[sentences\]\]",
        ),
        ([1, "context"], [], r"\[1\]: `context` has no document"),
    ],
)
def test_errors_name_missing_fields_of_hotpotqa(path, change, message, builtin, tmp_path):
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
