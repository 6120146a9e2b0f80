"""Tests of gates at their exported τ, for each λ, and with a searched τ."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

from kvjax.builtin import builtin_model
from kvjax.errors import UserError
from kvjax.evaluate import run
from kvjax.evaluate.__main__ import main
from kvjax.evaluate.calibrated import CLOSE, TauSearch, nearest_gates
from kvjax.evaluate.config import parse
from kvjax.evaluate.gates import gates_by_lambda, most_selective
from kvjax.evaluate.measuring import measure
from kvjax.evaluate.sized_tasks import sized_tasks
from kvjax.evaluate.sizing import Sizing, known_orders
from kvjax.models import load_model
from kvjax.policies import make_policy
from kvjax.policies.admission.wgkv import save_gates
from tests.checkpoints.torch_files import write_torch
from tests.evaluate import whole_run
from tests.policies.admission.wgkv.published import published_arrays
from tests.policies.eviction.fast_kvzip.published import write_published
from tests.tiny_models import tiny_gates, tiny_model

pytestmark = pytest.mark.slow

SMALL = [*whole_run.SMALL, "--budgets", "0.3", "0.8", "--tasks", "needle"]
EXPORTED = {"large": (0.02, 0.3), "small": (0.16, 0.9)}
"""λ and τ of two sets of gates."""
RATES = {"large": 0.9, "small": 0.4}
"""The admission rate in the description of each set of gates."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return the folder that holds both sets of gates."""
    parent, model = tmp_path_factory.mktemp("gates"), load_model(builtin_model("test_model"))
    for name, (weight, tau) in EXPORTED.items():
        rate = np.full((2, 4), RATES[name]).tolist()
        described = {"tau": tau, "window": 4, "rate": rate, "lambda": weight}
        save_gates(parent / name, tiny_gates(model), described)
    return parent


@pytest.fixture(scope="module")
def arguments(folders):
    return [*SMALL, "--gates", *(str(folders / name) for name in EXPORTED)]


@pytest.fixture(scope="module")
def evaluated(arguments, tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluated") / "run"
    main([*arguments, "--policies", "full", "wgkv:calibrated", "wgkv", "--out", str(folder)])
    return folder


def results(folder):
    found = map(json.loads, (folder / "results.jsonl").read_text().splitlines())
    return {(result["policy"], result["budget"]): result for result in found}


@pytest.mark.thorough
def test_wgkv_has_a_result_for_each_gates_at_their_exported_tau(evaluated, folders):
    found = results(evaluated)
    assert list(found) == [
        *(("full", 1.0), ("wgkv:calibrated", 0.3), ("wgkv:calibrated", 0.8)),
        *(("wgkv", 0.02), ("wgkv", 0.16)),
    ]
    for name, (weight, tau) in EXPORTED.items():
        result = found["wgkv", weight]
        assert result["gates"] == str(folders / name)
        assert result["tau"] == tau
    sizes = [found["wgkv", weight]["kv_ratio"] for weight, _ in EXPORTED.values()]
    assert sizes[0] > 0.7 > 0.5 > sizes[1]
    assert (found["full", 1.0]["gates"], found["full", 1.0]["tau"]) == (None, None)


@pytest.mark.slow
def test_tau_is_searched_for_the_gates_of_the_nearest_size(evaluated, folders):
    found = results(evaluated)
    small, large = found["wgkv:calibrated", 0.3], found["wgkv:calibrated", 0.8]
    assert (small["gates"], large["gates"]) == (str(folders / "small"), str(folders / "large"))
    for result in (small, large):
        assert result["kv_ratio"] == pytest.approx(result["budget"], rel=0.1)
    # the weights are the same, so a lower threshold keeps more
    assert large["tau"] < small["tau"]


@pytest.mark.parametrize("scores", [(0.75, 0.5), (0.5, 0.75), (0.5, 0.5)], ids=str)
def test_the_better_scoring_of_two_gates_is_compared(scores, arguments, folders, tmp_path, monkeypatch):
    """The gates answer contexts that are neither compared nor used to search τ. On equal scores the nearer ones win."""
    small, large = (str(folders / name) for name in ("small", "large"))
    command = [
        *arguments,
        "--policies",
        "wgkv:calibrated",
        "--budgets",
        "0.3",
        "--out",
        str(tmp_path / "run"),
    ]
    (task,) = sized_tasks(parse(command))
    others = {sample.context.tobytes() for sample in (*task.samples, *task.calibration)}
    given = iter(scores)

    def measure_or_give(model, policy, samples, settings):
        measured = measure(model, policy, samples, settings)
        if samples[0].context.tobytes() in others:
            return measured
        assert not others & {sample.context.tobytes() for sample in samples}
        return dataclasses.replace(measured, score=next(given))

    monkeypatch.setattr(run, "measure", measure_or_give)
    main(command)
    (result,) = results(tmp_path / "run").values()
    best = large if scores[1] > scores[0] else small
    assert result["gates"] == best
    assert (
        result["choice"]
        == f"gates {best} (of {small} {100 * scores[0]:.0f}%, {large} {100 * scores[1]:.0f}%)"
    )
    assert result["choice"] in (tmp_path / "run" / "report.md").read_text()


def test_the_report_states_the_tau_of_each_result(evaluated, folders):
    report, found = (evaluated / "report.md").read_text(), results(evaluated)
    assert "There are two protocols for gates. wgkv:calibrated: τ is searched" in report
    assert "| policy | 0.3 | 0.8 | 90% at |" in report
    assert "\n| wgkv | λ 0.02 | " + f"{folders / 'large'} | 0.3" in report
    exported, searched = found["wgkv", 0.16], found["wgkv:calibrated", 0.3]
    for result, at, how in ((exported, "λ 0.16", "their own"), (searched, "0.3", "searched")):
        tau = f"{result['tau']:.9g}, {how}"
        row = f"| {result['policy']} | {at} | {result['gates']} | {tau} | {result['kv_ratio']:.3f} |"
        assert row in report, row
    assert "wgkv: 90% of the full cache's score at " in report


def test_results_of_replaced_gates_are_refused(evaluated, arguments, folders):
    again = [*arguments, "--policies", "full", "wgkv", "--out", str(evaluated)]
    main(again)
    shutil.copytree(folders / "small", folders / "before")
    model = load_model(builtin_model("test_model"))
    described = json.loads((folders / "small" / "config.json").read_text())
    save_gates(folders / "small", tiny_gates(model, seed=2), described)
    try:
        with pytest.raises(UserError, match="holds results with --gates .* name another folder"):
            main(again)
    finally:
        shutil.rmtree(folders / "small")
        (folders / "before").rename(folders / "small")
    main(again)


def test_gates_are_identified_by_lambda(folders, tmp_path):
    large, small = (str(folders / name) for name in EXPORTED)
    assert gates_by_lambda([large, small]) == {0.02: large, 0.16: small}
    shutil.copytree(large, tmp_path / "copy")
    with pytest.raises(UserError, match=f"--gates {large} and {tmp_path / 'copy'} both have λ 0.02"):
        gates_by_lambda([large, str(tmp_path / "copy")])
    described = json.loads((tmp_path / "copy" / "config.json").read_text())
    del described["lambda"]
    (tmp_path / "copy" / "config.json").write_text(json.dumps(described))
    with pytest.raises(UserError, match="copy: its description has no lambda"):
        gates_by_lambda([large, str(tmp_path / "copy")])
    assert gates_by_lambda([str(tmp_path / "copy")]) == {1.0: str(tmp_path / "copy")}


@pytest.mark.thorough
def test_combined_methods_use_the_most_selective_gates_that_admit_the_budget(arguments, folders, tmp_path):
    large, small = (str(folders / name) for name in EXPORTED)
    # of 104 tokens, the gates keep the window's 4 and 0.4 or 0.9 of the others
    for ratio, right in ((0.3, small), (0.42, small), (0.43, large), (0.9, large), (0.95, large)):
        assert most_selective([large, small], ratio, tokens=104) == right
    unsaid = tmp_path / "unsaid"
    save_gates(unsaid, tiny_gates(load_model(builtin_model("test_model"))), {"tau": 0.5, "window": 4})
    assert most_selective([small, str(unsaid), large], 0.95, tokens=104) == str(unsaid)
    main([*arguments, "--policies", "wgkv+snapkv", "wgkv+quest", "--out", str(tmp_path / "run")])
    found = results(tmp_path / "run")
    taken = {"small": (0.3, 0.9), "large": (0.8, 0.3)}
    for name, (budget, tau) in taken.items():
        for policy in ("wgkv+snapkv", "wgkv+quest"):
            assert found[policy, budget]["gates"] == str(folders / name)
            assert found[policy, budget]["tau"] == tau


def test_gates_that_cannot_meet_a_budget_are_skipped(folders, tmp_path):
    """A window of 60 holds more than three tenths of 126 tokens. This is found before anything is measured."""
    wide = tmp_path / "wide"
    described = {"tau": 0.3, "window": 60, "rate": np.full((2, 4), 0.5).tolist(), "lambda": 0.01}
    save_gates(wide, tiny_gates(load_model(builtin_model("test_model"))), described)
    command = [*SMALL[:-4], "--tasks", "needle", "--policies", "wgkv:calibrated", "--budgets", "0.3"]
    main([*command, "--gates", str(wide), str(folders / "small"), "--out", str(tmp_path / "both")])
    (result,) = results(tmp_path / "both").values()
    assert result["gates"] == str(folders / "small")
    with pytest.raises(UserError, match="does not hold its window of 60"):
        main([*command, "--gates", str(wide), "--out", str(tmp_path / "alone")])
    assert not (tmp_path / "alone" / "results.jsonl").exists()


def test_gates_without_rates_do_not_order_heads(folders, tmp_path):
    model = load_model(builtin_model("test_model"))
    save_gates(tmp_path, tiny_gates(model), {"tau": 0.3, "window": 4})
    sizing = Sizing(model, 0.3, 126, 126, 32, 4, str(tmp_path))
    assert known_orders(sizing) == ({}, 4)
    orders, window = known_orders(dataclasses.replace(sizing, gates=str(folders / "small")))
    assert (list(orders), window) == (["the gates' rates"], 4)


def test_gates_that_admit_exactly_the_budget_are_used(folders):
    large, small = (str(folders / name) for name in EXPORTED)
    assert most_selective([large, small], (4 + 0.4 * 100) / 104, tokens=104) == small


@pytest.mark.thorough
def test_each_budget_uses_its_own_gates(arguments, folders, tmp_path):
    main([*arguments, "--policies", "wgkv", "wgkv+quest", "--out", str(tmp_path / "run")])
    found = results(tmp_path / "run")
    for budget, name in ((0.3, "small"), (0.8, "large")):
        assert found["wgkv+quest", budget]["kv_ratio"] == found["wgkv", EXPORTED[name][0]]["kv_ratio"]


@pytest.mark.thorough
def test_gates_may_be_files_of_the_authors(tmp_path):
    """The layout of a file identifies its method."""
    sizes = {"layers": 2, "kv_heads": 4}
    ours, _ = write_published(tmp_path / "fast.pt", **sizes, group=1, width=64)
    theirs = tmp_path / "write.pt"
    write_torch(theirs, published_arrays(**sizes, head_dim=16, width=32))
    command = [*SMALL, "--gates", str(ours), str(theirs), "--samples", "4", "--out", str(tmp_path / "run")]
    main([*command, "--policies", "fast_kvzip", "--budgets", "0.3"])
    (result,) = results(tmp_path / "run").values()
    assert result["kv_ratio"] == pytest.approx(0.3, abs=0.05)
    with pytest.raises(
        UserError, match="a budget of .* entries of each kv head does not hold its window of 256"
    ):
        main([*command, "--policies", "wgkv:calibrated", "--budgets", "0.3"])
    write_torch(theirs, {"another": [1]})
    with pytest.raises(UserError, match="holds results with --gates .* name another folder"):
        main([*command, "--policies", "fast_kvzip"])
    with pytest.raises(UserError, match="write.pt: these are no WG-KV gates, which have no 'another'"):
        main([*command, "--policies", "fast_kvzip", "--out", str(tmp_path / "other")])


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def test_the_tau_search_meets_the_target_size(model):
    gates = np.random.default_rng(0).beta(0.05, 0.3, 20_000)
    policy = make_policy("wgkv:window=4", model=model, gates=tiny_gates(model))
    tried = []

    def size_of(policy, tried=tried):
        tau = float(policy.admission.tau)
        tried.append(tau)
        return float(0.02 + 0.98 * (gates >= tau).mean())

    search = TauSearch(policy, size_of)
    for ratio in (0.4, 0.05, 0.8, 0.06):
        found = float(search.find(ratio).admission.tau)
        assert 0.02 + 0.98 * (gates >= found).mean() == pytest.approx(ratio, rel=1.1 * CLOSE)
        # as in a run that goes on with this budget
        assert float(TauSearch(policy, lambda p: size_of(p, [])).find(ratio).admission.tau) == found
    assert len(tried) == len(set(tried)) < 30
    with pytest.raises(UserError, match="wgkv keeps at least 0.02. of the entries, got a budget of 0.01"):
        search.find(0.01)


def test_the_two_nearest_gates_that_can_meet_the_ratio_are_used(model):
    policy = make_policy("wgkv:window=4", model=model, gates=tiny_gates(model))

    def search(least, initial):
        """Return a search over gates that keep `initial` of the entries below a τ of 0.5, and `least` above it."""
        return TauSearch(policy, lambda p: initial if float(p.admission.tau) < 0.5 else least)

    searches = {"large": search(0.3, 0.35), "small": search(0.1, 0.9), "none": search(0.0, 0.0)}
    assert list(nearest_gates(searches, 0.35)) == ["large", "small"]
    # the large ones are nearer, but keep too much at any τ
    found = nearest_gates(searches, 0.1)
    assert list(found) == ["small", "none"]
    assert float(found["small"].admission.tau) > 0.5
    with pytest.raises(UserError, match=r"wgkv keeps at least 0\.300"):
        nearest_gates({"large": searches["large"]}, 0.1)
    # the size jumps past the wanted one, so the nearest is taken
    assert float(search(0.3, 0.9).find(0.7).admission.tau) < 0.5
    assert float(search(0.3, 0.9).find(0.4).admission.tau) > 0.5
