"""Tests of static policies: how heads are ordered, and which pattern is chosen on calibration contexts."""

import json

import numpy as np
import pytest

from kvjax.builtin import builtin_model
from kvjax.evaluate.__main__ import main
from kvjax.evaluate.calibrated import (
    SINK,
    SINKS,
    PatternSearch,
    default_contexts,
    measure_heads,
    one_whole,
    orders,
    sink_and_window,
    whole_heads,
)
from kvjax.evaluate.teacher_forcing import Outcome, TeacherForcing
from kvjax.models import load_model
from kvjax.policies.admission.pattern_folder import read_pattern
from kvjax.policies.admission.wgkv import load_gates
from kvjax.tasks import Recall, builtin_task

SHAPE = (2, 3)
IMPORTANCE = np.array([[3.0, -1.0, 0.5], [2.0, 0.0, 9.0]])


class Additive:
    """A model in which each whole head reduces the loss by its importance."""

    def __init__(self):
        self.asked = []

    def __call__(self, whole, sink, window):
        self.asked.append((whole.sum(), sink, window))
        return Outcome(0.0, float(-IMPORTANCE[whole].sum()))


def test_both_measures_recover_the_importance_of_heads():
    run = Additive()
    for weights in orders(run, SHAPE, 16).values():
        np.testing.assert_allclose(weights, (IMPORTANCE + 1) / 10)
    assert run.asked == [(5, SINK, 16)] * 6 + [(1, SINK, 16)] * 6


def test_an_order_is_saved_as_a_pattern_folder_and_measured_once(tmp_path):
    first = orders(Additive(), SHAPE, 16, tmp_path)
    weights, sink, window, *_ = read_pattern(tmp_path / "one_whole")
    np.testing.assert_array_equal(weights, first["one whole"])
    assert (sink, window) == (SINK, 16)
    (tmp_path / "one_streaming" / "config.json").unlink()  # a run that was killed here leaves it like this
    run = Additive()
    again = orders(run, SHAPE, 16, tmp_path)
    assert len(run.asked) == 6
    for name, weights in first.items():
        np.testing.assert_array_equal(again[name], weights)


def test_more_heads_are_measured_on_fewer_contexts():
    """The built-in model has 12 heads, SmolLM2-135M 90 and Llama-3.1-8B 256."""
    assert [default_contexts(heads, 1024) for heads in (12, 90, 256)] == [10, 2, 2]


@pytest.mark.parametrize("entries", [40.0, 150.0, 400.0])
def test_patterns_meet_the_budget(entries):
    """In a context of 1000 tokens, whole heads hold all entries, and the others the sinks and window − 1 tokens."""
    for sink in (x for x in SINKS if x < entries):
        streaming = sink_and_window(SHAPE, entries=entries, sink=sink)
        assert streaming.sink + streaming.window - 1 == entries
        found = whole_heads(IMPORTANCE, entries=entries, context=1000, window=16, sink=sink)
        held = np.where(found.whole, 1000, found.sink + found.window - 1)
        assert held.mean() == pytest.approx(entries, abs=1)
        if found.whole.any():
            assert IMPORTANCE[found.whole].min() > IMPORTANCE[~found.whole].max()


def test_a_narrow_window_allows_a_whole_head():
    """If one of 12 heads is whole, a head takes (1024 + 11 × 7) / 12 = 91.75 entries on average at 4 sinks and a window
    of 4. At a window of 16 it would take 102.75."""
    weights = np.arange(12.0).reshape(3, 4)

    def whole(entries, window):
        return whole_heads(weights, entries=entries, context=1024, window=window, sink=4).whole.sum()

    assert [whole(entries, 4) for entries in (91.5, 92.0)] == [0, 1]
    assert [whole(entries, 16) for entries in (102.5, 103.0)] == [0, 1]
    search = PatternSearch(
        lambda whole, sink, window: Outcome(float(whole.sum()), 0.0), {"own": weights}, 1024, 16, (3, 4)
    )
    pattern, description = search.head_pattern(102.4)
    assert (pattern.whole.sum(), pattern.window) == (1, 16)
    assert description.startswith("1 of 12 heads whole, window 16; ")
    assert search.head_pattern(50.0)[1].startswith("0 of 12 heads whole, ")


def test_the_order_is_chosen_again_at_the_end():
    """One order is worse where two heads are whole, as with the narrowest window, and better where one head is."""

    def run(whole, sink, window):
        alone = whole.sum() == 1
        return Outcome(float(alone) + 0.5 * (bool(whole[1, 2]) == alone), 0.0)

    search = PatternSearch(run, {"bad": -IMPORTANCE, "good": IMPORTANCE}, 1000, 100, SHAPE)
    pattern, description = search.head_pattern(400.0)
    assert pattern.whole[1, 2]
    assert "order good (of bad 100%, good 150%)" in description


def test_order_sinks_and_window_are_chosen_in_turn():
    """The score decides, or the loss if scores are equal."""
    best = whole_heads(IMPORTANCE, entries=400.0, context=1000, window=64, sink=64)

    def run(whole, sink, window):
        right = 0.5 * bool(whole[1, 2]) + 0.25 * (sink == 64)
        return Outcome(right, float(window != best.window))

    search = PatternSearch(run, {"bad": -IMPORTANCE, "good": IMPORTANCE}, 1000, 16, SHAPE)
    pattern, description = search.head_pattern(400.0)
    assert (pattern.sink, pattern.window) == (best.sink, best.window)
    np.testing.assert_array_equal(pattern.whole, best.whole)
    for part in (
        "order good (of bad 25%, good 75%)",
        "sinks 64 (of 4 50%, 16 50%, 64 75%, 128 50%)",
        "window 64",
    ):
        assert part in description
    few, tried = search.sink_and_window(100.0)
    assert (few.sink, few.window) == (64, 37)
    assert "128" not in tried


@pytest.mark.thorough
def test_on_recall_the_measured_order_is_far_better_than_the_gates_rates():
    """At a ratio of 0.141, the order of the gates' rates answers a twentieth, and record heads first answer a third."""
    model, task = load_model("builtin"), builtin_task(Recall)
    rates = np.array(load_gates("builtin", model)[1]["rate"])
    seen, others = ([task.sample(first + i, 512) for i in range(4)] for first in (100, 200))
    run, shape = TeacherForcing(model, seen), rates.shape
    order = measure_heads(one_whole, run, shape, 16)
    search = PatternSearch(run, {"one whole": order, "gates": rates}, 508, 16, shape)
    entries = 0.141 * 508
    chosen, _ = search.head_pattern(entries)
    by_rates = whole_heads(rates, entries=entries, context=508, window=16, sink=4)
    scores = [
        TeacherForcing(model, others)(pattern.whole, pattern.sink, pattern.window).score
        for pattern in (by_rates, chosen)
    ]
    assert scores[0] < 0.15
    assert scores[1] > 0.28


@pytest.mark.thorough
def test_an_evaluation_reports_its_order_and_saves_the_pattern(tmp_path):
    """There are no gates, so sinks, windows and the order come from calibration alone."""
    model, folder = builtin_model("test_model"), tmp_path / "run"
    sizes = ["--context", "126", "--chunk", "32", "--samples", "12", "--batch", "4", "--order-contexts", "2"]
    options = ["--policies", "head_pattern:calibrated", "--budgets", "0.5", "--tasks", "needle"]
    main(["--model", str(model), "--dtype", "float32", *sizes, *options, "--out", str(folder)])
    (result,) = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    assert result["kv_ratio"] == pytest.approx(0.5, abs=0.01)
    assert "one streaming" in result["choice"]
    assert "the gates" not in result["choice"]
    assert result["choice"] in (folder / "report.md").read_text()
    (pattern,) = folder.glob("heads/needle-126-window-16-*/one_whole")
    weights = read_pattern(pattern).weights
    assert sorted(weights.flat)[0] == 0
    assert (weights.shape, weights.max()) == ((2, 4), 1)
