"""Tests of dropped spans: from the drop on, logits are those of dense attention with a mask over the span."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import cache as caches
from kvjax.cache.packed_entries import packed, places
from kvjax.errors import UserError
from kvjax.inference import generate, load_cache, prefill, save_cache
from kvjax.inference.allocation import empty_cache, sizes_of
from kvjax.inference.key_scale import key_scale
from kvjax.inference.triggers import _entries_over
from kvjax.mesh import make_mesh, put, use_mesh
from kvjax.policies import make_policy
from kvjax.sampling_params import SamplingParams
from tests.cache.kept import lists, positions
from tests.inference.cached import LENGTH, TOKENS, run
from tests.inference.delayed import delayed
from tests.inference.dense import dense_logits, logits_over_stored_entries
from tests.policies.captured import pages_are_whole
from tests.tiny_models import sliding_model, tiny_gates, tiny_model

pytestmark = pytest.mark.slow

PAGE, READ, WINDOW = 4, 24, 6
SHORT = SamplingParams(max_new_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def fed(model, policy, cache, start, stop, alone=0, tokens=TOKENS):
    """Return the cache (None: an empty one) after some of the tokens, the last `alone` one by one, and their logits."""
    sizes = [8] * ((stop - start - alone) // 8) + [(stop - start - alone) % 8] + [1] * alone
    out = []
    with use_mesh(model):
        compiled = policy.compile(model)
        if cache is None:
            cache = empty_cache(
                compiled, **sizes_of(model.config), batch=len(tokens), tokens=LENGTH, dtype=jnp.float32,
                page_size=PAGE, capacity=LENGTH + WINDOW + PAGE, key_scale=key_scale(model),
            )  # fmt: skip
        for size in filter(None, sizes):
            part = np.zeros((len(tokens), 8 if size > 1 else 1), np.int32)
            part[:, :size] = tokens[:, start : start + size]
            count = jnp.full(len(tokens), size, jnp.int32)
            cache, logits = run(model, compiled.read, cache, jnp.asarray(part), count)
            out.append(np.asarray(logits)[:, :size])
            start += size
        caches.check(cache, policy.name)
    return cache, np.concatenate(out, 1)


def mask(*drops):
    """Return which tokens are gone for each query, given drops: sequence, start, end and the tokens read before."""
    gone = np.zeros((2, LENGTH + 1, LENGTH), bool)
    for sequence, start, end, read in drops:
        gone[sequence, read:, start:end] = True
    return gone


def gated(model, positions=True, **evicts):
    options = {"tau": 0.5, "window": WINDOW, "positions": positions}
    return make_policy({"wgkv": options} | evicts, model=model, gates=tiny_gates(model))


POLICIES = {
    "full": lambda model: make_policy("full"),
    "windowed": lambda model: make_policy(f"full:window={WINDOW}"),
    "wgkv": gated,
}


@pytest.mark.parametrize("name", ["full", "wgkv", pytest.param("windowed", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("span", [(3, 17), (12, 22), (20, 22), (0, 24)])
def test_no_later_token_sees_a_dropped_span(model, name, span):
    """The local window holds none of the span, its end, all of it, or nothing else. The other sequence drops
    nothing."""
    policy = POLICIES[name](model)
    cache, _ = fed(model, policy, None, 0, READ)
    before, pages = caches.stats(cache), cache.pages.free_count
    other = cache.without(1, *span)
    after = caches.stats(other)
    pages_are_whole(other)
    np.testing.assert_array_equal(after.entries[:, 0], before.entries[:, 0])
    assert after.pages == before.pages - (int(other.pages.free_count[0]) - int(pages[0]))
    assert before.pages - after.pages >= (12 if span[1] - span[0] > 8 else 0)
    want, kept = dense_logits(model, policy, TOKENS, mask((1, *span, READ)))
    other, got = fed(model, policy, other, READ, LENGTH, alone=6)
    assert np.abs(got - want[:, READ:]).max() < 1e-4
    np.testing.assert_array_equal(np.asarray(other.layers.length), kept.sum(-1))
    pages_are_whole(other)


@pytest.mark.parametrize("name", [pytest.param("full", marks=pytest.mark.thorough), "wgkv"])
def test_dropped_spans_may_overlap(model, name):
    """Tokens before the first span are still in the window when the others are dropped."""
    policy = POLICIES[name](model)
    drops = (1, 20, 22, 24), (0, 1, 9, 24), (1, 5, 21, 28), (1, 18, 25, 28), (0, 27, 28, 28)
    cache, _ = fed(model, policy, None, 0, READ)
    for sequence, start, end, read in drops:
        if int(cache.seen[0]) < read:
            cache, _ = fed(model, policy, cache, READ, read, alone=4)
        cache = cache.without(sequence, start, end)
        pages_are_whole(cache)
    want, kept = dense_logits(model, policy, TOKENS, mask(*drops))
    cache, got = fed(model, policy, cache, 28, LENGTH, alone=4)
    assert np.abs(got - want[:, 28:]).max() < 1e-4
    assert positions(cache) == lists(kept)


@pytest.mark.parametrize("name", ["wgkv", pytest.param("full", marks=pytest.mark.thorough)])
def test_sliding_windows_hide_the_dropped_span(tmp_path, name):
    """This holds for a cache that was saved, too, and for one that knows positions only since the drop."""
    model = sliding_model()
    policy, span = POLICIES[name](model), (18, 22)
    other = fed(model, policy, None, 0, READ)[0].without(1, *span)
    save_cache(tmp_path, other, model, policy)
    loaded = load_cache(tmp_path, model, policy, capacity=LENGTH + WINDOW + PAGE)
    assert caches.stats(loaded).entries.tolist() == caches.stats(other).entries.tolist()
    want, _ = dense_logits(model, policy, TOKENS, mask((1, *span, READ)))
    for cache in (other, loaded):
        _, got = fed(model, policy, cache, READ, LENGTH, alone=8)
        assert np.abs(got - want[:, READ:]).max() < 1e-4


@pytest.mark.mesh
def test_a_mesh_drops_the_same():
    batch, span = np.concatenate([TOKENS, TOKENS[:, ::-1]]), (12, 22)
    results = []
    for mesh in (make_mesh(), make_mesh(fsdp=2, tensor=4)):
        with jax.set_mesh(mesh):
            split = tiny_model()
            cache = fed(split, gated(split), None, 0, READ, tokens=batch)[0].without(2, *span)
            cache, got = fed(split, gated(split), cache, READ, LENGTH, alone=8, tokens=batch)
            results.append((np.asarray(cache.layers.length), got))
    (lengths, want), (split_lengths, got) = results
    np.testing.assert_array_equal(split_lengths, lengths)
    assert np.abs(got - want).max() < 1e-4


def rows_of(cache):
    """Return by layer, sequence and head all that is stored of the retained entries and of the window's tokens."""
    with use_mesh(cache):
        arrays = packed(cache)
    length, counted, slots = arrays["length"], np.asarray(cache.counted), cache.window - 1
    in_window, by_row = np.minimum(counted, slots), {}
    of_entry, of_token = (places(x).row for x in (length, np.broadcast_to(in_window[:, None], length.shape)))
    for index, row in enumerate(np.ndindex(length.shape)):
        slot = (counted[row[1]] - in_window[row[1]] + np.arange(in_window[row[1]])) % slots
        stored = {
            x: arrays[x][of_entry == index] for x in arrays if x == "entries" or x.startswith("metadata.")
        }
        local = {x: arrays[x][row][slot] for x in arrays if x == "priority" or x.startswith("numbers.")}
        by_row[row] = stored, local | {"entries": arrays["ring"][of_token == index]}
    return by_row


def assert_bounds_match_keys(cache):
    ring, rows = caches.ring_pages(cache.window, PAGE), rows_of(cache)
    for row, (stored, _) in rows.items():
        keys = stored["entries"][:, : stored["entries"].shape[1] // 2]
        for column in range(-(-len(keys) // PAGE)):
            page_keys = keys[column * PAGE : (column + 1) * PAGE]
            page = int(cache.layers.page_table[(*row, ring + column)])
            want = np.concatenate([page_keys.min(0), (-page_keys).min(0)])
            np.testing.assert_array_equal(cache.pages.bounds[page], want)


@pytest.mark.parametrize("name", ["max_entries", "quest", "int8"])
def test_remaining_entries_keep_their_metadata_and_bounds(model, name):
    """All that is stored of a token goes with it, and the bounds of pages are those of the keys that they hold."""
    model = tiny_model(kv_cache_dtype="int8") if name == "int8" else model
    policies = {
        "int8": make_policy(f"full:window={WINDOW},positions=true"),
        "max_entries": delayed(window=WINDOW, max_entries=9, delay=2),
        "quest": make_policy(f"full:window={WINDOW},positions=true+quest:ratio=0.5"),
    }
    cache, _ = fed(model, policies[name], None, 0, READ)
    start, end = 2, 21 if name == "max_entries" else 22
    other = cache.without(1, start, end)
    before, after = rows_of(cache), rows_of(other)
    for row, parts in before.items():
        for part, remaining, key in zip(
            parts, after[row], ("metadata.position", "numbers.position"), strict=True
        ):
            stays = (part[key] < start) | (part[key] >= end) | (row[1] == 0)
            assert remaining.keys() == part.keys()
            for x in part:
                np.testing.assert_array_equal(remaining[x], part[x][stays])
    if name == "quest":
        assert_bounds_match_keys(other)
    token = jnp.asarray(TOKENS[:, READ])
    if name == "max_entries":
        want = logits_over_stored_entries(model, other, token)
        _, got = fed(model, policies[name], other, READ, READ + 1, alone=1)
        assert np.abs(got[:, 0] - want).max() < 1e-4


@pytest.mark.parametrize("policy", ["knorm:ratio=0.5,positions=true", "wgkv"])
def test_after_a_compaction_the_span_is_found_by_position(model, policy):
    """Heads hold different tokens. Of the span those leave that are there."""
    model = tiny_model(qk_norm=False)
    policy = gated(model, snapkv={"ratio": 0.5, "observed": 4}) if policy == "wgkv" else make_policy(policy)
    cache = prefill(model, TOKENS, policy=policy, page_size=PAGE)
    other = cache.without(1, 7, 30)
    pages_are_whole(other)
    before, after = positions(cache), positions(other)
    for row, held in before.items():
        assert after[row] == [x for x in held if row[1] == 0 or not 7 <= x < 30]
    assert len({tuple(row) for row in after.values()}) > 12
    token = np.array([5, 6])
    with use_mesh(model):
        want = logits_over_stored_entries(model, other, token)
        view, fed_one = policy.compile(model).decode, (jnp.asarray(token[:, None]), jnp.ones(2, jnp.int32))
        _, got = run(model, view, other, *fed_one)
    assert np.abs(np.asarray(got)[:, 0] - want).max() < 1e-4


def test_dropping_in_one_fork_does_not_change_another(model):
    """Pages that both hold stay shared where nothing moved."""
    questions = [TOKENS[0, :5]] * 2
    cache = prefill(model, TOKENS[1:], page_size=PAGE, capacity=3 * LENGTH)
    want = [
        generate(model, questions[:1], SHORT, cache=x).tokens[0] for x in (cache, cache.without(0, 9, 30))
    ]
    with use_mesh(model):
        forks = caches.selected(cache, put(np.zeros(2, np.int32)))
    other = forks.without(1, 9, 30)
    pages_are_whole(other)
    # two pages before the span are shared, and in the second fork five of ten are left
    assert caches.stats(other).pages == 12 * (10 + 5 - 2)
    got = generate(model, questions, SHORT, cache=other).tokens
    np.testing.assert_array_equal(got, want)
    again = generate(model, questions, SHORT, cache=forks).tokens
    np.testing.assert_array_equal(again, [want[0]] * 2)


def test_forks_continue_windows_that_lost_tokens(model):
    policy, questions = gated(model), [TOKENS[0, :5], TOKENS[1, :5]]
    cache = fed(model, policy, None, 0, READ)[0].without(1, 18, 22)
    want = generate(model, questions, SHORT, policy=policy, cache=cache).tokens
    with use_mesh(model):
        forks = caches.selected(cache, put(np.array([1, 0], np.int32)))
    got = generate(model, questions[::-1], SHORT, policy=policy, cache=forks).tokens
    np.testing.assert_array_equal(got, want[::-1])


def test_budgets_count_the_tokens_left_in_the_window(model):
    policy = gated(model, knorm={"entries": 10, "when": "overflow"})
    cache = fed(model, policy, None, 0, READ)[0].without(1, 18, 22)
    held = caches.stats(cache).entries.sum((0, 2))
    np.testing.assert_array_equal(_entries_over(policy, cache, 2), held - 3 * 4 * 10)


@pytest.mark.parametrize(
    ("span", "message"),
    [
        ((2, 0, 3), "sequence must be a whole number of at most 1, got 2"),
        ((1, -1, 3), "start must be a whole number of at least 0, got -1"),
        ((1, 5, 5), "end must be a whole number of at least 6, got 5"),
        ((1, 5, 25), "end must be a whole number of at most 24, got 25"),
    ],
)
def test_invalid_spans_are_refused(model, span, message):
    cache, _ = fed(model, make_policy("full"), None, 0, READ)
    with pytest.raises(UserError, match=message):
        cache.without(*span)


def test_spans_that_cannot_be_dropped_are_refused(model):
    unknown, _ = fed(model, gated(model, positions=False), None, 0, READ)
    with pytest.raises(UserError, match="does not know the positions of its entries"):
        unknown.without(0, 3, 9)
    observed = prefill(model, TOKENS, policy=make_policy("snapkv:ratio=1.0,observed=4,positions=true"))
    with pytest.raises(UserError, match="observes the last 4 of 40 tokens: end must be at most 36, got 37"):
        observed.without(0, 3, 37)
    assert caches.stats(observed.without(0, 3, 36)).entries[0, 0, 0] == LENGTH - 33
    unrated, _ = fed(model, delayed(window=WINDOW, max_entries=9, delay=2), None, 0, READ)
    with pytest.raises(UserError, match="has not rated tokens up to 22 yet"):
        unrated.without(0, 21, 23)
    with pytest.raises(
        UserError, match="policy.*positions is one of True, False, got 3|full: positions is one of"
    ):
        make_policy("full:positions=3")
