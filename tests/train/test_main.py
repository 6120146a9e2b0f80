"""Test `python -m kvjax.train`: its help, and its final output."""

import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest

from kvjax.errors import UserError
from kvjax.mesh import make_mesh
from kvjax.policies import make_policy
from kvjax.train import report
from kvjax.train.__main__ import main, summary
from kvjax.train.recipe import Validation
from kvjax.train.recipes.wgkv import WriteGates
from kvjax.train.reporting import check_report


@pytest.mark.slow
def test_help_imports_little_and_names_every_option():
    shown = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "kvjax.train", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout.startswith("usage: python -m kvjax.train")
    options = "mesh", "config", "model", "data", "lambda", "window", "sequences", "seed", "out", "resume"
    for option in options:
        assert f"--{option}" in shown.stdout
    imported = {line.rpartition("|")[2].strip() for line in shown.stderr.splitlines()}
    # jax and flax come with the recipe, which is one file with its maths
    assert not imported & {"transformers", "grain", "datasets", "matplotlib"}


@pytest.mark.parametrize(("when", "measured"), [({}, True), ({"when": "every", "every": 8}, False)])
def test_a_policy_that_compacts_while_decoding_is_not_compared(when, measured, tmp_path):
    trained = SimpleNamespace(validation=Validation({"admitted": 0.5}, {}, 1), folder=tmp_path)
    text = summary(WriteGates(), trained, make_policy({"h2o": {"entries": 64, **when}}))
    assert ("compare them: " in text) == measured
    assert ("no report, and no comparison: h2o compacts while it decodes" in text) != measured


@pytest.mark.parametrize(
    ("options", "option"), [({"report": "full"}, "--report full"), ({"tasks": ("vt",)}, "--tasks vt")]
)
@pytest.mark.parametrize(
    ("processes", "when", "reason"),
    [
        (2, None, "one process makes it, and this run has 2"),
        (1, "every", "h2o compacts while it decodes, which is not measured"),
    ],
)
def test_an_impossible_report_is_refused_if_requested(options, option, processes, when, reason, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    policy = make_policy({"h2o": {"entries": 64, "when": when, "every": 8}}) if when else None
    with pytest.raises(UserError, match=f"^{option}: there can be no report .{reason}.: leave it out$"):
        check_report(WriteGates(**options), policy)
    assert check_report(WriteGates(), policy) == f"there will be no report: {reason}"
    assert check_report(WriteGates(report="none"), policy) == ""


def test_a_possible_report_is_not_refused():
    assert check_report(WriteGates(report="full"), make_policy("h2o:entries=64")) == ""


def test_a_stopped_report_says_how_to_make_it(monkeypatch, tmp_path):
    output = SimpleNamespace(
        validation=Validation({"admitted": 0.5}, {}, 1),
        folder=tmp_path,
        mesh=make_mesh(),
        params=None,
        model=None,
    )
    monkeypatch.setattr("kvjax.train.run.train", lambda config: output)
    monkeypatch.setattr(WriteGates, "deploy", lambda *_: make_policy("h2o:entries=64"))

    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(report, "report", stopped)
    command = f"python -m kvjax.train --resume --out {tmp_path}"
    with pytest.raises(
        KeyboardInterrupt, match=f"^the run is complete except for its report: {command} makes it$"
    ):
        main(["--out", str(tmp_path / "run")])
