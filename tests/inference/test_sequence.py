"""Tests of reading and answering on a mesh that splits tokens, and the cache by kv heads, against one device."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import inference
from kvjax.cache import sizes
from kvjax.errors import UserError
from kvjax.inference.allocation import new_cache
from kvjax.inference.capture import captured_layers
from kvjax.inference.forward import last_logits
from kvjax.mesh import HEADS, make_mesh, token_axis
from kvjax.policies import make_policy
from kvjax.sampling_params import SamplingParams
from tests.tiny_models import TRAINED, tiny_config, tiny_model

pytestmark = pytest.mark.mesh

PATTERN = {"pattern": np.arange(12).reshape(3, 4) % 3 == 0, "sink": 2, "window": 6}
POLICIES = {
    "full": {},
    "streaming_llm": {"window": 6, "sink": 2},
    "head_pattern": PATTERN,
    "wgkv": {"tau": 0.5, "window": 6},
    "snapkv": {"ratio": 0.5, "observed": 4},
    "tova": {"ratio": 0.5},
    "snapkv in adakv": {"ratio": 0.5, "observed": 4, "adakv": {}},
    "snapkv in critical_kv": {"ratio": 0.5, "observed": 4, "critical_kv": {}},
    "kvpop": {"max_entries": 14, "sink": 2, "window": 6},
    "fast_kvzip": {"ratio": 0.5, "chunk": 16, "window": 5, "short": 0},
}
ROWS = [np.random.default_rng(length).integers(0, 61, length) for length in (40, 23)]


@functools.cache
def outcome(name, **shape):
    """Return the entries of each head cache after a prefill, an answer with its log-probabilities, and the bytes of
    each device's pool, which may be small."""
    with jax.set_mesh(make_mesh(**shape)), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sizes, "LEAST_POOL", 1)
        model = tiny_model()
        trained = TRAINED[name](model) if name in TRAINED else {}
        policy = make_policy({name.split()[0]: POLICIES[name] | trained}, model=model)
        # each chunk has a piece of 16 tokens and one of 3, which no axis divides
        cache = inference.prefill(model, ROWS, policy=policy, page_size=4, chunk=19, max_new_tokens=8)
        answers = inference.generate(
            model,
            [[5], [6]],
            SamplingParams(max_new_tokens=6, logprobs=0, ignore_eos=True, stop_token_ids=[]),
            policy=policy,
            cache=cache,
        )
        pool_bytes = {shard.data.nbytes for shard in cache.pages.pool.addressable_shards}
    return np.asarray(cache.layers.length), answers, pool_bytes


BOTH = {"tensor": 2, "sequence": 2}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "shape"),
    [(name, shape) for shape in ({"sequence": 2}, BOTH) for name in POLICIES],
    ids=str,
)
def test_entries_and_answers_are_those_of_one_device(name, shape):
    entries, answers, pool_bytes = outcome(name, **shape)
    wanted, wanted_answers, (one_device_bytes,) = outcome(name)
    np.testing.assert_array_equal(entries, wanted)
    for mine, theirs in zip(answers.tokens, wanted_answers.tokens, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    for mine, theirs in zip(answers.logprobs, wanted_answers.logprobs, strict=True):
        np.testing.assert_allclose(mine.chosen, theirs.chosen, atol=1e-5)
    if name == "full":
        assert pool_bytes == {one_device_bytes // math.prod(shape.values())}


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["full", "wgkv", "snapkv"])
def test_long_contexts_on_eight_devices_give_the_answers_of_one(name):
    random = np.random.default_rng(9)
    context, question = random.integers(0, 61, 4_000), random.integers(0, 61, 10)

    def answer(**shape):
        with jax.set_mesh(make_mesh(**shape)):
            model = tiny_model(num_kv_heads=8)
            trained = TRAINED[name](model) if name in TRAINED else {}
            policy = make_policy({name: POLICIES[name] | trained}, model=model)
            cache = inference.prefill(model, [context], policy=policy, chunk=1024, max_new_tokens=40)
            params = SamplingParams(max_new_tokens=24, ignore_eos=True, stop_token_ids=[])
            answers = inference.generate(model, [question], params, policy=policy, cache=cache)
            return answers.tokens, np.asarray(cache.layers.length)

    (mine,), entries = answer(tensor=2, sequence=4)
    (theirs,), wanted = answer()
    np.testing.assert_array_equal(mine, theirs)
    np.testing.assert_array_equal(entries, wanted)


def temporaries(tokens, **shape):
    """Return the bytes per device that a prompt's call of so many tokens takes besides its inputs and outputs."""
    with jax.set_mesh(make_mesh(**shape)):
        model = tiny_model()
        policy = make_policy("streaming_llm:window=6,sink=2", model=model).compile(model)
        cache = new_cache(model, policy, [np.zeros(tokens, np.int64)], 8, 16, None)
        batch = jnp.zeros((1, tokens), jnp.int32), jnp.full(1, tokens, jnp.int32)
        program = last_logits.lower(model, policy.read, cache, *batch).compile()
        return program.memory_analysis().temp_size_in_bytes


@pytest.mark.thorough
def test_each_of_four_devices_takes_a_quarter_of_prefill_s_memory():
    """They take 0.269 of it. There are so many tokens that the memory of an empty call hardly counts."""
    one_device, each = temporaries(65536), temporaries(65536, sequence=4)
    assert each < 0.28 * one_device


@pytest.mark.parametrize("tokens", [1, 32])
def test_a_layer_has_four_all_to_alls_and_no_all_gather(tokens):
    """A call that the axis splits has four all-to-alls a layer, and no array that all devices hold whole. A call of one
    token has one sum after attention and one after the mlp, as on `tensor`."""
    with jax.set_mesh(make_mesh(sequence=2)):
        model = tiny_model()
        x = jax.jit(lambda model: model.hidden(jnp.zeros((1, tokens), jnp.int32)))
        text = x.lower(model).compile().as_text()
        assert token_axis(tokens) == (None if tokens == 1 else "sequence")
    kinds = {name: text.count(f" {name}(") for name in ("all-to-all", "all-gather", "all-reduce")}
    # the layers are one program, in a loop
    wanted = {"all-to-all": 4, "all-gather": 0, "all-reduce": 0}
    assert kinds == (wanted if tokens > 1 else {"all-to-all": 0, "all-gather": 0, "all-reduce": 2})


@pytest.mark.thorough
@pytest.mark.parametrize(
    "shape",
    [{"sequence": 2}, {"fsdp": 2, "tensor": 2, "sequence": 2}],
    ids=str,
)
def test_captured_arrays_are_those_of_one_device(shape):
    """The rows are whole sequences of 19 and 40 tokens in calls of 24 and 48, and every head is captured."""
    names = "hidden", "q", "k", "v", "k_pre", "lse"
    for rows in ([ROWS[0][:19], ROWS[1][:19]], [ROWS[0], np.roll(ROWS[0], 1)]):
        found = []
        for mesh in (make_mesh(), make_mesh(**shape)):
            with jax.set_mesh(mesh):
                found.append(list(captured_layers(tiny_model(), make_policy("full"), None, rows, names)))
        for alone, split in zip(*found, strict=True):
            for name in names:
                np.testing.assert_allclose(split[name], alone[name], atol=1e-5)


def test_heads_that_cannot_be_split_are_refused():
    with jax.set_mesh(make_mesh(tensor=2, sequence=4)), pytest.raises(UserError) as error:
        tiny_model()
    assert tiny_config().num_kv_heads == 4
    assert str(error.value) == (
        "the mesh's tensor × sequence has size 8, which does not divide the model's kv heads (4); "
        "tensor=4,replica=2 does"
    )


def test_gates_are_split_with_the_heads():
    with jax.set_mesh(make_mesh(tensor=2, sequence=2)):
        gates = TRAINED["wgkv"](tiny_model())["gates"]
    assert gates.w1[...].sharding.spec[1] == HEADS
    assert gates.w1[...].addressable_shards[0].data.shape[1] == 1
