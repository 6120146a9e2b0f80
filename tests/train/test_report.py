"""Test the report of a run: rivals of the gates' size, and the written files."""

import json

import numpy as np
import pytest

from kvjax.cache import stats
from kvjax.evaluate.calibrated import PatternSearch
from kvjax.evaluate.config import UNTRAINED
from kvjax.evaluate.teacher_forcing import Outcome
from kvjax.inference import prefill
from kvjax.train import report as report_module
from kvjax.train.recipes.wgkv import WriteGates
from kvjax.train.report import Row, same_size, table, write
from tests.tiny_models import tiny_gates, tiny_model


@pytest.mark.thorough
def test_rivals_have_the_gates_size():
    """Every rival holds as many entries as the gated cache did; the best evictions are among them."""
    model = tiny_model()
    rates = np.linspace(0, 0.6, 12).reshape(3, 4)
    kv_ratio = float((7 + rates.mean() * 293) / 300)
    static = PatternSearch(lambda *pattern: Outcome(1.0, 0.0), {"any": rates}, 300, 8, (3, 4))
    rivals = same_size(model, static, UNTRAINED, kv_ratio=kv_ratio, rates=rates, window=8, seed=0)
    assert {"keydiff", "h2o", "expected_attention"} <= {policy.name for policy, _ in rivals.values()}
    assert rivals["head pattern"][0].name == "head_pattern"
    assert "order any" in rivals["head pattern"][1]
    context = [np.random.default_rng(1).integers(0, 61, 300)] * 2
    for name, (rival, _) in rivals.items():
        if name in UNTRAINED:
            assert rival.schedule is not None
            assert rival.schedule.budget.ratio == pytest.approx(kv_ratio)
            continue
        cache_stats = stats(prefill(model, context, policy=rival))
        assert abs(cache_stats.kv_ratio - kv_ratio) < (0.03 if "random" in name else 2 / 300), name
        if "rates" in name:
            assert np.abs((cache_stats.entries - 7).mean(1) / 293 - rates).max() < 0.12


def test_the_report_is_written(tmp_path):
    rows = [
        Row("full", "recall", 64, 1.0, 1.0, 0.9, 10, {"F": 0.9}),
        Row("wgkv", "recall", 64, 0.2, 0.4, 0.8, 10, {"F": 0.8}),
        Row("head pattern", "recall", 64, 0.2, 0.4, 0.3, 10, {"F": 0.3}, "order one whole"),
    ]
    write(tmp_path, rows, np.full((3, 4), 0.2), {"lambda": 0.3})
    assert "| recall, 64 tokens | wgkv | 0.200 | 0.400 | 80.0% | 10 |" in table(rows)
    assert (
        "head pattern on recall, chosen on other contexts: order one whole"
        in (tmp_path / "report.md").read_text()
    )
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["rows"][1]["kv_ratio"] == 0.2
    for picture in ("tradeoff.png", "heads.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("report", "minimum"), [("default", 192), ("full", 500)])
def test_the_report_has_enough_answers_and_separate_calibration_contexts(
    report, minimum, monkeypatch, tmp_path
):
    tasks_compared = {}

    def compare(model, trained, tasks, **_):
        tasks_compared.update(tasks)
        return [], np.zeros((1, 1))

    monkeypatch.setattr(report_module, "compare", compare)
    monkeypatch.setattr(report_module, "write", lambda *_: None)
    model = tiny_model()
    report_module.report(model, tiny_gates(model), WriteGates(report=report), tmp_path, print)
    for samples, calibration in tasks_compared.values():
        assert sum(len(s.questions) for s in samples) >= minimum
        assert not {s.context.tobytes() for s in samples} & {s.context.tobytes() for s in calibration}


def test_random_rivals_and_evictions_of_the_gates_size():
    """The configured rates and ratios are compared, not the random results."""
    model, rates = tiny_model(), np.linspace(0, 0.6, 12).reshape(3, 4)
    static = PatternSearch(lambda *pattern: Outcome(1.0, 0.0), {"any": rates}, 300, 8, (3, 4))
    rivals = same_size(model, static, UNTRAINED, kv_ratio=0.32, rates=rates, window=8, seed=0)
    np.testing.assert_allclose(rivals["random"][0].admission.rates, (96 - 7) / (300 - 7), rtol=1e-6)
    assert {rivals[name][0].schedule.budget.ratio for name in UNTRAINED} == {0.32}
