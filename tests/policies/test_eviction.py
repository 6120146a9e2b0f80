"""Evictions against the published formulas in float64, from the queries, keys and values of a real prefill."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import cache as caches
from kvjax.errors import UserError
from kvjax.inference import sampling
from kvjax.inference.attention import cached_attention
from kvjax.mesh import make_mesh, use_mesh
from kvjax.models.decoder import scan_layers
from kvjax.policies import make_policy
from tests.policies import published
from tests.policies.captured import OBSERVED, PAGE, captured_layers, entries, pages_are_whole, scored
from tests.policies.conftest import LENGTHS
from tests.policies.published import Captured
from tests.tiny_models import tiny_model


@pytest.fixture(scope="module")
def captured(model, prompts):
    """By layer and sequence what plain causal attention computed."""
    return [captured_layers(model, prompt) for prompt in prompts]


def expected(name, c: Captured, kept: int) -> np.ndarray:
    if name.startswith("snapkv"):
        return getattr(published, name)(c, OBSERVED)
    if name == "r_kv_of_fast_kvzip":
        return published.r_kv(c, balance=0.1)
    if name != "critical_kv":
        return getattr(published, name)(c)
    newest = np.arange(c.k.shape[1]) >= c.k.shape[1] - OBSERVED
    return published.critical(c, published.snapkv(c, OBSERVED), newest, kept)


METHODS = {
    "snapkv": {"observed": OBSERVED},
    "snapkv_of_groups": {"observed": OBSERVED, "group": "max", "pooling": "max"},
    "tova": {},
    "knorm": {},
    "keydiff": {},
    "expected_attention": {},
    "h2o": {},
    "r_kv": {},
    "r_kv_of_fast_kvzip": {"balance": 0.1, "sink": 4},
    "critical_kv": {"observed": OBSERVED},
}
PROTECTED = {
    "snapkv": (0, OBSERVED),
    "snapkv_of_groups": (0, OBSERVED),
    "r_kv": (0, 8),
    "r_kv_of_fast_kvzip": (4, 8),
    "tova": (0, 1),
    "expected_attention": (4, 0),
    "critical_kv": (0, OBSERVED),
}
"""The first and the last entries that always stay."""


@pytest.mark.parametrize("name", METHODS)
def test_scores_and_kept_sets_are_the_published_ones(model, prompts, captured, name):
    policy = make_policy(name.split("_of_")[0], model=model, ratio=0.3, **METHODS[name])
    scores = scored(model, policy, prompts)
    cache = sampling.prefill(model, prompts, policy=policy, page_size=PAGE)
    for b, layers in enumerate(captured):
        length, kept = LENGTHS[b], int(0.3 * LENGTHS[b])
        first, last = (0, kept // 2) if name == "h2o" else PROTECTED.get(name, (0, 0))
        place = np.arange(length)
        free = (place >= first) & (place < length - last)
        for layer, c in enumerate(layers):
            want, got = expected(name, c, kept), scores[layer, b, :, -length:]
            np.testing.assert_allclose(got[:, free], want[:, free], rtol=0, atol=1e-5)
            stays = published.best(np.where(free, want, np.inf), kept)
            for head, (keys, mask) in enumerate(zip(c.k, stays, strict=True)):
                np.testing.assert_allclose(entries(cache, layer, b, head), keys[mask], atol=1e-4)


SHARES = {
    "snapkv": {},
    "pyramidkv": {"pyramid": 2.0},
    "adakv": {},
    "global": {"over": "model"},
}


@pytest.mark.parametrize("name", SHARES)
def test_heads_and_layers_share_the_budget(model, prompts, name):
    method = name if name != "global" else "snapkv"
    policy = make_policy(method, model=model, ratio=0.4, observed=OBSERVED, **SHARES[name])
    cache = sampling.prefill(model, prompts, policy=policy, page_size=PAGE)
    pages_are_whole(cache)
    length = np.asarray(cache.layers.length)
    assert (length >= OBSERVED).all()
    for b, tokens in enumerate(LENGTHS):
        kept, rows = int(0.4 * tokens), length[:, b]
        if name == "snapkv":
            assert (rows == kept).all()
        elif name == "pyramidkv":
            share = 0.4 * tokens
            assert rows[:, 0].tolist() == [round(share + part * share / 2) for part in (1, 0, -1)]
            assert (rows == rows[:, :1]).all()
        elif name == "adakv":
            assert (rows.sum(1) == 4 * kept).all()
            assert (rows >= max(1, int(0.2 * kept))).all()
            assert (rows != kept).any()
        else:
            assert rows.sum() == 12 * kept
            assert len(set(rows.sum(1).tolist())) > 1


def test_everything_kept_is_the_full_cache(model, prompts):
    policy = make_policy("adakv", model=model, ratio=1.0, observed=OBSERVED)
    kept = sampling.prefill(model, prompts, policy=policy, page_size=PAGE)
    full = sampling.prefill(model, prompts, page_size=PAGE)
    for row in np.ndindex(3, 2, 4):
        np.testing.assert_array_equal(entries(kept, *row), entries(full, *row))


@pytest.mark.parametrize(("first", "last"), [(3, 2), (0, 0)])
def test_what_a_person_protects_stays_and_takes_places(model, prompts, captured, first, last):
    """In place of what the method protects: here fewer of its last tokens than it looks back at, or none."""
    policy = make_policy("snapkv", model=model, entries=20, observed=OBSERVED, first=first, last=last)
    cache = sampling.prefill(model, prompts, policy=policy, page_size=PAGE)
    for b, layers in enumerate(captured):
        place = np.arange(LENGTHS[b])
        kept_anyway = (place < first) | (place >= LENGTHS[b] - last)
        for layer, c in enumerate(layers):
            scores = np.where(kept_anyway, np.inf, published.snapkv(c, OBSERVED))
            for head, mask in enumerate(published.best(scores, 20)):
                np.testing.assert_allclose(entries(cache, layer, b, head), c.k[head][mask], atol=1e-4)


def test_what_was_evicted_is_gone_and_nothing_else(model, prompts, captured):
    """The next token sees the entries that stayed and itself."""
    policy = make_policy("knorm", model=model, entries=9)
    cache = sampling.prefill(model, prompts[:1], policy=policy, page_size=PAGE)
    layer, c = 0, captured[0][0]
    stays = published.best(published.knorm(c), 9)
    with use_mesh(model):
        token = jnp.array([[7]])

        def attend(found, pages, xs):
            own, policy = xs
            o, _, pages, own = cached_attention(
                policy, found, pages, own, seen=cache.seen, valid=jnp.ones(1, jnp.int32)
            )
            return o, pages, (found.q, found.k, found.v, o)

        x = model.embed_tokens(token)
        position = cache.seen[:, None]
        ys = scan_layers(model, x, position, attend, cache.pages, (cache.layers, policy.continuing))[2]
    q, k, v, o = (np.asarray(y, np.float64)[layer, 0] for y in ys)
    for head in range(8):
        kv = head // 2
        keys = np.concatenate([c.k[kv][stays[kv]], k[kv]])
        values = np.concatenate([c.v[kv][stays[kv]], v[kv]])
        p = published.softmax(keys @ q[head, 0] / np.sqrt(8))
        np.testing.assert_allclose(o[head, 0], p @ values, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("adakv", {"observed": OBSERVED}, marks=pytest.mark.thorough),
        ("tova", {"over": "model"}),
    ],
)
def test_a_mesh_keeps_the_same(model, prompts, name, options):
    policy = make_policy(name, model=model, ratio=0.3, **options)
    alone = sampling.prefill(model, prompts, policy=policy, page_size=PAGE)
    with jax.set_mesh(make_mesh(fsdp=2, tensor=2)):
        split = tiny_model(qk_norm=False)
        policy = make_policy(name, model=split, ratio=0.3, **options)
        together = sampling.prefill(split, prompts, policy=policy, page_size=PAGE)
    np.testing.assert_array_equal(together.layers.length, alone.layers.length)


def test_a_batch_equals_a_sequence_alone(model, prompts):
    policy = make_policy("adakv", model=model, ratio=0.3, observed=OBSERVED)
    together = sampling.prefill(model, prompts, policy=policy, page_size=PAGE)
    # the shorter one was padded
    alone = sampling.prefill(model, prompts[1:], policy=policy, page_size=PAGE)
    np.testing.assert_array_equal(together.layers.length[:, 1], alone.layers.length[:, 0])
    for layer, head in np.ndindex(3, 4):
        ours, own = entries(together, layer, 1, head), entries(alone, layer, 0, head)
        np.testing.assert_allclose(ours, own, atol=1e-5)


def test_the_pool_shrinks_to_what_stayed(model, prompts):
    """With room for what was announced, and none of it lost: the answer is that of a cache of stated size."""
    options = {"policy": make_policy("keydiff", model=model, ratio=0.25), "page_size": PAGE}
    small = sampling.prefill(model, prompts, **options)
    pages_are_whole(small)
    assert small.pages.pool.shape[0] == caches.rounded_up(caches.stats(small).pages)
    assert (
        caches.stats(small).bytes
        < 0.35 * caches.stats(sampling.prefill(model, prompts, page_size=PAGE)).bytes
    )
    more = {"max_new_tokens": 9, "eos": ()}
    fixed = sampling.sample(model, prompts, capacity=max(LENGTHS) + 12, **options, **more)
    grown = sampling.sample(model, prompts, **options, **more)
    np.testing.assert_array_equal(grown.tokens, fixed.tokens)
    assert grown.stats.bytes < fixed.stats.bytes


def test_freed_pages_are_used_again(model, prompts):
    """The question and the answer fit into what the evicted entries left."""
    policy = make_policy("keydiff", model=model, ratio=0.25)
    cache = sampling.prefill(model, prompts, policy=policy, page_size=PAGE, capacity=max(LENGTHS))
    questions = [prompt[:9] for prompt in prompts]
    out = sampling.sample(model, questions, policy=policy, cache=cache, max_new_tokens=8, eos=())
    assert out.stats.bytes == cache.pages.pool.nbytes
    assert [len(x) for x in out.tokens] == [8, 8]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"name": "snapkv"}, "a budget is one of ratio, entries, size and threshold, got none"),
        (
            {"name": "snapkv", "ratio": 0.5, "entries": 8},
            "a budget is one of ratio, entries, size and threshold, got",
        ),
        (
            {"name": "snapkv", "ratio": 1.5},
            "budget: ratio must be a finite number, above 0 and at most 1, got 1.5",
        ),
        ({"name": "snapkv", "entries": 0}, "entries must be a whole number of at least 1, got 0"),
        ({"name": "snapvk", "ratio": 0.5}, "unknown policy 'snapvk'; the nearest known: snapkv"),
        (
            {"name": "adakv", "eviction": "knrm", "ratio": 0.5},
            "unknown eviction 'knrm'; the nearest known: knorm",
        ),
        (
            {"name": "adakv", "pinned": 2.0, "ratio": 0.5},
            "budget: pinned must be a finite number, at least 0 and at most 1, got 2.0",
        ),
        (
            {"name": "pyramidkv", "pyramid": 0.5, "ratio": 0.5},
            "budget: pyramid must be a finite number, above 1, got 0.5",
        ),
        (
            {"name": "random", "eviction": "knorm", "ratio": 0.5, "window": 9},
            "random: give either ratio (one number) or rates (layers × kv heads)",
        ),
        ({"name": "snapkv", "over": "row", "ratio": 0.5}, "over is one of head, layer, model, got 'row'"),
        ({"name": "snapkv", "ratio": 0.5, "window": 9}, "snapkv has no argument 'window'"),
        (
            {"name": "streaming_llm", "eviction": "snapkv", "window": 9, "ratio": 0.5},
            "streaming_llm looks back at the last 64 tokens, which must still be in the window: window must be at "
            "least 64, got 9",
        ),
        (
            {"name": "wgkv", "eviction": "adavk", "ratio": 0.5},
            "unknown eviction 'adavk'; the nearest known: adakv",
        ),
        ({"name": "knorm", "ratio": 0.5, "last": -1}, "last must be a whole number of at least 0, got -1"),
        (
            {"name": "knorm", "admission": "random", "eviction": "snapkv", "ratio": 0.5},
            "knorm is an eviction itself, got eviction='snapkv' beside it",
        ),
        (
            {"name": "full", "admission": "random"},
            "full is an admission itself, got admission='random' beside it",
        ),
        (
            {"name": "snapkv", "admission": "streaming_llm", "window": 1, "ratio": 0.5},
            "must still be in the window: window must be at least 64, got 1",
        ),
    ],
)
def test_bad_policies_are_one_line(model, arguments, says):
    with pytest.raises(UserError) as error:
        make_policy(model=model, **arguments)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_the_window_of_an_admission_is_part_of_the_budget(model, prompts):
    """It stays in any case: a number of entries that cannot hold it is refused, and of a context that is too short for
    a share nothing but the window is left."""
    given = {"model": model, "admission": "full", "window": 21}
    with pytest.raises(UserError, match="the budget of 18 entries per kv head is below the 20 that always"):
        sampling.prefill(model, prompts, policy=make_policy("knorm", entries=18, **given), page_size=PAGE)
    cache = sampling.prefill(model, prompts, policy=make_policy("knorm", ratio=0.45, **given), page_size=PAGE)
    for b, stay in enumerate((int(0.45 * 60) - 20, 0)):
        assert (np.asarray(cache.layers.length)[:, b] == stay).all()
    np.testing.assert_array_equal(cache.seen, LENGTHS)


@pytest.mark.parametrize(
    "name", ["snapkv", "adakv", "pyramidkv", "critical_kv", "r_kv", "expected_attention"]
)
@pytest.mark.parametrize(
    ("budget", "kept"), [({"ratio": 0.5}, [30, 10, 3, 2]), ({"entries": 30}, [30, 20, 6, 4])]
)
def test_short_contexts_keep_their_newest_beside_a_long_one(model, prompts, captured, name, budget, kept):
    """Shorter than what is observed, or with a budget below what always stays: the newest, as many as there are places.
    The long one keeps what it keeps alone."""
    given: dict[str, Any] = budget | ({} if name in ("r_kv", "expected_attention") else {"observed": 12})
    policy = make_policy(name, model=model, **given)
    rows = [prompts[0], *(prompts[0][:count] for count in (20, 6, 4))]
    cache = sampling.prefill(model, rows, policy=policy, page_size=PAGE, capacity=60)
    pages_are_whole(cache)
    length = np.asarray(cache.layers.length)
    alone = sampling.prefill(model, rows[:1] * 4, policy=policy, page_size=PAGE, capacity=60)
    np.testing.assert_array_equal(length[:, 0], np.asarray(alone.layers.length)[:, 3])
    for layer, head in np.ndindex(3, 4):
        np.testing.assert_allclose(entries(cache, layer, 0, head), entries(alone, layer, 3, head), atol=1e-5)
        for b, (row, count) in list(enumerate(zip(rows, kept, strict=True)))[1:]:
            keys = captured[0][layer].k[head][: row.size]
            if name == "expected_attention":
                # of it only the first 4 are sure to stay
                np.testing.assert_allclose(
                    entries(cache, layer, b, head)[: min(4, count)], keys[: min(4, count)], atol=1e-4
                )
                assert length[layer, b, head] == count
            elif name != "r_kv" or count <= 8:
                np.testing.assert_allclose(
                    entries(cache, layer, b, head), keys[row.size - count :], atol=1e-4
                )


@pytest.mark.parametrize("name", ["snapkv", "adakv", "r_kv", "expected_attention"])
@pytest.mark.parametrize("budget", [{"ratio": 0.4}, {"entries": 1024}])
def test_where_all_prompts_are_short_the_newest_stay(model, prompts, captured, name, budget):
    """SnapKV's 64 and R-KV's 8 queries, and no prompt that has so many."""
    given: dict[str, Any] = budget
    policy, rows = make_policy(name, model=model, **given), [prompts[0][:5], prompts[0][:3]]
    cache = sampling.prefill(model, rows, policy=policy, page_size=PAGE)
    pages_are_whole(cache)
    kept = (2, 1) if "ratio" in budget else (5, 3)
    for layer, b, head in np.ndindex(3, 2, 4):
        keys = captured[0][layer].k[head, : len(rows[b])]
        # Expected Attention keeps its first 4
        newest = keys[: kept[b]] if name == "expected_attention" else keys[len(keys) - kept[b] :]
        np.testing.assert_allclose(entries(cache, layer, b, head), newest, atol=1e-4)


def test_what_observes_is_read_and_gone(model, prompts, captured):
    """The last tokens of each prompt read behind the others: what stays is what the formula keeps of the whole prompt,
    without them; and the cache stands before them."""
    policy, behind = make_policy("snapkv", model=model, entries=20, observed=OBSERVED), 2
    rows, observers = [prompt[:-behind] for prompt in prompts], [prompt[-behind:] for prompt in prompts]
    cache = sampling.prefill(model, rows, policy=policy, observers=observers, page_size=PAGE)
    pages_are_whole(cache)
    np.testing.assert_array_equal(cache.seen, [len(row) for row in rows])
    for b, layers in enumerate(captured):
        place = np.arange(LENGTHS[b])
        for layer, c in enumerate(layers):
            scores = np.where(place >= LENGTHS[b] - OBSERVED, np.inf, published.snapkv(c, OBSERVED))
            for head, mask in enumerate(published.best(scores[:, :-behind], 20)):
                own = entries(cache, layer, b, head)
                np.testing.assert_allclose(own, c.k[head, :-behind][mask], atol=1e-4)
    with pytest.raises(UserError, match="observers are one row a prompt, got 1 for 2"):
        sampling.prefill(model, rows, policy=policy, observers=observers[:1])
    busy = make_policy("snapkv", model=model, entries=20, observed=OBSERVED, when="every", every=4)
    with pytest.raises(UserError, match="observers look at a prompt's end, and snapkv compacts while it"):
        sampling.prefill(model, rows, policy=busy, observers=observers)


def test_guidance_looks_at_every_prompt_and_every_chunk(model, prompts):
    """The policy's own tokens are read where given ones would be; a chunk of a longer prompt keeps by itself what it
    keeps as a prompt."""
    tokens = (3, 9, 27, 20, 7, 11, 50, 2)
    rule: dict[str, Any] = {"model": model, "ratio": 0.4, "observed": OBSERVED}
    given = sampling.prefill(
        model, prompts, policy=make_policy("snapkv", **rule), observers=[list(tokens)] * 2, page_size=PAGE
    )
    own = sampling.prefill(
        model, prompts, policy=make_policy("snapkv", observers=tokens, **rule), page_size=PAGE
    )
    pages_are_whole(own)
    parts = make_policy("snapkv", when="chunk", chunk=16, observers=list(tokens), **rule)
    long = sampling.prefill(model, prompts, policy=parts, page_size=PAGE)
    pages_are_whole(long)
    first = sampling.prefill(
        model, [row[:16] for row in prompts], policy=make_policy("snapkv", observers=tokens, **rule),
        page_size=PAGE,
    )  # fmt: skip
    np.testing.assert_array_equal(own.seen, LENGTHS)
    np.testing.assert_array_equal(long.seen, LENGTHS)
    for row in np.ndindex(3, 2, 4):
        np.testing.assert_array_equal(entries(own, *row), entries(given, *row))
        begin = entries(first, *row)
        assert len(begin) == 6
        np.testing.assert_allclose(entries(long, *row)[:6], begin, atol=1e-5)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"observers": [61]}, "snapkv: observers have token id 61, the model's vocabulary is 0 … 60"),
        ({"observers": []}, "schedule: observers are token ids, at least one, got none"),
        ({"observers": [0.5]}, "schedule: a token id of observers must be a whole number of at least 0"),
        ({"observers": [1], "when": "every", "every": 4}, "observers=.* needs when='prompt' or 'chunk'"),
        (
            {"observers": [1], "name": "knorm"},
            "observers=.* is for methods that look back at the last tokens",
        ),
    ],
)
def test_guidance_is_checked(model, given, says):
    with pytest.raises(UserError, match=says):
        make_policy(**{"name": "snapkv", "model": model, "ratio": 0.5} | given)


@pytest.mark.parametrize("when", [{}, {"when": "chunk", "chunk": 20}])
def test_a_pyramid_needs_layers(prompts, when):
    """Which a policy knows as soon as it is made for a model, and else when it meets one."""
    says, model = "^a pyramid of budgets needs at least 2 layers, the model has 1$", tiny_model(num_layers=1)
    with pytest.raises(UserError, match=says):
        make_policy("pyramidkv", model=model, ratio=0.5, observed=6, **when)
    policy = make_policy("pyramidkv", eviction="knorm", ratio=0.5, **when)
    with pytest.raises(UserError, match=says):
        sampling.prefill(model, prompts, policy=policy, page_size=PAGE)


@pytest.mark.parametrize(
    ("name", "given", "kept"),
    [
        ("snapkv", {"observed": 6, "entries": 4}, 4),
        ("r_kv", {"sink": 4, "entries": 6}, 6),
        ("r_kv", {"sink": 4, "ratio": 0.1}, 6),
    ],
)
def test_of_a_budget_below_what_always_stays_the_newest_stay(model, prompts, captured, name, given, kept):
    policy = make_policy(name, model=model, **given)
    cache = sampling.prefill(model, prompts[:1], policy=policy, page_size=PAGE, capacity=60)
    for layer, head in np.ndindex(3, 4):
        keys = captured[0][layer].k[head]
        np.testing.assert_allclose(entries(cache, layer, 0, head), keys[len(keys) - kept :], atol=1e-4)
