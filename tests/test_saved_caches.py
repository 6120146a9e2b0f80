"""Tests of contexts that one command saves and others continue."""

import re

import pytest

from kvjax.builtin import builtin_model
from kvjax.errors import UserError
from kvjax.generate import main

MODEL = ["--model", str(builtin_model("test_model"))]
POLICY = ["--policy", "streaming_llm:window=16,sink=4"]
CONTEXT, QUESTION = "import os\n" * 20, "def main("


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "context"
    main(["--prompt", CONTEXT, *MODEL, *POLICY, "--save-cache", str(folder)])
    return folder


@pytest.mark.slow
def test_saved_context_gives_the_same_answer(saved, capsys):
    options = [*MODEL, *POLICY, "--max-new-tokens", "12"]
    main(["--prompt", QUESTION, *options, "--cache", str(saved)])
    asked = capsys.readouterr()
    main(["--prompt", CONTEXT + QUESTION, *options])
    assert asked.out == capsys.readouterr().out != "\n"
    assert re.match(r"streaming_llm: \d+ prompt \+ 12 new tokens; kept", asked.err)


def test_saving_prints_one_line(tmp_path, capsys):
    main(["--prompt", CONTEXT, *MODEL, *POLICY, "--save-cache", str(tmp_path / "it")])
    (line,) = capsys.readouterr().err.splitlines()
    pattern = (
        r"streaming_llm: (\d+) tokens, kept 19 entries a kv head \(\d+%\), 0\.\d\d MiB saved; --cache .*"
    )
    assert re.fullmatch(pattern, line)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--cache", "nowhere"], "nowhere: no cache is saved here"),
        (
            ["--cache", "a", "--save-cache", "b"],
            "give either --cache, to continue a context, or --save-cache",
        ),
        (["--cache", "a", "--page-size", "8"], "--page-size is for a new cache"),
    ],
)
def test_mistakes_raise_one_line(args, message):
    with pytest.raises(UserError, match=message):
        main(["--prompt", QUESTION, *MODEL, *args])


def test_another_policy_is_refused(saved):
    with pytest.raises(UserError, match="the cache has window 16, policy full has 1"):
        main(["--prompt", QUESTION, *MODEL, "--cache", str(saved)])


def test_folder_with_other_files_is_refused_before_loading(tmp_path, monkeypatch):
    (tmp_path / "thesis.txt").write_text("")
    monkeypatch.setattr("kvjax.models.load_model", lambda *_, **__: pytest.fail("the model was read"))
    with pytest.raises(UserError, match="holds no saved cache: name another folder"):
        main(["--prompt", CONTEXT, *MODEL, *POLICY, "--save-cache", str(tmp_path)])
