"""`python -m kvjax.generate`, as a person runs it."""

import functools
import re
import subprocess
import sys

import pytest

from kvjax.builtin import builtin_model
from kvjax.command.launch import run_command
from kvjax.generate import main

SMALL = ["--model", str(builtin_model("test_model"))]


def generate(*args: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "kvjax.generate", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_text_comes_first_and_then_one_line_of_what_it_took(capsys):
    done = generate("--prompt", "def main(", *SMALL, "--max-new-tokens", "20")
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.strip().splitlines()
    found = re.fullmatch(
        r"full: (\d+) prompt \+ 20 new tokens; kept (\d+) of (\d+) entries a kv head \(100%\), "
        r"pool [\d.]+ MiB against [\d.]+ MiB full; prefill \d+ tokens/s, decode \d+ tokens/s",
        line,
    )
    assert found, line
    prompt, kept, seen = map(int, found.groups())
    assert kept == seen == prompt + 19
    main(["--prompt", "def main(", *SMALL, "--max-new-tokens", "20"])
    assert capsys.readouterr().out == done.stdout != ""


def test_a_stop_text_cuts_the_answer(capsys):
    def said(*more):
        main(["--prompt", "def main(", *SMALL, "--max-new-tokens", "20", *more])
        return capsys.readouterr().out

    text = said().removesuffix("\n")
    stop = next(text[i : i + 2] for i in range(4, len(text)) if text.find(text[i : i + 2]) == i)
    assert said("--stop", stop, "never") == text[: text.find(stop)] + "\n"
    assert said("--stop", text[-1] + "~") == text + "\n"


def test_a_policy_keeps_less_and_a_file_is_a_prompt(tmp_path, capsys):
    (tmp_path / "text.py").write_text("def first(self):\n    return 1\n" * 40)
    text = ["--prompt-file", str(tmp_path / "text.py"), "--max-new-tokens", "4", "--temperature", "0.8"]
    select = ["--selection", "quest:tokens=17"]
    own = ["--window", "16", "--set", "sink=6"]
    main([*text, *SMALL, "--policy", "streaming_llm", *own, *select])
    told = capsys.readouterr().err
    kept, seen = map(int, re.search(r"kept (\d+) of (\d+) entries", told).groups())
    assert kept == 21 < seen
    assert "streaming_llm+quest: " in told


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ([], "give either --prompt or --prompt-file"),
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt-file", "nowhere.txt"], "--prompt-file nowhere.txt: cannot be read (No such file"),
        (["--prompt", "x", "--window", "0"], "full: window must be a whole number of at least 1, got 0"),
        (["--prompt", "x" * 400, "--capacity", "32"], "policy full needs at least"),
        (["--prompt", "x", "--set", "sink"], "--set sink: expected NAME=VALUE"),
        (["--prompt", "x", "--set", "sink=4"], "full has no argument 'sink'; it has window"),
        (["--prompt", "x", "--set", "sink=4", "--set", "sink=5"], "--set gives sink twice"),
        (["--prompt", "x", "--set", "model=y"], "--set model=…: that is --model here"),
        (["--prompt", "x", "--window", "8", "--set", "window=9"], "--set window=… and --window say the same"),
    ],
)
def test_mistakes_end_in_one_line(args, says, capsys):
    with pytest.raises(SystemExit) as end:
        run_command(functools.partial(main, [*SMALL, *args]))
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: ")
    assert says in line
