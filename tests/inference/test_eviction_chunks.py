"""Tests of chunked eviction (PruLong, arXiv:2506.17121, Sec. 4.3), naive and patched, against the published
formulas."""

from dataclasses import replace

import numpy as np
import pytest

from kvjax import cache as caches
from kvjax import inference
from kvjax.policies import make_policy
from kvjax.sampling_params import SamplingParams
from tests.policies import published
from tests.policies.captured import OBSERVED, PAGE, captured_layers, entries, pages_are_whole

CHUNK = 20
LENGTHS = 40, 17


@pytest.fixture(scope="module")
def prompts():
    random = np.random.default_rng(3)
    return [random.permutation(61)[:length] for length in LENGTHS]


def read(model, prompts, *, name="snapkv", **options):
    options = {"ratio": 0.45, "when": "chunk", "chunk": CHUNK} | options
    if name in ("snapkv", "adakv"):
        options |= {"observed": OBSERVED} | ({"adakv": {}} if name == "adakv" else {})
        name = "snapkv"
    policy = make_policy({name: options}, model=model)
    return inference.prefill(model, prompts, policy=policy, page_size=PAGE)


def chunk_score(c, start, stop):
    """Return SnapKV's score of the chunk [start, stop), over its own keys and those of the queries that follow it."""
    behind = c.q.shape[1] - stop
    part = replace(c, **{name: getattr(c, name)[:, start:] for name in ("q", "k")})
    return published.snapkv(part, behind)[:, : stop - start]


@pytest.mark.parametrize("observers", ["own", "prompt"])
def test_chunks_keep_the_entries_of_the_published_formula(model, prompts, observers):
    """This is tested in the first layer, whose keys and queries do not depend on earlier evictions."""
    cache = read(model, prompts, observers=observers)
    pages_are_whole(cache)
    np.testing.assert_array_equal(cache.seen, LENGTHS)
    for b, prompt in enumerate(prompts):
        rows = [[] for _ in range(4)]
        for start in range(0, len(prompt), CHUNK):
            stop = min(start + CHUNK, len(prompt))
            patched = observers == "prompt" and stop < len(prompt)
            tokens = np.concatenate([prompt[:stop], prompt[-OBSERVED:]]) if patched else prompt[:stop]
            c = captured_layers(model, tokens)[0]
            scored = stop if patched else max(stop - OBSERVED, start)
            # a last chunk that is shorter than the window is all kept
            kept = min(max(int(0.45 * (stop - start)), 0 if patched else OBSERVED), stop - start)
            score = np.full((4, stop - start), np.inf)
            if scored > start:
                score[:, : scored - start] = chunk_score(c, start, scored)
            for head, stays in enumerate(published.best(score, kept)):
                rows[head].append(c.k[head, start:stop][stays])
        for head, row in enumerate(rows):
            np.testing.assert_allclose(entries(cache, 0, b, head), np.concatenate(row), atol=1e-4)
        assert (np.asarray(cache.layers.length)[:, b] == sum(map(len, rows[0]))).all()


def scores_of_chunk(name, c, start, stop, held, kept):
    """Return a chunk's scores [k s] by the published formulas, which score only its own keys. `held`: each head's
    earlier keys."""
    own = slice(start, stop)
    part = replace(c, **{name: getattr(c, name)[:, own] for name in ("q", "k")})
    place = np.arange(stop - start)
    if name == "keydiff":
        return published.keydiff(part)
    if name == "adakv":
        score = published.snapkv(part, OBSERVED)
        return np.where(place >= len(place) - OBSERVED, np.inf, score)
    if name == "h2o":
        score = []
        for head, before in enumerate(held):
            keys = np.concatenate([*before, part.k[head]])
            logits = part.q[2 * head : 2 * head + 2] @ keys.T / np.sqrt(8)
            future = np.triu(np.ones((len(place), len(place)), bool), 1)
            hidden = np.pad(future, ((0, 0), (len(keys) - len(place), 0)))
            mass = published.softmax(np.where(hidden, -np.inf, logits)).sum(1).mean(0)
            score.append(mass[-len(place) :])
        return np.where(place >= len(place) - kept // 2, np.inf, np.stack(score))
    # the queries are all so far; a chunk that has no sinks gets them in front, and their scores are dropped
    k, v = (np.concatenate([x[:, : 4 * (start > 0)], x[:, own]], 1) for x in (c.k, c.v))
    behind = replace(c, q=c.q[:, :stop], q_pre=c.q_pre[:, :stop], k=k, v=v)
    score = published.expected_attention(behind)
    return score[:, 4:] if start else np.where(place < 4, np.inf, score)


@pytest.mark.parametrize(
    "name",
    [
        "h2o",
        pytest.param("adakv", marks=pytest.mark.slow),
        *(pytest.param(x, marks=pytest.mark.thorough) for x in ("expected_attention", "keydiff")),
    ],
)
def test_methods_score_each_chunk_by_itself(model, prompts, name):
    """This is tested in the first layer. H2O's queries see what earlier chunks left."""
    cache = read(model, prompts, name=name)
    pages_are_whole(cache)
    for b, prompt in enumerate(prompts):
        c, rows = captured_layers(model, prompt)[0], [[] for _ in range(4)]
        for start in range(0, len(prompt), CHUNK):
            stop = min(start + CHUNK, len(prompt))
            kept = int(0.45 * (stop - start))
            score = scores_of_chunk(name, c, start, stop, rows, kept)
            if name == "adakv":
                score = np.where(published.best(score, max(1, int(0.2 * kept))), np.inf, score)
                stays = published.best(score.reshape(1, -1), 4 * kept).reshape(score.shape)
            else:
                stays = published.best(score, kept)
            for head, mask in enumerate(stays):
                rows[head].append(c.k[head, start:stop][mask])
        for head, row in enumerate(rows):
            np.testing.assert_allclose(entries(cache, 0, b, head), np.concatenate(row), atol=1e-4)


def test_a_chunk_longer_than_the_prompt_keeps_the_same_entries(model, prompts):
    chunked = read(model, prompts, ratio=0.5, chunk=60)
    at_once = read(model, prompts, ratio=0.5, when="prompt", chunk=0)
    np.testing.assert_array_equal(chunked.layers.length, at_once.layers.length)
    for row in np.ndindex(3, 2, 4):
        np.testing.assert_allclose(entries(chunked, *row), entries(at_once, *row), atol=1e-6)


def test_a_ratio_of_1_gives_the_full_cache(model, prompts):
    cache = read(model, prompts, ratio=1.0, observers="prompt")
    for b, prompt in enumerate(prompts):
        for layer, c in enumerate(captured_layers(model, prompt)):
            for head in range(4):
                np.testing.assert_allclose(entries(cache, layer, b, head), c.k[head], atol=1e-4)


@pytest.mark.parametrize(("name", "observers"), [("snapkv", "prompt"), ("expected_attention", "own")])
def test_other_sequences_do_not_change_the_kept_entries(model, prompts, name, observers):
    """The lengths end in different chunks, and expected attention's state adds up over all tokens."""
    mixed, twice = (read(model, rows, name=name, observers=observers) for rows in (prompts, prompts[:1] * 2))
    for layer, head in np.ndindex(3, 4):
        beside_a_short_one = entries(mixed, layer, 0, head)
        np.testing.assert_allclose(beside_a_short_one, entries(twice, layer, 1, head), atol=1e-5)


def test_a_budget_of_entries_bounds_the_cache(model, exact):
    """Every chunk competes with what earlier ones left, and the pool is as large as both."""
    policy = make_policy({"keydiff": {"entries": 9, "when": "chunk", "chunk": CHUNK}}, model=model)
    cache = inference.prefill(model, [np.arange(56)], policy=policy, page_size=PAGE)
    assert (np.asarray(cache.layers.length) == 9).all()
    assert cache.pages.pool.shape[0] <= 12 * 56 / PAGE * 0.8
    pages_are_whole(cache)


@pytest.mark.thorough
def test_chunks_over_an_admission_keep_the_entries_of_one_compaction(model, prompts):
    """This holds where a key's score does not change and the layer does not see what was evicted. The window counts
    towards the budget."""
    admission = {"random": {"rates": np.full((3, 4), 0.6), "window": 5}}
    policies = (
        make_policy(admission | {"knorm": {"when": "chunk", "chunk": CHUNK, "entries": 12}}, model=model),
        make_policy(admission | {"knorm": {"entries": 12}}, model=model),
        make_policy(admission, model=model),
    )
    a, b, everything = (inference.prefill(model, prompts, policy=x, page_size=PAGE) for x in policies)
    pages_are_whole(a)
    assert (np.asarray(everything.layers.length) > 12 - 4).any()
    assert (np.asarray(a.layers.length) <= 12 - 4).all()
    np.testing.assert_array_equal(a.layers.length[0], b.layers.length[0])
    for row in np.ndindex(2, 4):
        np.testing.assert_allclose(entries(a, 0, *row), entries(b, 0, *row), atol=1e-6)
    assert caches.stats(a).pool_pages <= caches.stats(everything).pool_pages


@pytest.mark.thorough
def test_an_answer_may_need_more_pages_than_reading(model, prompts):
    policy = make_policy({"knorm": {"ratio": 0.3, "when": "chunk", "chunk": CHUNK}}, model=model)
    out = inference.generate(
        model, prompts, SamplingParams(max_new_tokens=90, ignore_eos=True), policy=policy, page_size=PAGE
    )
    assert [len(x) for x in out.tokens] == [90, 90]


def test_a_last_chunk_within_the_observed_tokens_is_kept(model):
    prompt = np.random.default_rng(3).permutation(61)[:44]
    policy = make_policy("snapkv:ratio=0.45,observed=6,when=chunk,chunk=20", model=model)
    cache = inference.prefill(model, [prompt], policy=policy, page_size=PAGE)
    assert (np.asarray(cache.layers.length)[:, 0] == 9 + 9 + 4).all()
    keys = captured_layers(model, prompt)[0].k
    for head in range(4):
        np.testing.assert_allclose(entries(cache, 0, 0, head)[-4:], keys[head, -4:], atol=1e-4)
