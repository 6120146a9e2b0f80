"""Tests of `python -m kvjax.generate`."""

import functools
import re
import shlex
import shutil
import subprocess
import sys

import pytest

import kvjax
from kvjax import inference
from kvjax.builtin import builtin_model
from kvjax.cli.launch import run_command
from kvjax.errors import UserError
from kvjax.generate import for_terminal, main
from kvjax.sampling_params import SamplingParams

SMALL = ["--model", str(builtin_model("test_model"))]


def generate(*args: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "kvjax.generate", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
def test_text_is_followed_by_one_line_about_the_cache(capsys):
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


@pytest.mark.slow
def test_stop_text_cuts_the_answer(capsys):
    def answer(*more):
        main(["--prompt", "def main(", *SMALL, "--max-new-tokens", "20", *more])
        return capsys.readouterr().out

    text = answer().removesuffix("\n")
    stop = next(text[i : i + 2] for i in range(4, len(text)) if text.find(text[i : i + 2]) == i)
    assert answer("--stop", stop, "never") == text[: text.find(stop)] + "\n"
    assert answer("--stop", text[-1] + "~") == text + "\n"


@pytest.mark.thorough
def test_answers_are_numbered_and_tokens_have_log_probabilities(capsys):
    """Each answer of `generate` is followed by its log-probability and a line for each token."""
    sampling_options = {"max_new_tokens": 4, "temperature": 1.0, "n": 3}
    options = [
        x for name, value in sampling_options.items() for x in (f"--{name.replace('_', '-')}", str(value))
    ]
    main(["--prompt", "def main(", *SMALL, *options, "--seed", "5", "--logprobs"])
    output = capsys.readouterr()
    model, tokenizer = kvjax.load(builtin_model("test_model"))
    sampling = SamplingParams(seed=5, logprobs=0, **sampling_options)
    found = inference.generate(model, ["def main("], sampling, tokenizer=tokenizer)
    expected = ""
    for index, (text, tokens, logprobs) in enumerate(
        zip(found.texts, found.tokens, found.logprobs, strict=True), 1
    ):
        expected += f"[{index}] {text}\nlog-probability {logprobs.chosen.sum():.4f} of {len(tokens)} tokens\n"
        for token, logprob in zip(tokens, logprobs.chosen, strict=True):
            expected += f"{logprob:9.4f} {token:7} {tokenizer.decode([token])!r}\n"
    assert output.out == expected
    assert "full: 3 × 5 prompt + 12 new tokens; " in output.err


def test_policy_keeps_less_of_a_prompt_file(tmp_path, capsys):
    (tmp_path / "text.py").write_text("def first(self):\n    return 1\n" * 40)
    text = ["--prompt-file", str(tmp_path / "text.py"), "--max-new-tokens", "4", "--temperature", "0.8"]
    main([*text, *SMALL, "--policy", "streaming_llm:window=16,sink=6+quest:tokens=17"])
    summary = capsys.readouterr().err
    kept, seen = map(int, re.search(r"kept (\d+) of (\d+) entries", summary).groups())
    assert kept == 21 < seen
    assert "streaming_llm+quest: " in summary


@pytest.mark.thorough
def test_kvzip_gets_the_models_tokenizer(tmp_path, capsys):
    (tmp_path / "text.py").write_text("def first(self):\n    return 1\n" * 40)
    text = ["--prompt-file", str(tmp_path / "text.py"), "--max-new-tokens", "4"]
    main([*text, "--policy", "kvzip:ratio=0.25,repeated=100,adakv"])
    kept, seen = map(int, re.search(r"kept (\d+) of (\d+) entries", capsys.readouterr().err).groups())
    # the token that begins every text, a quarter of the other tokens of the prompt, and three of the answer
    assert kept == 1 + (seen - 4) // 4 + 3
    # refused before weights are read: this model has none
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(builtin_model() / name, tmp_path)
    with pytest.raises(UserError, match="kvzip: repeated must be a whole number"):
        main([*text, "--model", str(tmp_path), "--policy", "kvzip:repeated=0,ratio=0.25"])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--policy snapkv", "snapkv needs a budget: one of ratio, entries, size, threshold"),
        ("--policy snapkv:ratio=3", "ratio must be a finite number, above 0 and at most 1, got 3"),
        ("--policy snapkv:observed=-2,ratio=.5,adakv", "observed must be a whole number of at least 1"),
        ("--policy random:ratio=.5", "random needs window"),
        ("--policy snapkv --gates builtin", "gates: got 'builtin' for snapkv, expected one method that takes"),
        ("--polcy x", "unknown option --polcy; the nearest known: --policy"),
        ("--policy wgkv --gates /nowhere", "/nowhere holds no gates"),
        ("--policy head_pattern --gates /nowhere", "/nowhere is no head pattern"),
        ("--policy quest:tokens=0", "quest: tokens must be a whole number of at least 1, got 0"),
        ("--temperature -1", "temperature must be a finite number, at least 0, got -1.0"),
        ("--min-p 7", "min_p must be a finite number, at least 0 and at most 1, got 7.0"),
        ("--top-p 0", "top_p must be a finite number, above 0 and at most 1, got 0.0"),
        ("--top-k -2", "top_k must be a whole number of at least 0, got -2"),
        ("--capacity abc", "capacity 'abc': expected entries per kv head (4096), bytes (2GiB) or a share (30%)"),
        ("--capacity 0", "must be a whole number of at least 1, got 0"),
        ("--max-new-tokens 0", "max_new_tokens must be a whole number of at least 1, got 0"),
        ("--page-size 0", "--page-size must be a whole number of at least 1, got 0"),
        ("--seed -1", "seed must be a whole number of at least 0, got -1"),
        ("--n 0", "n must be a whole number of at least 1, got 0"),
        ("--n 3", "n=3 answers at temperature 0 would be alike: give a temperature above 0"),
        ("--stop ''", "stop must be a list of texts, none empty, got ['']"),
        ("--dtype float31", "dtype 'float31' is not supported, only float32, float16, bfloat16"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused_before_the_model_is_looked_up(args, message):
    """The model does not exist, and the message is about the argument."""
    with pytest.raises(UserError) as error:
        main(["--prompt", "x", "--model", "nowhere", *shlex.split(args)])
    assert message in str(error.value)


@pytest.mark.parametrize("mesh", ["sequence=3", "1x3"])
def test_mesh_that_does_not_divide_the_heads_is_refused_before_loading(mesh, monkeypatch):
    monkeypatch.setattr("kvjax.models.load_model", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(UserError, match=r"has size 3, which does not divide the model's kv heads \(4\)"):
        main(["--prompt", "x", "--policy", "head_pattern", "--gates", "builtin:prulong", "--mesh", mesh])


def test_gates_of_another_shape_are_refused_before_loading(monkeypatch):
    monkeypatch.setattr("kvjax.models.load_model", None)
    with pytest.raises(UserError, match="these gates are for"):
        main(["--prompt", "x", *SMALL, "--policy", "wgkv", "--gates", "builtin"])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "give either --prompt or --prompt-file"),
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt-file", "nowhere.txt"], "--prompt-file nowhere.txt: cannot be read (No such file"),
        (
            ["--prompt", "x", "--policy", "full:window=0"],
            "full: window must be a whole number of at least 1, got 0",
        ),
        (["--prompt", "x" * 400, "--capacity", "32"], "policy full needs at least"),
        (
            ["--prompt", "x", "--policy", "full:sink=4"],
            "full has no argument 'sink'; it has window, positions",
        ),
        (["--prompt", "x", "--policy", "full:window=8,window=9"], "full: got window twice"),
    ],
)
def test_mistakes_end_in_one_line(args, message, capsys):
    with pytest.raises(SystemExit) as end:
        run_command(functools.partial(main, [*SMALL, *args]))
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: ")
    assert message in line


@pytest.mark.parametrize("terminal", [True, False])
def test_control_characters_are_escaped_on_a_terminal(terminal, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    answer = "a\tb\n\x1b[31mRED\x07\x9b é"
    shown = "a\tb\n\\x1b[31mRED\\x07\\x9b é"
    assert for_terminal(answer) == (shown if terminal else answer)
