"""Test Quest: the pages that a query reads, against the paper's formula in float64, and the attention over them."""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax import cache as caches
from kvjax import inference
from kvjax.errors import UserError
from kvjax.inference import forward, prefill
from kvjax.inference.attention import cached_attention
from kvjax.inference.forward import release_unused, reserve
from kvjax.mesh import BATCH, P, make_mesh, put, use_mesh
from kvjax.mesh import HEADS as SPLIT
from kvjax.models.decoder import scan_layers
from kvjax.policies import make_policy
from kvjax.policies.selection.quest import EVERYTHING, Quest, page_scores
from tests.policies.captured import retained_pages
from tests.policies.published import softmax
from tests.tiny_models import tiny_gates, tiny_model

STEPS, TOTAL = 5, 65


def chosen_pages(q, keys, local, tokens, page) -> list[int]:
    """Return the pages that the query heads [g h] of one kv head with these keys [s h] read, in the steps of WG-KV's
    code. The budget that the window leaves is places for pages; without places, nothing is read. A last page that is
    not full comes first, then the best full pages, by the largest product of a query with any corner of a page's
    box."""
    if tokens <= local:
        return []
    places, (full, rest) = math.ceil((tokens - local) / page), divmod(len(keys), page)
    chosen = [full] if rest else []

    def score(index):
        own = keys[index * page : (index + 1) * page]
        corners = np.array(list(itertools.product(*zip(own.min(0), own.max(0), strict=True))))
        return (corners @ q.T).max()

    ranked = sorted(range(full), key=lambda index: (-score(index), index))
    return sorted(chosen + ranked[: places - len(chosen)])


# --- the choice of pages ----------------------------------------------------------------------------------------------

SEQUENCES, HEADS, GROUP, DIM, PAGE, COLUMNS = 2, 2, 2, 3, 3, 5


@functools.cache
def selector():
    def local(tokens, ratio, q, bounds, length, local_count, seen):
        return Quest(tokens, ratio, jnp.int32(0)).select(
            q, bounds, length, layer=jnp.int32(0), local=local_count, seen=seen, page_size=PAGE
        )

    return jax.jit(jax.shard_map(local, out_specs=P(BATCH, SPLIT), mesh=make_mesh()))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    tokens=st.integers(1, 20) | st.just(EVERYTHING),
    ratio=st.none() | st.sampled_from([0.25, 0.5, 1.0]),
)
def test_the_pages_with_the_best_bounds_are_read_up_to_the_budget(seed, tokens, ratio):
    """The numbers are whole, so that scores are exact and many are equal."""
    random = np.random.default_rng(seed)
    length = random.integers(0, PAGE * COLUMNS + 1, (SEQUENCES, HEADS))
    local_count, seen = random.integers(1, 8, SEQUENCES), random.integers(1, 30, SEQUENCES)
    q = random.integers(-2, 3, (SEQUENCES, HEADS, GROUP, DIM))
    k = random.integers(-3, 4, (SEQUENCES, HEADS, COLUMNS, PAGE, DIM))
    exists = np.arange(PAGE * COLUMNS).reshape(COLUMNS, PAGE, 1) < length[..., None, None, None]
    bounds = np.concatenate([np.where(exists, sign * k, np.inf).min(3) for sign in (1, -1)], -1)
    queries = q.reshape(SEQUENCES, HEADS * GROUP, 1, DIM).astype(np.float32)

    finite = np.where(np.isinf(bounds), 0, bounds).astype(np.float32)
    score = np.asarray(page_scores(jnp.asarray(queries), jnp.asarray(finite)))
    products = np.einsum("bkgh,bkpsh->bkgps", q, k).max(2)
    assert (np.where(exists[..., 0], products, -np.inf) <= score[..., None]).all()

    with jax.set_mesh(make_mesh()):
        given_as = (np.int32(0 if ratio else tokens), np.float32(ratio or 0))
        rows = [put(x.astype(np.int32), BATCH) for x in (local_count, seen)]
        split = (BATCH, SPLIT)
        found = np.asarray(
            selector()(
                *map(put, given_as), put(queries, *split), put(bounds.astype(np.float32), *split),
                put(length.astype(np.int32), *split), *rows,
            )
        )  # fmt: skip
    for b, head in np.ndindex(SEQUENCES, HEADS):
        keys = k[b, head].reshape(-1, DIM)[: length[b, head]].astype(np.float64)
        budget = tokens if ratio is None else round(ratio * seen[b])
        want = chosen_pages(q[b, head].astype(np.float64), keys, local_count[b], budget, PAGE)
        np.testing.assert_array_equal(np.flatnonzero(found[b, head]), want)


# --- attention of a decoded token ------------------------------------------------------------------------------------


@jax.jit
def decoded(model, view, cache, token):
    """Decode one token per sequence. Return the cache with it, and each layer's queries, keys, values and outputs."""

    def attend(step, pages, xs):
        layer, view = xs
        o, _, pages, layer = cached_attention(
            view, step, pages, layer, seen=cache.seen, counted=cache.seen, valid=one
        )
        return o, pages, (layer, (step.q, step.k, step.v, o))

    one = jnp.ones_like(cache.seen)
    cache, reserved = reserve(cache, one)
    x, position = model.embed_tokens(token[:, None]), cache.seen[:, None]
    _, pages, (layers, found), _ = scan_layers(model, x, position, attend, cache.pages, (cache.layers, view))
    pages, layers = release_unused(cache, pages, layers, reserved)
    return dataclasses.replace(cache, pages=pages, layers=layers, seen=cache.seen + 1), found


def read(model, policy, prompts, page_size, decoding=None):
    """Read prompts and then `STEPS` tokens. Return for each token the cache before it and the results of `decoded` [l b
    …]."""
    remaining = TOTAL - max(map(len, prompts))
    cache = prefill(model, prompts, policy=policy, page_size=page_size, max_new_tokens=remaining)
    steps = []
    with use_mesh(model):
        view = decoding or policy.compile(model).decode
        for index in range(STEPS):
            before, token = cache, put(np.full(cache.seen.shape, 7 + index, np.int32), BATCH)
            cache, found = decoded(model, view, cache, token)
            steps.append((before, [np.asarray(x, np.float64) for x in found]))
    caches.check(cache, policy.name)
    return steps


def outputs(steps) -> np.ndarray:
    return np.stack([found[-1] for _, found in steps])


def row_entries(cache, layer, b, head):
    """Return the keys and values [s 2h] in a head's local window, and its retained ones in order."""
    pool, length = np.asarray(cache.pages.pool, np.float64), int(cache.layers.length[layer, b, head])
    window_pages = np.asarray(cache.layers.page_table)[layer, b, head][
        : caches.ring_pages(cache.window, cache.page_size)
    ]
    local_entries, retained = (
        pool[pages].reshape(-1, pool.shape[-1])
        for pages in (window_pages, retained_pages(cache, layer, b, head))
    )
    return local_entries[: min(int(cache.seen[b]), cache.window - 1)], retained[:length]


def evicting(model, **given):
    """Return a policy whose eviction shares a budget among the heads of a layer, so that their lengths differ."""
    shared = {"entries": 20, "adakv": {"pinned": 0.0}}
    return make_policy({"keydiff": shared, "quest": given}, model=model)


def admitting(model):
    return make_policy("wgkv:tau=0.5,window=6+quest:ratio=0.25", model=model, gates=tiny_gates(model))


@pytest.fixture(scope="module")
def evicted(model, prompts):
    return read(model, evicting(model, tokens=9, skip=1), prompts, 4)


@pytest.fixture(scope="module")
def admitted(model, prompts):
    return read(model, admitting(model), prompts, 3)


@pytest.mark.parametrize(
    ("name", "window", "page"),
    [pytest.param("evicted", 1, 4, marks=pytest.mark.thorough), ("admitted", 6, 3)],
)
def test_a_decoded_token_attends_to_the_chosen_pages_the_window_and_itself(request, name, window, page):
    """The first policy has a number of tokens, and its first layer reads everything. The second has a ratio."""
    left_out = 0
    for cache, (q, k, v, o) in request.getfixturevalue(name):
        for layer, b, head in np.ndindex(np.shape(cache.layers.length)):
            local_entries, retained = row_entries(cache, layer, b, head)
            seen = int(cache.seen[b]) + 1
            tokens = round(seen / 4) if name == "admitted" else 9 if layer else EVERYTHING
            group = q[layer, b, 2 * head : 2 * head + 2, 0]
            pages = chosen_pages(group, retained[:, :8], min(seen, window), tokens, page)
            visible = np.isin(np.arange(len(retained)) // page, pages)
            left_out += (~visible).sum()
            keys = np.concatenate([local_entries[:, :8], retained[visible, :8], k[layer, b, head]])
            values = np.concatenate([local_entries[:, 8:], retained[visible, 8:], v[layer, b, head]])
            p = softmax(group @ keys.T / np.sqrt(8))
            np.testing.assert_allclose(o[layer, b, 2 * head : 2 * head + 2, 0], p @ values, atol=1e-5)
    assert left_out > 1000


def test_a_full_budget_reads_everything_and_budgets_share_a_program(model, prompts, evicted):
    compiled = decoded._cache_size()
    given = {"tokens": TOTAL}, {"tokens": 3, "skip": 3}
    everything = [read(model, evicting(model, **budget), prompts, 4) for budget in given]
    assert decoded._cache_size() == compiled
    policy = evicting(model, tokens=1)
    plain = read(model, policy, prompts, 4, policy.compile(model).extend)
    for steps in everything:
        np.testing.assert_array_equal(outputs(steps), outputs(plain))
    assert np.abs(outputs(evicted) - outputs(plain)).max() > 1e-2


@pytest.mark.mesh
@pytest.mark.thorough
def test_outputs_do_not_depend_on_mesh_and_batch(prompts, admitted):
    """The rest of the batch on the mesh is an empty sequence."""
    with jax.set_mesh(make_mesh(fsdp=2, tensor=4)):
        split = tiny_model(qk_norm=False)
        policy = admitting(split)
        alone = [outputs(read(split, policy, [prompt], 3))[:, :, 0] for prompt in prompts]
    np.testing.assert_allclose(np.stack(alone, 2), outputs(admitted), atol=1e-5)


def test_prompts_read_everything_even_if_a_chunk_has_one_token(model, prompts, monkeypatch):
    used = []

    def last_logits(model, view, cache, tokens, valid):
        used.append((tokens.shape[1], view.selection))
        return cache, jnp.zeros((len(prompts), 61))

    monkeypatch.setattr(forward, "last_logits", last_logits)
    prefill(model, prompts, policy=make_policy("quest:tokens=1", model=model), chunk=59)
    assert used == [(59, None), (16, None)], "one token is padded like any other few"


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("quest", "quest: expected one of tokens and ratio, got none"),
        (
            "quest:tokens=8,ratio=0.5",
            "quest: expected one of tokens and ratio, got tokens=8 and ratio=0.5",
        ),
        ("quest:tokens=0", "quest: tokens must be a whole number of at least 1, got 0"),
        ("quest:ratio=1.5", "quest: ratio must be a finite number, above 0 and at most 1, got 1.5"),
        (
            "quest:tokens=8,skip=4",
            "quest on 3 layers: skip must be a whole number of at most 3, got 4",
        ),
    ],
)  # fmt: skip
def test_invalid_arguments_give_one_line_errors(model, policy, message):
    with pytest.raises(UserError) as error:
        make_policy(policy, model=model)
    assert str(error.value) == message


def test_a_cache_without_bounds_is_refused_in_one_line(model, evicted):
    policy, (cache, _) = make_policy("full+quest:tokens=8", model=model), evicted[0]
    cache = dataclasses.replace(cache, pages=dataclasses.replace(cache.pages, bounds=None))
    with pytest.raises(UserError) as error:
        inference.generate(model, [[1], [2]], cache=cache, policy=policy)
    assert str(error.value) == (
        "policy quest selects pages by bounds of their keys, and this cache has no bounds: make it with a policy "
        "that selects pages"
    )
