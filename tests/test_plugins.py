"""Tests of methods of other packages, with CONTRIBUTING's example package installed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvjax import export
from kvjax.errors import UserError
from kvjax.evaluate.compared import parse_compared
from kvjax.plugins import only_named
from kvjax.policies import make_policy
from kvjax.train import config as train_config
from kvjax.train.recipes import find_recipe

EXAMPLE = Path(__file__).parent / "example_package"
ROOT = EXAMPLE.parents[1]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a function that runs a kvjax command from an empty folder, with the example installed in addition."""
    site, folder = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("empty")
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*install, "--target", str(site), str(EXAMPLE)], check=True, capture_output=True)

    def command(name, *args):
        path = os.pathsep.join([str(ROOT), str(site)])
        done = subprocess.run(
            [sys.executable, "-m", f"kvjax.{name}", *map(str, args)],
            env=os.environ | {"PYTHONPATH": path},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    return command


@pytest.mark.thorough
def test_example_package_trains_generates_and_is_compared(run, tmp_path):
    out = tmp_path / "run"
    few = (
        "--lengths",
        64,
        "--shares",
        1,
        "--batch",
        8,
        "--sequences",
        64,
        "--validation",
        2,
        "--validate-every",
        1,
    )
    run("train", "--method", "learned_value_norm", *few, "--lr", 0.3, "--report", "none", "--out", out)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    losses = [line["validation"]["loss"] for line in lines if "validation" in line]
    assert losses[-1] < losses[0] - 0.002, losses
    gates = out / "parameters"
    assert json.loads((gates / "config.json").read_text())["options"]["lr"] == 0.3

    prompt = "--prompt", "The city of " * 20, "--max-new-tokens", 4
    learned = run("generate", "--policy", "learned_value_norm", "--gates", gates, *prompt)
    assert learned
    everything = run("generate", "--policy", "value_norm:limit=0", *prompt)
    assert everything == run("generate", *prompt)

    asked = "--tasks", "recall", "--context", 256, "--samples", 12, "--gates", gates
    policies = "full", "value_norm:limit=1e9,window=4", "learned_value_norm"
    report = run("evaluate", "--policies", *policies, *asked, "--out", tmp_path / "compared")
    results = [json.loads(x) for x in (tmp_path / "compared" / "results.jsonl").read_text().splitlines()]
    kept = {result["policy"]: result["kv_ratio"] for result in results}
    assert kept["full"] == 1
    assert kept["value_norm:limit=1e9,window=4"] < 0.05
    assert all(name in report for name in policies)


def test_module_names_contain_a_colon():
    """Only the text after the second colon is arguments."""
    assert not parse_compared("tests.probes.head_masks:HeadMasks").takes_budget
    assert not parse_compared("tests.probes.head_masks:HeadMasks:target=0.2,window=4").takes_budget
    with pytest.raises(UserError, match="HeadMasks: got target without a value"):
        parse_compared("tests.probes.head_masks:HeadMasks:target")


def test_unknown_methods_raise_one_line():
    for method, message in (
        ("nosuch", "--method nosuch: known are wgkv"),
        ("no.such:X", "no.such cannot be imported"),
        ("kvjax.errors:Nothing", "kvjax.errors has no Nothing"),
        ("kvjax.errors:UserError", "is not a recipe"),
    ):
        with pytest.raises(UserError, match=message):
            find_recipe(method)
    with pytest.raises(UserError, match="unknown method 'nosuch'"):
        make_policy("nosuch")
    with pytest.raises(UserError, match="a function that makes a policy, or a recipe, got"):
        make_policy("kvjax.plugins:METHODS")


STRANGER = "print('IMPORTED')\nfrom kvjax.train.recipes.wgkv import WriteGates as Own\n"
ENTRY_POINTS = "[kvjax.methods]\nstrange = strange:Own\n[kvjax.policies]\nstrange = strange:Own\n"


@pytest.fixture
def strange(tmp_path, monkeypatch):
    """Yield a run's folder from elsewhere, with a module and entry points of its own. It is the current folder, which
    `python -m` puts on the path."""
    (tmp_path / "strange.py").write_text(STRANGER)
    (tmp_path / "strange-1.0.dist-info").mkdir()
    (tmp_path / "strange-1.0.dist-info" / "METADATA").write_text("Name: strange\nVersion: 1.0\n")
    (tmp_path / "strange-1.0.dist-info" / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("strange", None)


@pytest.mark.parametrize(
    ("method", "message"),
    [("strange:Own", "add --method strange:Own$"), ("strange", "--method strange: known are")],
)
def test_files_cannot_import_modules(method, message, strange):
    (strange / "config.yaml").write_text(f"method: {method}\n")
    for refused in (
        lambda: train_config.parse(["--resume", "--out", "."]),
        lambda: train_config.parse(["--config", "config.yaml", "--out", "new"]),
        lambda: export.main(["."]),
    ):
        with pytest.raises(UserError, match=message):
            refused()
    assert "strange" not in sys.modules


def test_command_line_can_import_a_module(strange):
    (strange / "config.yaml").write_text("method: strange:Own\n")
    option = ["--method", "strange:Own"]
    assert train_config.parse(["--resume", "--out", ".", *option]).method == "strange:Own"
    assert train_config.read_run(Path("."), method="strange:Own").method == "strange:Own"
    (strange / "config.yaml").write_text("method: wgkv\n")
    with pytest.raises(UserError, match="--method strange:Own: the run in . is of --method wgkv"):
        export.main([".", *option])


def test_policies_of_a_file_are_imported_only_if_the_command_line_names_them(strange):
    with only_named(["--policies", "other.strange:Own", "strange:Owner"]):
        for name in ("strange:Own", "strange:Own:x=1", "knorm:strange:Own"):
            with pytest.raises(UserError, match="strange:Own: a module is imported only if the command line"):
                parse_compared(name)
    with only_named(["--policies", "tests.probes.head_masks:HeadMasks:target=0.2"]):
        assert not parse_compared("tests.probes.head_masks:HeadMasks").takes_budget
    assert "strange" not in sys.modules
