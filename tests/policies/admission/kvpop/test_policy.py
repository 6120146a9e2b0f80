"""Test KVPOP's rule: the ranking of tokens, that evicted tokens never return, that a cache read in any chunks keeps the
tokens that training sees, and the refused options."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import cache as caches
from kvjax.errors import UserError
from kvjax.inference import stream
from kvjax.mesh import put, use_mesh
from kvjax.policies import Policy, make_policy
from kvjax.policies.admission.kvpop import KVPOP, load_scorers, save_scorers
from kvjax.policies.compiled import on_mesh
from kvjax.sampling_params import SamplingParams
from kvjax.struct import changed, struct
from kvjax.train.objective import Deployed, deployed_mask, from_the_start, student
from tests.cache.kept import lists, positions
from tests.inference.cached import LENGTH, TOKENS, cached_logits
from tests.inference.dense import stored
from tests.policies.admission.admitted import layer
from tests.policies.steps import from_start, shape_of, step
from tests.tiny_models import tiny_model, tiny_scorers

SIZES = {"max_entries": 15, "sink": 2, "window": 6}


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def made(model, **arguments) -> Policy:
    return make_policy({"kvpop": {"scorers": tiny_scorers(model), **SIZES | arguments}}, model=model)


def priorities(policy, score):
    """Return the priorities of one head's tokens, given their scores."""
    admission = layer(policy.admission, 0)
    position = np.arange(len(score))[None]
    score = np.broadcast_to(np.float32(score), (1, 4, len(score)))
    return np.asarray(jax.jit(lambda admission, *x: admission.priority(*x))(admission, score, position))


def test_kept_tokens_match_a_worked_example(model):
    """With two sinks, a window of two and two other places, the kept tokens are checked at queries 4 to 9."""
    score = [0, 0, 0.2, 0.9, 0.1, 0.5, 0.7, 0.3, 0.8, 0.6]
    policy = made(model, max_entries=6, sink=2, window=2, decay=False)
    keep = layer(policy.admission, 0).keep()
    stored_tokens = stored(priorities(policy, score)[:, :1], keep, 2)[0, 0]
    found = [set(np.flatnonzero(stored_tokens[q])) - {0, 1} for q in range(4, 10)]
    assert found == [{2}, {2, 3}, {2, 3}, {3, 5}, {3, 6}, {3, 6}]
    assert stored_tokens[9, :2].all()


def kept_by(effective, capacity, window):
    """Return for each query q the `capacity` tokens u of highest score `effective(u, q)`."""
    return [
        set(sorted(range(q - window + 1), key=lambda u: (-effective(u, q), u))[:capacity]) for q in range(400)
    ]


def returning(kept, window):
    """Count the (query, token) pairs in which a token is kept again after it was dropped."""
    return sum(
        u in now and u not in before
        for q, (before, now) in enumerate(itertools.pairwise(kept), 1)
        for u in range(q - window)
    )


@pytest.mark.parametrize("age", [1, 8])
def test_dropped_tokens_never_return(model, age):
    """A priority, which does not depend on the query, ranks tokens as their scores do at every query. With the paper's
    age, counted in whole blocks since the token, no priority would, and dropped tokens would have to come back."""
    window, capacity, score = 8, 12, np.random.default_rng(0).standard_normal(400)
    policy = made(model, age=age, window=window, max_entries=30, sink=0)
    admission = layer(policy.admission, 0)
    admission.scorers.theta[...] = np.full_like(admission.scorers.theta[...], -50.0)  # γ = .999
    position, score_of_all = np.arange(400)[None], np.broadcast_to(np.float32(score), (1, 4, 400))
    compute = jax.jit(lambda admission, *x: (admission.scorers.log_gamma(), admission.priority(*x)))
    log_gamma, priority = compute(admission, score_of_all, position)
    log_gamma, priority = float(log_gamma[0]), np.asarray(priority)[0, 0]
    by_age = kept_by(lambda u, q: score[u] + (q // age - u // age) * log_gamma, capacity, window)
    assert kept_by(lambda u, q: priority[u], capacity, window) == by_age
    assert returning(by_age, window) == 0


def test_with_the_papers_age_dropped_tokens_would_return():
    score = np.random.default_rng(0).standard_normal(400)
    assert returning(kept_by(lambda u, q: score[u] - 0.5 * ((q - u) // 8), 12, 8), 8) > 100


def seen(policy, at, **changes):
    """Return the keys that each query of a layer sees under training's mask, [b k t s]."""
    admission = changed(layer(policy.admission, 1), **changes)
    _, mask = jax.jit(deployed_mask, static_argnums=2)(admission, at, policy.window)
    index, end = np.arange(at.k.shape[2]), np.asarray(mask.end)
    return (index <= index[:, None]) & (index[:, None] < end[:, :, None])


def streaming(model, sink, window):
    return make_policy({"streaming_llm": {"sink": sink, "window": window}}, model=model)


AT = step(np.arange(LENGTH)[None])


@pytest.mark.thorough
@pytest.mark.parametrize(("decay", "sink", "window"), [(True, 2, 13), (False, 9, 6)])
def test_age_decides_between_equal_scores(model, decay, sink, window):
    """With decay, the last tokens are kept, as if the window were longer; without it, the first ones, like sinks."""
    policy = made(model, decay=decay)
    scorers = jax.tree.map(lambda x: x, layer(policy.admission, 1).scorers)
    scorers.a[...], scorers.c[...] = 0 * scorers.a[...], 0 * scorers.c[...] + 0.3
    found = seen(policy, AT, scorers=scorers)
    np.testing.assert_array_equal(found, seen(streaming(model, sink, window), AT))


def test_with_places_for_sinks_alone_it_is_streaming_llm(model):
    found = seen(made(model), AT, max_retained=jnp.int32(2))
    np.testing.assert_array_equal(found, seen(streaming(model, 2, 6), AT))
    assert (found != seen(made(model), AT)).any()


def known_priorities(admission, at):
    """Return the priorities of a sequence's tokens except the last ones, as training computes them."""
    back = admission.revisits

    @jax.jit
    def score(admission, at):
        at = from_the_start(at, back)
        return admission.score(admission.init(shape_of(at)), at, *from_start(at))[1]

    return np.asarray(score(admission, at))[..., back:]


def test_a_priority_depends_on_tokens_up_to_the_windows_end(model):
    """The priority uses a query recomputed from the key and value. For token u it sees all tokens up to u + w − 1, but
    not u + w, the first that may no longer see u."""
    admission, changing = layer(made(model, sink=0).admission, 1), 23
    one = np.float32(np.arange(LENGTH) == changing)[:, None]
    changes = {name: jnp.asarray(np.asarray(getattr(AT, name)) + one) for name in ("k", "v")}
    before = known_priorities(admission, AT)
    difference = np.abs(known_priorities(admission, dataclasses.replace(AT, **changes)) - before).max((0, 1))
    np.testing.assert_array_equal(difference[: changing - 6 + 1], 0)
    assert difference[changing - 6 + 1] > 1e-4

    streams = admission.scorers.streams(AT.k, AT.v)
    rolled, _ = admission.scorers.score(jnp.roll(streams.q, 5, 2), streams)
    np.testing.assert_allclose(before, admission.decayed(rolled[..., 5:], AT.position[:, :-5]), atol=1e-6)


@struct
class Watched(Deployed):
    """Report for every token its priority and the first query that no longer sees it."""

    def masks(self, step):
        priority, mask = deployed_mask(self.admission, step, self.window)
        return (priority, mask.end), [mask]

    def figures(self, state, step, outputs):
        return {
            f"{i} {t}": x[..., t].astype(jnp.float32) for i, x in enumerate(state) for t in range(x.shape[-1])
        }


def in_training(model, policy, tokens):
    """Return the logits under training's mask, and the priorities and ends by layer, sequence, head and token."""
    with use_mesh(model):
        hidden, figures = jax.jit(lambda *a: student(Watched(a[0], 6), *a[1:], window=6))(
            on_mesh(policy.admission, 3, 4), model, put(tokens)
        )
        logits = model.logits(hidden)
    count = range(tokens.shape[1])
    return logits, *(np.stack([figures[f"{i} {t}"] for t in count], -1) for i in range(2))


def narrowest(priority, capacity, window):
    """Return the smallest difference, over all queries, between the last token that stays and the first that goes."""
    gaps = [np.inf]
    for count in range(capacity + 1, priority.shape[-1] - window + 1):
        ordered = -np.sort(-priority[..., :count], -1)
        gaps.append((ordered[..., capacity - 1] - ordered[..., capacity]).min())
    return min(gaps)


@pytest.mark.slow
@pytest.mark.parametrize(
    "calls",
    [*(pytest.param(x, marks=pytest.mark.thorough) for x in ([LENGTH], [17, 1, 1, 21])), [1] * LENGTH],
    ids=["whole", "chunks", "tokens"],
)
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        *(
            pytest.param(x, marks=pytest.mark.thorough)
            for x in ({"delayed": False, "age": 4}, {"max_entries": 200})
        ),
    ],
    ids=str,
)
def test_a_cache_keeps_the_tokens_that_training_sees(model, arguments, calls):
    """The logits agree, and the stored tokens are exactly those that training would show to the next query."""
    if arguments and len(calls) == LENGTH:
        calls = [5, *[1] * (LENGTH - 5)]
    policy = made(model, **arguments)
    found, cache = cached_logits(model, policy, TOKENS, calls)
    expected, priority, end = in_training(model, policy, np.pad(TOKENS, ((0, 0), (0, 1))))
    np.testing.assert_allclose(found, expected[:, :LENGTH], atol=1e-4)
    assert narrowest(priority, int(policy.admission.max_retained.max()), 6) > 1e-5, "or rounding might decide"
    left = np.arange(LENGTH) <= LENGTH - 6
    assert positions(cache) == lists((end[..., :LENGTH] > LENGTH) & left)
    assert int(cache.layers.length.max()) == min(arguments.get("max_entries", 15) - 6, LENGTH - 5)


@pytest.mark.thorough
def test_with_enough_entries_it_is_full_attention(model):
    policy = made(model, max_entries=LENGTH + 1)
    with use_mesh(model):
        expected = jax.jit(lambda model, tokens: model.logits(model.hidden(tokens)))(model, put(TOKENS))
    cached, _ = cached_logits(model, policy, TOKENS, [17, 1, 1, 21])
    for found in (cached, in_training(model, policy, TOKENS)[0]):
        np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.thorough
def test_a_cache_keeps_its_size():
    """The arrays have the same sizes after a prompt and after 4,096 more tokens. A conversation continues from the
    cache in the same way after the cache was copied to the host and back."""
    model = tiny_model(max_position=8192)
    policy = make_policy({"kvpop": {"scorers": tiny_scorers(model), **SIZES}}, model=model)

    def answered(prompt, count, **arguments):
        """Return greedily sampled tokens, and the cache of all but the last of them."""
        sampling = SamplingParams(max_new_tokens=count, ignore_eos=True)
        blocks = list(stream(model, [prompt], sampling, policy=policy, **arguments))
        return [int(x) for block in blocks for x in block.tokens[0]], blocks[-1].cache

    def sizes(cache):
        return sum(x.nbytes for x in jax.tree.leaves(cache)), caches.stats(cache).pages

    prompt = TOKENS[0].tolist()
    _, short = answered(prompt, 1)
    drawn, long = answered(prompt, 4096)
    assert int(long.seen[0]) == len(prompt) + 4096 - 1
    assert sizes(long) == sizes(short)
    np.testing.assert_array_equal(caches.stats(long).entries, 14)  # the next token is the sixth of the window

    away = jax.tree.map(np.asarray, long)
    back = jax.tree.map(lambda x, was: jax.device_put(x, was.sharding), away, long)
    turn = [*drawn[-1:], 7, 8, 9]
    expected, last = answered([*prompt, *drawn[:-1], *turn], 6)
    for cache in (long, back):
        assert answered(turn, 6, cache=cache)[0] == expected
    assert sizes(last) == sizes(long)


def test_files_hold_the_trained_arguments(model, tmp_path):
    scorers = tiny_scorers(model, normaliser="xlstm")
    save_scorers(tmp_path, scorers, {"max_entries": 20, "sink": 1, "window": 5, "decay": False})
    found, description = load_scorers(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, found, scorers)
    assert found.sizes == scorers.sizes
    policy = make_policy({"kvpop": {"scorers": tmp_path}})
    assert (policy.window, int(policy.admission.max_retained), policy.admission.decay) == (5, 15, False)
    assert policy.admission.delayed
    assert description["method"] == "kvpop"
    other = make_policy({"kvpop": {"scorers": tmp_path, "window": 9, "max_entries": 12}})
    assert (other.window, int(other.admission.max_retained)) == (9, 3)


def test_invalid_arguments_are_refused(model, tmp_path):
    scorers = tiny_scorers(model)
    with pytest.raises(UserError, match=r"max_entries=8 .* must be at least 2 \+ 6 \+ 1 = 9"):
        KVPOP(scorers, max_entries=8, sink=2, window=6)
    with pytest.raises(UserError, match="scorers must be a folder of scorers or a Scorer, got 3"):
        KVPOP(3)
    with pytest.raises(UserError, match=r"scorers are for .* = \(3, 4, 8\), the model has \(2, 4, 8\)"):
        make_policy({"kvpop": {"scorers": scorers}}, model=tiny_model(num_layers=2))
    with pytest.raises(UserError, match="depends on its window of 6, .* make KVPOP with window=8"):
        Policy(KVPOP(scorers, **SIZES), window=8)
    with pytest.raises(UserError, match="delayed must be True or False, got 1"):
        KVPOP(scorers, delayed=1)
    with pytest.raises(UserError, match="and an eviction needs them in order"):
        make_policy({"kvpop": {"scorers": scorers, **SIZES}, "knorm": {"ratio": 0.5}})
    save_scorers(tmp_path, scorers, {})
    (tmp_path / "config.json").write_text('{"method": "wgkv", "layers": 3, "kv_heads": 4, "head_dim": 8}')
    with pytest.raises(UserError, match="these are no KVPOP scorers"):
        load_scorers(tmp_path)
