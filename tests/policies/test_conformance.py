"""Test the rules that every policy must follow: a new policy is added to `POLICIES`, with its arguments for the tiny
model."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import cache as caches
from kvjax import policies
from kvjax.cache import CapacityError
from kvjax.errors import UserError
from kvjax.inference import prefill
from kvjax.inference.forward import forward
from kvjax.mesh import make_mesh, use_mesh
from kvjax.policies import make_policy
from kvjax.policies.policy import DEFAULT_ADMISSION
from kvjax.struct import changed
from tests.inference.delayed import delayed
from tests.inference.dense import logits_over_stored_entries
from tests.tiny_models import TRAINED, tiny_gates, tiny_model

RATES = np.linspace(0, 1, 12).reshape(3, 4)
POLICIES = {
    "full": {},
    "streaming_llm": {"window": 6, "sink": 2},
    "wgkv": {"tau": 0.5, "window": 6},
    "head_pattern": {"pattern": RATES, "sparsity": 0.5, "sink": 1, "window": 6},
    "kvpop": {"max_entries": 14, "sink": 2, "window": 6},
    "kvzap": {"threshold": 0.0, "window": 6},
    "random": {"rates": RATES, "window": 6},
    "snapkv": {"ratio": 0.5, "observed": 4},
    "defensive_kv": {"ratio": 0.5, "observed": 4},
    "dropkv": {"ratio": 0.5, "observed": 4},
    "tova": {"ratio": 0.5},
    "keydiff": {"ratio": 0.5},
    "knorm": {"ratio": 0.5},
    "expected_attention": {"ratio": 0.5},
    "h2o": {"ratio": 0.5},
    "fast_kvzip": {"ratio": 0.5, "chunk": 16, "window": 5, "short": 0},
    "r_kv": {"ratio": 0.5, "observed": 4},
    "oraclekv": dict(ratio=0.5, guidance=[9, 8, 7, 5]),
    "kvzip": dict(ratio=0.5, prefix=2, repeated=10, instruction=[9, 8], resumption=[9, 7, 5], tail=[4]),
    "kvzap_eviction": {"ratio": 0.5},
    "random_eviction": {"ratio": 0.5},
    "triattention": {"ratio": 0.5},
    "trimkv": {"ratio": 0.5},
    "quest": {"ratio": 0.5},
}
"""Arguments of the methods, by name."""
COMPOSED = {
    "max_entries": lambda model: delayed(window=6, max_entries=7, delay=3),
    "bias": lambda model: delayed(window=6, delay=2, threshold=2.0, biased=True),
    "adakv": lambda model: make_policy("snapkv:ratio=0.5,observed=4,adakv", model=model),
    "pyramidkv": lambda model: make_policy("snapkv:ratio=0.5,observed=4,pyramidkv.beta=3", model=model),
    "critical_kv": lambda model: make_policy("snapkv:ratio=0.5,observed=4,critical_kv", model=model),
    "refit": lambda model: make_policy(
        {"kvzip": POLICIES["kvzip"] | {"ratio": 0.3, "refit": {"queries": 32}}}, model=model
    ),
    "wgkv+snapkv": lambda model: make_policy(
        "wgkv:tau=0.3,window=6+snapkv:observed=4,ratio=0.3", model=model, gates=tiny_gates(model)
    ),
}
"""Policies that need more than a name."""
LENGTHS = 40, 23, 9
ROWS = [np.random.default_rng(length).integers(0, 61, length) for length in LENGTHS]
QUESTION = np.random.default_rng(1).integers(0, 61, 3)
USUAL = {"page_size": 4, "max_new_tokens": 4}
CHUNKS = {"chunk": 16, "page_size": 8}
"""Options of the reference reading: three chunks, the last of which is empty for one sequence."""
THOROUGH_ONLY = (
    "full", "streaming_llm", "wgkv", "random", "snapkv", "tova", "keydiff", "knorm", "expected_attention", "r_kv",
    "kvzap", "kvzap_eviction", "defensive_kv", "dropkv",
    "random_eviction", "adakv", "pyramidkv", "critical_kv", "refit", "oraclekv", "max_entries", "bias",
)  # fmt: skip
"""Policies that share their steps with other policies. They run only in the thorough tests."""
each_policy = pytest.mark.parametrize(
    "name",
    [
        pytest.param(x, marks=pytest.mark.thorough if x in THOROUGH_ONLY else ())
        for x in (*POLICIES, *COMPOSED)
    ],
)
run = jax.jit(forward, static_argnames="write")


def model_without_norms():
    """Return a model without QK-norm: normed keys all have one length, and KNorm could only compare rounding errors."""
    return tiny_model(qk_norm=False)


def build(name, model):
    if name in COMPOSED:
        return COMPOSED[name](model)
    trained = TRAINED[name](model) if name in TRAINED else {}
    return make_policy({name: POLICIES[name] | trained}, model=model)


logits_of = jax.jit(lambda model, hidden: model.logits(hidden))


def question_logits(model, policy, cache):
    """Return the logits of a question."""
    with use_mesh(model):
        batch = cache.seen.shape[0]
        fed = np.tile(QUESTION, (batch, 1)).astype(np.int32), np.full(batch, 3, np.int32)
        _, hidden, _ = run(model, policy.compile(model).decode, cache, *map(jnp.asarray, fed), write=False)
        return np.asarray(logits_of(model, hidden))


def next_logits(model, policy, cache):
    """Return the logits after one more token, over all stored entries unless the policy selects pages. The dense
    formula, which another test compares with paged attention, is one program for all policies."""
    if policy.selection is not None:
        return question_logits(model, policy, cache)
    return logits_over_stored_entries(model, cache, np.full(cache.seen.shape[0], 5, np.int32))


def outcome(name, model, rows, logits=question_logits, **options):
    """Return the stored entries of each sequence, by layer and head, and the logits of the next tokens."""
    policy = build(name, model)
    cache = prefill(model, rows, policy=policy, **USUAL | options)
    return caches.stats(cache, len(rows)).entries, logits(model, policy, cache)[: len(rows)]


@pytest.fixture(scope="module")
def model():
    return model_without_norms()


@pytest.fixture(scope="module")
def assert_same(model):
    """Return a function that checks a policy's outcome against that of the batch read in chunks."""
    reference = {}

    def check(name, other, rows=slice(None), logits=question_logits):
        if (name, logits) not in reference:
            reference[name, logits] = outcome(name, model, ROWS, logits, **CHUNKS)
        (entries, logits), (found_entries, found_logits) = reference[name, logits], other
        np.testing.assert_array_equal(found_entries, entries[:, rows])
        np.testing.assert_allclose(found_logits, logits[rows], atol=1e-4)

    return check


def test_every_policy_has_arguments_here():
    assert set(POLICIES) == set(policies.POLICIES)


@each_policy
def test_a_token_sees_exactly_the_stored_entries(model, name):
    """Attention over pages and local windows is compared with dense attention over exactly the stored entries."""
    policy = changed(build(name, model), selection=None)
    cache, token = prefill(model, ROWS, policy=policy, **USUAL | CHUNKS), np.array([5, 6, 7], np.int32)
    with use_mesh(model):
        # as wide as the question, whose program is used here
        fed = jnp.asarray(np.tile(token[:, None], 3)), jnp.asarray(np.ones(3, np.int32))
        _, hidden, _ = run(model, policy.compile(model).decode, cache, *fed, write=False)
        found = np.asarray(logits_of(model, hidden))[:, 0]
    np.testing.assert_allclose(found, logits_over_stored_entries(model, cache, token), atol=1e-4)


@pytest.mark.parametrize(
    "row", [1, pytest.param(0, marks=pytest.mark.thorough), pytest.param(2, marks=pytest.mark.thorough)]
)
@each_policy
def test_a_batch_in_chunks_matches_single_sequences_read_at_once(model, assert_same, name, row):
    """Sequences that are read alone are stored in other pages."""
    one = slice(row, row + 1)
    assert_same(name, outcome(name, model, ROWS[one], next_logits), one, next_logits)


FAST_POLICY = "wgkv+snapkv"
"""The policy that the fast tests use, an eviction over an admission. The others run only in the thorough tests, because
their programs are more than a process may map."""


@pytest.mark.mesh
@pytest.mark.parametrize(
    "name",
    [FAST_POLICY, *(pytest.param(x, marks=pytest.mark.thorough) for x in POLICIES if x != FAST_POLICY)],
)
@pytest.mark.parametrize(
    "shape",
    [{"tensor": 4}, pytest.param({"tensor": 2, "sequence": 2}, marks=pytest.mark.thorough)],
    ids=str,
)
def test_a_mesh_matches_one_device(assert_same, name, shape):
    with jax.set_mesh(make_mesh(fsdp=2, **shape)):
        split = outcome(name, model_without_norms(), ROWS)
    assert_same(name, split)


@pytest.mark.parametrize(
    "name",
    [
        FAST_POLICY,
        *(pytest.param(x, marks=pytest.mark.thorough) for x in (*POLICIES, *COMPOSED) if x != FAST_POLICY),
    ],
)
def test_too_small_a_capacity_names_a_sufficient_one(model, name):
    """The local windows alone fit; the entries to store for 40 tokens do not. They fit the capacity that the error
    names."""
    policy, rows = build(name, model), [np.tile(ROWS[0], 3)]
    with pytest.raises(CapacityError, match=f"policy {re.escape(policy.name)} needs") as error:
        prefill(model, rows, policy=policy, **USUAL, capacity=8 if policy.window > 1 else 4)
    enough = re.search(r"a capacity of (\d+) entries per kv head", str(error.value))
    assert enough is not None
    prefill(model, rows, policy=policy, **USUAL, capacity=int(enough[1]))


@each_policy
def test_a_policys_repr_is_one_short_line(model, name):
    policy = build(name, model)
    shown = repr(policy)
    methods = policy.admission, policy.eviction, policy.selection
    assert all(
        type(method).__name__ in shown for method in methods if method not in (None, DEFAULT_ADMISSION)
    )
    assert len(shown) < 140
    assert "\n" not in shown


@pytest.mark.parametrize("name", POLICIES)
def test_an_unknown_argument_is_named(model, name):
    with pytest.raises(UserError, match="has no argument 'nonsense'; it has "):
        make_policy({name: {"nonsense": 1, **POLICIES[name]}}, model=model)
