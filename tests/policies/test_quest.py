"""Quest: which pages a query reads, against the paper's formula in float64, and what it then attends to."""

import dataclasses
from functools import cache as remembered

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax import cache as caches
from kvjax.attention import cached_attention
from kvjax.errors import UserError
from kvjax.mesh import BATCH, P, make_mesh, put, use_mesh
from kvjax.models.decoder import scan_layers
from kvjax.policies import make_policy
from kvjax.policies.selection.quest import EVERYTHING, Quest, page_scores
from kvjax.sampling import prefill, sample
from tests.policies.published import softmax
from tests.tiny_models import tiny_gates, tiny_model

LENGTHS = 60, 50
STEPS = 5


@pytest.fixture(scope="module")
def model():
    return tiny_model(qk_norm=False)


@pytest.fixture(scope="module")
def prompts():
    random = np.random.default_rng(3)
    return [random.permutation(61)[:length] for length in LENGTHS]


def chosen_pages(q, keys, local, seen, tokens, page) -> np.ndarray:
    """The pages [p] that the query heads [g h] of one kv head with these keys [s h] read."""
    stored = [keys[i : i + page] for i in range(0, len(keys), page)]
    score = [np.maximum(q * one.min(0), q * one.max(0)).sum(-1).max() for one in stored]
    partial = bool(stored) and len(stored[-1]) < page
    if partial:
        score[-1] = np.inf
    places = max(-(-(tokens - local) // page), int(partial))
    return np.sort(np.argsort(-np.array(score), kind="stable")[: max(places, 0)])


# --- the rule on its own ---------------------------------------------------------------------------------------------

SEQUENCES, HEADS, GROUP, DIM, PAGE, COLUMNS = 2, 2, 2, 3, 3, 5


@remembered
def selector():
    def local(tokens, ratio, q, bounds, length, near, seen):
        return Quest(tokens, ratio).select(q, bounds, length, local=near, seen=seen, page_size=PAGE)

    return jax.jit(jax.shard_map(local, out_specs=P(BATCH, "tensor"), mesh=make_mesh()))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    tokens=st.integers(1, 20) | st.just(EVERYTHING),
    ratio=st.none() | st.sampled_from([0.25, 0.5, 1.0]),
)
def test_the_pages_with_the_best_bounds_are_read_up_to_the_budget(seed, tokens, ratio):
    """Whole numbers, so that scores are exact and many are equal."""
    random = np.random.default_rng(seed)
    length = random.integers(0, PAGE * COLUMNS + 1, (SEQUENCES, HEADS))
    near, seen = random.integers(1, 8, SEQUENCES), random.integers(1, 30, SEQUENCES)
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
        rows = [put(x.astype(np.int32), BATCH) for x in (near, seen)]
        split = (BATCH, "tensor")
        found = np.asarray(
            selector()(
                *map(put, given_as), put(queries, *split), put(bounds.astype(np.float32), *split),
                put(length.astype(np.int32), *split), *rows,
            )
        )  # fmt: skip
    for b, head in np.ndindex(SEQUENCES, HEADS):
        keys = k[b, head].reshape(-1, DIM)[: length[b, head]].astype(np.float64)
        budget = tokens if ratio is None else round(ratio * seen[b])
        want = chosen_pages(q[b, head].astype(np.float64), keys, near[b], seen[b], budget, PAGE)
        np.testing.assert_array_equal(np.flatnonzero(found[b, head]), want)


# --- what a decoded token attends to ---------------------------------------------------------------------------------


@jax.jit
def decoded(model, policy, cache, token):
    """One token a sequence: the cache with it, and what each layer's attention saw and gave."""

    def attend(step, pages, xs):
        layer, policy = xs
        o, pages, layer = cached_attention(policy, step, pages, layer, seen=cache.seen, valid=one)
        return o, pages, (layer, (step.q, step.k, step.v, o))

    one = jnp.ones_like(cache.seen)
    x, position = model.embed_tokens(token[:, None]), cache.seen[:, None]
    _, pages, (layers, found) = scan_layers(model, x, position, attend, cache.pages, (cache.layers, policy))
    return dataclasses.replace(cache, pages=pages, layers=layers, seen=cache.seen + 1), found


def read(model, policy, prompts, page_size):
    """Prompts and then `STEPS` tokens: at each of them the cache before it and what `decoded` found, [l b …]."""
    cache = prefill(model, prompts, policy=policy, page_size=page_size, max_new_tokens=STEPS)
    steps = []
    with use_mesh(model):
        for index in range(STEPS):
            before, token = cache, put(np.full(len(prompts), 7 + index, np.int32), BATCH)
            cache, found = decoded(model, policy.continuing, cache, token)
            steps.append((before, [np.asarray(x, np.float64) for x in found]))
    caches.check(cache, policy)
    return steps


def outputs(steps) -> np.ndarray:
    return np.stack([found[-1] for _, found in steps])


def row_entries(cache, layer, b, head):
    """A row's keys and values [s 2h]: those in the ring, and those in the global region, in order."""
    size, table = cache.page_size, np.asarray(cache.layers.page_table)[layer, b, head]
    ring, length = caches.ring_pages(cache.window, size), int(cache.layers.length[layer, b, head])
    pool = np.asarray(cache.pages.pool, np.float64)
    near, far = (
        pool[x].reshape(-1, pool.shape[-1]) for x in (table[:ring], table[ring : ring - (-length // size)])
    )
    return near[: min(int(cache.seen[b]), cache.window - 1)], far[:length]


def policies(model) -> dict:
    """By name the policy, its budget at so many tokens, and the size of pages."""
    gates = {"gates": tiny_gates(model), "tau": 0.5, "window": 6}
    return {
        "quest": (make_policy("quest", model=model, tokens=12, skip=1), lambda seen: 12, 4),
        "wgkv": (make_policy("wgkv", model=model, selection="quest", ratio=0.25, **gates), lambda n: round(n / 4), 3),
        "adakv": (
            make_policy("adakv", model=model, observed=6, ratio=0.4, selection="quest", tokens=9), lambda n: 9, 4,
        ),
    }  # fmt: skip


@pytest.fixture(scope="module")
def steps_of(model, prompts):
    @remembered
    def run(name):
        policy, _, page = policies(model)[name]
        return read(model, policy, prompts, page)

    return run


@pytest.mark.parametrize("name", ["quest", "wgkv", "adakv"])
def test_a_decoded_token_attends_to_the_chosen_pages_the_ring_and_itself(model, steps_of, name):
    """Rows are ragged by admission and by eviction; the first layer is left alone in one case."""
    policy, budget, page = policies(model)[name]
    left_out = 0
    for cache, (q, k, v, o) in steps_of(name):
        for layer, b, head in np.ndindex(np.shape(cache.layers.length)):
            near, far = row_entries(cache, layer, b, head)
            seen = int(cache.seen[b]) + 1
            tokens = EVERYTHING if name == "quest" and layer == 0 else budget(seen)
            group = q[layer, b, 2 * head : 2 * head + 2, 0]
            pages = chosen_pages(group, far[:, :8], min(seen, policy.window), seen, tokens, page)
            visible = np.isin(np.arange(len(far)) // page, pages)
            left_out += (~visible).sum()
            keys = np.concatenate([near[:, :8], far[visible, :8], k[layer, b, head]])
            values = np.concatenate([near[:, 8:], far[visible, 8:], v[layer, b, head]])
            p = softmax(group @ keys.T / np.sqrt(8))
            np.testing.assert_allclose(o[layer, b, 2 * head : 2 * head + 2, 0], p @ values, atol=1e-5)
    assert left_out > 100


def test_a_budget_of_everything_is_no_quest_and_all_budgets_are_one_program(model, prompts, steps_of):
    steps_of("quest")
    compiled = decoded._cache_size()
    everything = [read(model, make_policy("quest", model=model, **given), prompts, 4)
                  for given in ({"tokens": 65}, {"ratio": 1.0}, {"tokens": 3, "skip": 3})]  # fmt: skip
    assert decoded._cache_size() == compiled
    plain = read(model, make_policy("full"), prompts, 4)
    for steps in everything:
        np.testing.assert_array_equal(outputs(steps), outputs(plain))
    assert np.abs(outputs(steps_of("quest")) - outputs(plain)).max() > 1e-2


def test_a_batch_equals_its_sequences_alone(model, prompts, steps_of):
    policy, _, page = policies(model)["wgkv"]
    for b, prompt in enumerate(prompts):
        alone = outputs(read(model, policy, [prompt], page))
        np.testing.assert_allclose(alone[:, :, 0], outputs(steps_of("wgkv"))[:, :, b], atol=1e-5)


def test_a_mesh_gives_the_same(prompts, steps_of):
    with jax.set_mesh(make_mesh(fsdp=2, tensor=4)):
        split = tiny_model(qk_norm=False)
        policy, _, page = policies(split)["wgkv"]
        together = outputs(read(split, policy, prompts, page))
    np.testing.assert_allclose(together, outputs(steps_of("wgkv")), atol=1e-5)


def test_prompts_read_everything_however_they_are_cut(model, prompts):
    """The last chunk of one prompt is a single token."""
    policy = make_policy("quest", model=model, tokens=1)
    first, again = (prefill(model, prompts, policy=policy, page_size=4, chunk=c) for c in (100, 59))
    np.testing.assert_allclose(first.pages.pool, again.pages.pool, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"name": "quest"}, "quest: what a query reads is one of tokens and ratio, got none"),
        (
            {"name": "quest", "tokens": 8, "ratio": 0.5},
            "quest: what a query reads is one of tokens and ratio, got tokens=8 and ratio=0.5",
        ),
        ({"name": "quest", "tokens": 0}, "quest: tokens must be a whole number of at least 1, got 0"),
        ({"name": "quest", "ratio": 1.5}, "quest: ratio is the share that is read, above 0 and at most 1, got 1.5"),
        ({"name": "quest", "tokens": 8, "skip": 4}, "quest: skip must be from 0 to the model's 3 layers, got 4"),
        ({"name": "qest", "tokens": 8}, "unknown policy 'qest'; the nearest known: quest"),
        ({"name": "full", "selection": "qust", "tokens": 8}, "unknown selection 'qust'; the nearest known: quest"),
        (
            {"name": "snapkv", "selection": "quest", "ratio": 0.5},
            "quest: what a query reads is one of tokens and ratio, got none",
        ),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(model, arguments, says):
    with pytest.raises(UserError) as error:
        make_policy(model=model, **arguments)
    assert str(error.value) == says


def test_a_cache_without_bounds_is_refused_in_one_line(model, prompts):
    policy = make_policy("full", selection="quest", model=model, tokens=8)
    with pytest.raises(UserError) as error:
        sample(model, [[1], [2]], cache=prefill(model, prompts, page_size=4), policy=policy)
    assert str(error.value) == (
        "policy full+quest selects pages by bounds of their keys, which this cache has none of: make it with a policy "
        "that selects, too"
    )
