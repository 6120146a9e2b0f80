"""Test that KV heads that change places between devices leave everything that a user sees as it is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax import cache as caches
from kvjax import inference
from kvjax.checkpoints.fingerprint import contents, fingerprint
from kvjax.engine import Engine
from kvjax.errors import UserError
from kvjax.inference import placement
from kvjax.inference.placement import even_order, with_placed_heads
from kvjax.inference.saving import load_cache, save_cache
from kvjax.llm import LLM
from kvjax.mesh import make_mesh
from kvjax.models import load_model, save_model
from kvjax.models.decoder import Decoder
from kvjax.policies import Policy, make_policy
from kvjax.policies.base import Eviction
from kvjax.policies.budget import Ratio, Shares
from kvjax.policies.schedule import Schedule
from kvjax.sampling_params import SamplingParams
from kvjax.struct import struct
from tests.tiny_models import TRAINED, sliding_model, tiny_config, tiny_model

pytestmark = pytest.mark.mesh

RATES = np.random.default_rng(0).random((3, 4)) ** 3
ORDER = (2, 0, 3, 1), (1, 3, 0, 2), (0, 1, 2, 3)
ROWS = [np.random.default_rng(length).integers(0, 61, length) for length in (40, 23)]
POLICIES = {
    "random": {"rates": RATES.astype(np.float32), "window": 6},
    "snapkv": {"ratio": 0.4, "observed": 4, "adakv": {"over": "model"}},
    "wgkv": {"tau": 0.5, "window": 6},
    "head_pattern": {"pattern": np.arange(12).reshape(3, 4) % 3 == 0, "sink": 2, "window": 6},
    "fast_kvzip": {"ratio": 0.5, "chunk": 16, "window": 5, "short": 0},
    "kvpop": {"max_entries": 14, "sink": 2, "window": 6},
    "quest": {"ratio": 0.5},
    "h2o": {"entries": 24, "when": "every", "every": 8},
    "random_eviction": {"ratio": 0.5},
    "triattention": {"entries": 24, "every": 8, "layers": "own"},
    "trimkv": {"entries": 24, "every": 8},
    "expected_attention": {"entries": 24, "when": "every", "every": 8},
}


def placed(model, order):
    """Return a copy of a model whose KV heads have this order."""
    return placement.placed(jax.tree.map(jnp.copy, model), order)


@pytest.mark.parametrize("devices", [2, 4])
def test_devices_hold_about_as_many_entries(devices):
    entries = 1000 * np.random.default_rng(1).random((32, 8)) ** 4
    order = even_order(entries, devices)
    assert order is not None
    found = np.take_along_axis(entries, np.array(order), 1).reshape(32, devices, -1).sum((0, 2))
    assert found.max() < 1.02 * found.mean()
    assert sorted(map(sorted, order)) == [list(range(8))] * 32


@pytest.mark.parametrize("entries", [np.ones((3, 4)), np.tile([2.0, 1.0, 1.0, 2.0], (3, 1))])
def test_heads_stay_in_order_if_nothing_is_gained(entries):
    assert even_order(entries, 2) is None


@pytest.mark.parametrize("make", [tiny_model, sliding_model], ids=["full", "sliding"])
def test_placement_does_not_change_the_model_that_users_see(make, tmp_path):
    with jax.set_mesh(make_mesh(tensor=2, sequence=2)):
        model = make()
        other = placed(model, ORDER)
        assert fingerprint(other) == fingerprint(model)
        assert contents(other) == contents(model)
        own, same = model.unfused_arrays(), other.unfused_arrays()
        assert own.keys() == same.keys()
        for name, x in own.items():
            np.testing.assert_array_equal(same[name].value, x.value)
        call = jax.jit(lambda model: model.logits(model.hidden(jnp.asarray(ROWS[0][None]))))
        np.testing.assert_allclose(call(other), call(model), atol=1e-5)
        assert not np.array_equal(other.layers.qkv[...], model.layers.qkv[...])
        if make is tiny_model:
            save_model(other, tmp_path / "saved")
            assert contents(load_model(tmp_path / "saved")) == contents(model)


@pytest.mark.parametrize(
    "name",
    [x if x in ("random", "snapkv") else pytest.param(x, marks=pytest.mark.thorough) for x in POLICIES],
)
def test_answers_statistics_and_saved_caches_keep_the_model_s_order(name, tmp_path):
    results, sampling = [], SamplingParams(max_new_tokens=10, ignore_eos=True, stop_token_ids=[])
    with jax.set_mesh(make_mesh(tensor=2, sequence=2)):
        model = tiny_model()
        models = {"own": model, "placed": placed(model, ORDER)}
        for order, model in models.items():
            trained = TRAINED[name](model) if name in TRAINED else {}
            policy = make_policy({name: POLICIES[name] | trained}, model=model)
            cache = inference.prefill(model, ROWS, policy=policy, page_size=4, chunk=19, max_new_tokens=12)
            save_cache(tmp_path / order, cache, model, policy)
            answers = inference.generate(model, [[5], [6]], sampling, policy=policy, cache=cache)
            results.append((answers.tokens, caches.stats(cache).entries, policy))
        (tokens, entries, _), (same, held, policy) = results
        np.testing.assert_array_equal(same, tokens)
        np.testing.assert_array_equal(held, entries)
        # each reads what the other has saved
        for model, other in zip(models.values(), ("placed", "own"), strict=True):
            cache = load_cache(tmp_path / other, model, policy)
            np.testing.assert_array_equal(caches.stats(cache).entries, entries)
            answers = inference.generate(model, [[5], [6]], sampling, policy=policy, cache=cache)
            np.testing.assert_array_equal(answers.tokens, tokens)


def test_heads_are_placed_by_the_policy_s_expectation():
    uneven = np.tile([0.9, 0.9, 0.1, 0.1], (3, 1)).astype(np.float32)
    with jax.set_mesh(make_mesh(tensor=2)):
        model = tiny_model()
        policy = make_policy({"random": {"rates": uneven, "window": 6}}, model=model)
        assert with_placed_heads(model, make_policy("full", model=model)) is model
        order = with_placed_heads(model, policy).config.head_order
        assert order is not None
        assert all({*row[:2]} & {0, 1} and {*row[2:]} & {0, 1} for row in order)
    with jax.set_mesh(make_mesh(fsdp=2)):
        assert with_placed_heads(tiny_model(), policy).config.head_order is None


@struct
class Steps(Eviction):
    """An eviction whose scores are equal for five entries in every head, of which all compete."""

    name = "steps"

    @property
    def shares(self):
        return Shares("model")

    def score(self, state, stored):
        return (stored.place // 5).astype(jnp.float32)


def test_ties_are_broken_by_the_model_s_order_of_heads():
    policy, held = Policy(eviction=Steps(), schedule=Schedule(Ratio(0.4))), []
    with jax.set_mesh(make_mesh(tensor=2)):
        own = tiny_model()
        for model in (own, placed(own, ORDER)):
            held.append(caches.stats(inference.prefill(model, ROWS, policy=policy)).entries)
    np.testing.assert_array_equal(held[1], held[0])
    assert len(np.unique(held[0])) > 2, "heads share a step, and the first of them keep it"


@pytest.mark.thorough
def test_the_engine_gives_the_same_answers():
    found = []
    with jax.set_mesh(make_mesh(tensor=2)):
        own = tiny_model()
        for model in (own, placed(own, ORDER)):
            policy = make_policy({"random": POLICIES["random"]}, model=model)
            engine = Engine(model, policy, slots=2, max_length=64)
            sampling = SamplingParams(max_new_tokens=12, ignore_eos=True, stop_token_ids=[])
            requests = [one for row in (*ROWS, ROWS[0][:9]) for one in engine.submit(row, sampling)]
            while engine.busy:
                engine.step()
            assert engine.stats.running == 0
            found.append([request.tokens for request in requests])
    assert found[0] == found[1]


@pytest.mark.parametrize(("head_dim", "stays"), [(64, True), (128, False)])
def test_heads_that_share_a_block_of_8_bit_weights_stay_in_order(head_dim, stays):
    sizes = {"num_heads": 4, "head_dim": head_dim, "width": 256, "mlp_width": 256}
    config = tiny_config(**sizes, weights="fp8", weight_block=128)
    uneven = np.tile([0.9, 0.9, 0.1, 0.1], (3, 1)).astype(np.float32)
    with jax.set_mesh(make_mesh(tensor=2)):
        model = Decoder(config, rngs=nnx.Rngs(0))
        policy = make_policy({"random": {"rates": uneven, "window": 6}}, model=model)
        call = jax.jit(lambda model: model.logits(model.hidden(jnp.asarray(ROWS[0][None]))))
        before, other = call(model), with_placed_heads(model, policy)
        assert (other is model) == stays
        np.testing.assert_allclose(call(other), before, atol=1e-5)


def test_a_cache_with_another_order_of_heads_is_refused():
    with jax.set_mesh(make_mesh(tensor=2)):
        model = tiny_model()
        cache = inference.prefill(model, ROWS)
        with pytest.raises(UserError, match="^the cache has its kv heads at other places than the model"):
            inference.generate(placed(model, ORDER), [[5], [6]], cache=cache)


@pytest.mark.thorough
def test_llm_gives_the_same_answers():
    found = {}
    for mesh in (make_mesh(), make_mesh(tensor=2)):
        llm = LLM("builtin", "wgkv", gates="builtin", mesh=mesh)
        (answer,) = llm.generate("import os\n" * 30, SamplingParams(max_new_tokens=12))
        found[llm.model.config.head_order is None] = answer.tokens
    assert found[True] == found[False]
