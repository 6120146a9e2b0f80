"""Tests that follow CONTRIBUTING's "Adding a method" in a copy of the tree, exactly as printed."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CHECK = """
import numpy as np
import kvjax
from kvjax import inference
from kvjax.builtin import builtin_model
model = kvjax.load_model(builtin_model("test_model"))
for limit in (0.0, 1e9):
    policy = kvjax.make_policy(f"key_norm:limit={limit},window=4", model=model)
    print(*set(kvjax.stats(inference.prefill(model, [np.arange(40)], policy=policy)).entries.flat))
"""


@pytest.fixture(scope="module")
def printed():
    """Return the section's blocks of code, by language."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.split("**Here**")[1].split("**A method that is trained**")[0]
    return dict(re.findall(r"```(\w+)\n(.*?)```", section, re.DOTALL))


@pytest.fixture(scope="module")
def tree(printed, tmp_path_factory):
    """Return a copy of the tree with the method added."""
    copy = tmp_path_factory.mktemp("tree")
    for name in ("kvjax", "pallas_kernels", "tests", "configs"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    (copy / ".jax_cache").symlink_to(ROOT / ".jax_cache")
    path, source = re.fullmatch(r"# (\S+)\n(.*)", printed["python"], re.DOTALL).groups()
    (copy / path).write_text(source, encoding="utf-8")
    patch = ["git", "apply", "-"]
    subprocess.run(patch, cwd=copy, input=printed["diff"], text=True, check=True)
    return copy


def run(tree, *command):
    environment = os.environ | {"PYTHONPATH": str(tree)}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.thorough
def test_printed_commands_pass(printed, tree):
    generate, suite = map(shlex.split, printed["sh"].strip().splitlines())
    assert generate[:2] == ["python", "-m"]
    assert run(tree, *generate[1:]).strip()
    assert suite[0] == "pytest"
    output = run(tree, "-m", *suite, "-p", "no:cacheprovider")
    assert int(re.search(r"(\d+) passed", output)[1]) >= 4
    assert "failed" not in output


@pytest.mark.slow
def test_printed_method_keeps_the_described_entries(tree):
    assert run(tree, "-c", CHECK).split() == ["3", "40"]
