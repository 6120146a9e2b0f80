"""Tests of the package's public names, commands and reprs."""

import importlib.util
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvjax
from kvjax import inference
from kvjax.__main__ import COMMANDS
from kvjax.builtin import builtin_model
from kvjax.policies import POLICIES
from kvjax.policies.registry import WRAPPERS
from kvjax.sampling_params import SamplingParams


def test_importing_the_package_imports_nothing_heavy():
    heavy = "'jax', 'numpy', 'flax', 'transformers', 'tyro'"
    code = (
        f"import sys, kvjax; kvjax.__version__; dir(kvjax); print([x for x in ({heavy}) if x in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_loading_a_model_prints_nothing():
    """Neither jax nor transformers mentions packages that are missing here and not needed."""
    code = "import os, kvjax; kvjax.load('builtin'); assert 'TRANSFORMERS_NO_ADVISORY_WARNINGS' not in os.environ"
    # kvjax's commands set these for the whole process, and a test may have run one in this process
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TRANSFORMERS_")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=clean)
    assert done.stdout == done.stderr == ""


def test_every_public_name_can_be_imported():
    for name in kvjax.__all__:
        assert getattr(kvjax, name) is not None
    assert set(kvjax.__all__) <= set(dir(kvjax))


PUBLIC = [name for name in kvjax.__all__ if name != "Output" and not name.endswith("Error")]


@pytest.mark.parametrize("name", PUBLIC)
def test_misspelt_argument_is_refused_with_the_nearest_name(name):
    """The check comes before others, such as that for missing arguments, and `help` shows the signatures."""
    function = getattr(kvjax, name)
    names = [name for name in inspect.signature(function).parameters if name != "arguments"]
    misspelt = {x[:-2] + x[-1] + x[-2]: x for x in names if len(x) > 1} or {"nothing": None}
    for wrong, right in misspelt.items():
        with pytest.raises(kvjax.UserError) as error:
            function(**{wrong: None})
        message = str(error.value)
        assert f" has no argument {wrong!r}; it has {', '.join(names) or 'none'}" in message
        assert right is None or right in message.partition("; the nearest: ")[2].split(", ")


def test_policies_command_lists_every_method():
    done = subprocess.run(
        [sys.executable, "-m", "kvjax.policies"], capture_output=True, text=True, check=True, timeout=120
    )
    lines = done.stdout.splitlines()
    assert {*POLICIES, *WRAPPERS} == {line.partition(":")[0] for line in lines[::2]}
    assert all(line.endswith(".") and len(line) < 180 for line in lines[::2])
    index = next(i for i, line in enumerate(lines) if line.startswith("snapkv:"))
    assert "later queries look at the same entries" in lines[index]
    assert lines[index + 1] == "    observed=64, pool=5, pooling=average, group=mean"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        ([], 0, "  generate  continue a prompt"),
        (["policies"], 0, "snapkv"),
        (["generate", "--help"], 0, "--prompt-file"),
        (
            ["generate", "--policy", "snap-kv", "--prompt", "x"],
            2,
            "unknown method 'snap-kv'; the nearest known: snapkv",
        ),
        (["genrate"], 2, "error: unknown command 'genrate'; the nearest known: generate"),
    ],
)
def test_kvjax_command_runs_every_command(args, code, text):
    """Mistakes in names are found before the model is looked up: it does not exist."""
    nowhere = ["--model", "nowhere"] if args[:1] == ["generate"] and code else []
    done = subprocess.run(
        [sys.executable, "-m", "kvjax", *args, *nowhere],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == code
    assert text in done.stdout + done.stderr
    assert set(COMMANDS) == {name for name in MODULES if importlib.util.find_spec(f"kvjax.{name}")}


def test_every_command_is_documented_and_checked():
    """The package's docstring names them, and the checks of every change run them."""
    root = Path(__file__).parent.parent
    named = re.search(r"Commands: ([\w,\s]+)\.", kvjax.__doc__)[1]
    assert set(re.split(r",\s+", named)) == set(COMMANDS)
    tried = re.search(r"for program in kvjax\.\{([\w,]+)\}", (root / ".ci" / "run").read_text())[1]
    assert set(tried.split(",")) == set(COMMANDS)


MODULES = "generate", "train", "serve", "evaluate", "plan", "export", "convert", "policies"


def test_reprs_of_caches_and_answers_are_short():
    model, tokenizer = kvjax.load(builtin_model("test_model"))
    cache = inference.prefill(model, ["def main("], tokenizer=tokenizer, max_new_tokens=8)
    answer = inference.generate(
        model, ["x"] * 9, SamplingParams(max_new_tokens=4, ignore_eos=True), tokenizer=tokenizer
    )
    assert repr(cache).startswith("Cache(1 sequences, ")
    assert repr(kvjax.stats(cache)).startswith("Stats(1 sequences, 5 of 5 entries a kv head (100%), ")
    assert repr(answer).startswith(
        "Generation(9 answers of 4, 4, 4, 4, 4, 4, 4, 4, … tokens, ended 9 by length,"
    )
    for value in (cache, kvjax.stats(cache), answer):
        assert "array" not in repr(value)
        assert len(repr(value).splitlines()) <= 5
        assert max(map(len, repr(value).splitlines())) <= 160
