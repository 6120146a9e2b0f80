"""Tests of exact selection against sorting, with ties, infinities and NaN, and heads split over devices."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax import topk
from kvjax.mesh import BATCH, P, make_mesh, put
from kvjax.mesh import HEADS as SPLIT
from kvjax.policies.budget import Entries, Ratio, Shares, Size, pyramid, whole_entries
from kvjax.topk import top
from pallas_kernels.choose import Target

LAYERS, SEQUENCES, HEADS, ENTRIES = 2, 2, 4, 7
SHAPE = LAYERS, SEQUENCES, HEADS, ENTRIES


@functools.cache
def selector(over, split, ties="first", head_order=None):
    """Return a jitted selection for a mesh; `split` is (tensor, sequence)."""
    mesh, spec = make_mesh(tensor=split[0], sequence=split[1]), (None, BATCH, SPLIT, None)
    chosen = functools.partial(top, over=over, ties=ties, head_order=head_order)
    local = jax.jit(jax.shard_map(chosen, out_specs=P(*spec), mesh=mesh))

    def run(scores, eligible, count):
        with jax.set_mesh(mesh):
            return np.asarray(
                local(put(scores, *spec), put(eligible, *spec), put(count[..., None], None, BATCH))
            )

    return run


def select_by_sorting(scores, eligible, count, over):
    """Return the same selection by sorting; `count` [layers, sequences]."""
    scores = np.where(np.isnan(scores), -np.inf, scores.astype(np.float64))
    # NaN ranks below −inf
    scores = np.where(np.isneginf(scores), -1e300, scores)
    chosen = np.zeros(SHAPE, bool)
    for b in range(SEQUENCES):
        groups = {
            "head": [(np.s_[layer, b, k], count[layer, b]) for layer in range(LAYERS) for k in range(HEADS)],
            "layer": [(np.s_[layer, b], HEADS * count[layer, b]) for layer in range(LAYERS)],
            "model": [(np.s_[:, b], HEADS * count[:, b].sum())],
        }[over]
        for at, places in groups:
            able = eligible[at].reshape(-1)
            order = [i for i in np.argsort(-scores[at].reshape(-1), kind="stable") if able[i]][:places]
            mask = np.zeros(able.size, bool)
            mask[order] = True
            chosen[at] = mask.reshape(chosen[at].shape)
    return chosen


numbers = st.sampled_from([-np.inf, -2.5, -1e-37, -0.0, 0.0, 1e-37, 0.5, 0.5, 3.0, np.inf])
cases = st.tuples(
    st.lists(numbers, min_size=112, max_size=112),
    st.lists(st.booleans(), min_size=112, max_size=112),
    st.lists(st.integers(0, ENTRIES + 2), min_size=4, max_size=4),
)


@pytest.mark.parametrize("split", [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("over", ["head", "layer", "model"])
@settings(max_examples=40, deadline=None)
@given(case=cases)
def test_selection_matches_sorting_with_ties_to_the_earlier(over, split, case):
    scores, eligible, count = case
    scores = np.array(scores, np.float32).reshape(SHAPE)
    eligible, count = np.array(eligible).reshape(SHAPE), np.array(count, np.int32).reshape(LAYERS, SEQUENCES)
    chosen = selector(over, split)(scores, eligible, count)
    np.testing.assert_array_equal(chosen, select_by_sorting(scores, eligible, count, over))


@pytest.mark.parametrize("over", ["layer", "model"])
@settings(max_examples=40, deadline=None)
@given(case=cases)
def test_head_order_does_not_change_the_selection(over, case):
    scores, eligible, count = case
    scores = np.array(scores, np.float32).reshape(SHAPE)
    eligible, count = np.array(eligible).reshape(SHAPE), np.array(count, np.int32).reshape(LAYERS, SEQUENCES)
    order = (2, 0, 3, 1), (1, 3, 0, 2)
    placed = np.arange(LAYERS)[:, None, None], np.arange(SEQUENCES)[:, None], np.array(order)[:, None]
    chosen = selector(over, (2, 2), head_order=order)(scores[placed], eligible[placed], count)
    np.testing.assert_array_equal(chosen, select_by_sorting(scores, eligible, count, over)[placed])


@pytest.mark.parametrize("over", ["head", "layer", "model"])
def test_selection_by_many_bits_matches_sorting(over, monkeypatch):
    monkeypatch.setattr(topk, "target", lambda: Target("gpu", "one that is not here"))
    rng, run = np.random.default_rng(0), selector.__wrapped__(over, (2, 2))
    for _ in range(20):
        scores = rng.choice([-np.inf, -2.5, -1e-37, 0.0, 1e-37, 0.5, 3.0, rng.normal()], SHAPE).astype(
            np.float32
        )
        eligible = rng.random(SHAPE) < 0.8
        count = rng.integers(0, ENTRIES + 2, (LAYERS, SEQUENCES)).astype(np.int32)
        np.testing.assert_array_equal(
            run(scores, eligible, count), select_by_sorting(scores, eligible, count, over)
        )


@pytest.mark.parametrize("split", [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("ties", ["out", "in"])
@pytest.mark.parametrize("over", ["layer", "model"])
@settings(max_examples=40, deadline=None)
@given(case=cases)
def test_ties_in_and_out_keep_or_drop_equal_scores(over, ties, split, case):
    """KVzip's thresholds keep the entries above the lowest selected score, or those not below it. All entries are kept
    if `count` is large enough."""
    scores, eligible, count = case
    scores = np.array(scores, np.float32).reshape(SHAPE)
    eligible, count = np.array(eligible).reshape(SHAPE), np.array(count, np.int32).reshape(LAYERS, SEQUENCES)
    chosen = selector(over, split, ties)(scores, eligible, count)
    for b in range(SEQUENCES):
        parts = [np.s_[:, b]] if over == "model" else [np.s_[layer, b] for layer in range(LAYERS)]
        for part in parts:
            places = HEADS * (count[:, b].sum() if over == "model" else count[part[0], b])
            able, stays = scores[part][eligible[part]], chosen[part][eligible[part]]
            best = np.sort(able)[::-1]
            if places >= able.size:
                wanted = np.ones(able.size, bool)
            elif places == 0:
                wanted = np.zeros(able.size, bool)
            else:
                wanted = able > best[places - 1] if ties == "out" else able >= best[places - 1]
            np.testing.assert_array_equal(stays, wanted)
            assert not chosen[part][~eligible[part]].any()


def test_ties_match_worked_examples():
    """At .3 two of ten scores are above the third best. Where two heads have twelve entries and four places each, the
    four lowest entries are dropped."""
    mesh = make_mesh()

    def chosen(scores, places, ties):
        local = functools.partial(top, over="model", ties=ties)
        with jax.set_mesh(mesh):
            scores = np.asarray(scores, np.float32)[None, None]
            return np.asarray(jax.shard_map(local, out_specs=P())(scores, scores > -1, places))[0, 0]

    ten = chosen(np.random.default_rng(0).permutation(10)[None], np.full((1, 1, 1), 3, np.int32), "out")
    assert ten.sum() == 2
    two = np.random.default_rng(1).permutation(12).reshape(2, 6)
    stays = chosen(two, np.full((1, 1, 1), 4, np.int32), "in")
    np.testing.assert_array_equal(stays, two >= 4)


def test_shared_counts_may_differ_by_head():
    """The heads do not divide the number of places."""
    spec, scores = P(None, BATCH, SPLIT), np.random.default_rng(0).random(SHAPE).astype(np.float32)
    places = np.zeros((LAYERS, SEQUENCES, HEADS), np.int32)
    places[0, :, 1], places[1, :, 3] = 4, 5
    with jax.set_mesh(make_mesh(tensor=2, sequence=2)):
        local = functools.partial(top, over="model")
        given = put(scores, *spec), put(np.ones(SHAPE, bool), *spec), put(places, *spec)
        found = np.asarray(jax.jit(jax.shard_map(local, out_specs=spec))(*given))
    np.testing.assert_array_equal(found.sum((0, 2, 3)), 9)


def test_nan_is_the_lowest_score():
    scores = np.full(SHAPE, -np.inf, np.float32)
    scores[..., 2] = np.nan
    chosen = selector("head", (1, 1))(
        scores, np.ones(SHAPE, bool), np.full((LAYERS, SEQUENCES), ENTRIES - 1, np.int32)
    )
    np.testing.assert_array_equal(chosen, np.broadcast_to(np.arange(ENTRIES) != 2, SHAPE))


@pytest.mark.parametrize(
    ("budget", "tokens", "entries"),
    [
        (Ratio(0.29), 100, 29),
        (Ratio(0.7), 10, 7),
        (Ratio(0.3), 7, 2),
        (Ratio(0.01), 7, 1),
        (Ratio(1.0), 7, 7),
        (Entries(50), 40, 40),
        (Entries(30), 40, 30),
        (Size(1000), 40, 10),
        (Size(10), 40, 1),
    ],
)
def test_budgets_are_whole_entries(budget, tokens, entries):
    assert whole_entries(budget.of(tokens, 96)) == entries


def test_best_entries_of_each_head_are_pinned():
    counts = np.array([[5, 10, 1, 100]], np.int32)
    np.testing.assert_array_equal(Shares(pinned=0.2).pins(counts), [[1, 2, 1, 20]])
    np.testing.assert_array_equal(Shares().pins(counts), np.zeros((1, 4)))


def test_pyramid_matches_a_worked_example():
    """The example is PyramidKV with 32 layers, 32768 tokens, 30% kept, β 20 and window 64, by kvpress's formula."""
    budgets = pyramid(0.3 * 32768, 32768, 32, 64, 20.0)
    low = 0.3 * 32768 / 20
    assert (budgets[0], budgets[-1]) == (round(2 * 0.3 * 32768 - low), round(low))
    assert abs(np.mean(budgets) - 0.3 * 32768) < 1
    assert pyramid(0.5 * 100, 100, 4, 64, 20.0) == [50] * 4
