"""Tests that activations, scores and logits that are not finite end a call with a one-line error, and that no token is
output and no entry is chosen by them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.errors import UserError
from kvjax.inference import generate, logits, prefill, stream
from kvjax.inference.capture import captured_layers
from kvjax.mesh import use_mesh
from kvjax.policies import make_policy
from kvjax.sampling_params import SamplingParams
from tests.tiny_models import filled, tiny_config, tiny_gates, tiny_model, tiny_scorers, tiny_sink_gates

PROMPTS = [np.arange(1, 24), np.arange(30, 34)]
BAD = 50
"""A token whose embedding is NaN, as are those of padding and the rows that pad the vocabulary."""


def with_rows(weight, rows, value=np.nan):
    changed = np.array(weight[...])
    changed[rows] = value
    weight[...] = jax.device_put(changed, weight[...].sharding)


@pytest.fixture(scope="module")
def clean():
    return tiny_model(tied=False)


@pytest.fixture(scope="module")
def model():
    model = tiny_model(tied=False)
    with use_mesh(model):
        with_rows(model.embed, [0, BAD, *range(61, 128)])
        with_rows(model.head, range(61, 128))
    return model


NINE = SamplingParams(max_new_tokens=9, ignore_eos=True, logprobs=0)


def ask(model, prompts, **given):
    return generate(model, prompts, dataclasses.replace(NINE, max_new_tokens=4), **given)


def test_padding_may_be_nan(model, clean):
    wanted, found = ask(clean, PROMPTS), ask(model, PROMPTS)
    np.testing.assert_array_equal(found.tokens, wanted.tokens)
    for own, expected in zip(found.logprobs, wanted.logprobs, strict=True):
        np.testing.assert_array_equal(own.chosen, expected.chosen)


def spoilt(row, place):
    return np.r_[row[:place], BAD, row[place + 1 :]]


@pytest.mark.parametrize(
    "call",
    [
        lambda model, row: prefill(model, [row, PROMPTS[1]], chunk=16),
        lambda model, row: prefill(model, [row], policy=make_policy("snapkv:ratio=0.5,observed=4"), chunk=16),
        lambda model, row: prefill(model, [row], capacity=64),
        lambda model, row: ask(model, [PROMPTS[1], row]),
        lambda model, row: logits(model, [row]),
        lambda model, row: list(captured_layers(model, make_policy("full"), None, [row], ["k"])),
    ],
)
@pytest.mark.parametrize("place", [0, 22])
def test_one_nan_in_any_chunk_is_an_error(model, call, place):
    with pytest.raises(UserError, match=r"not finite \(NaN or inf\) in float32: the weights of the model"):
        call(model, spoilt(PROMPTS[0], place))


def test_the_caller_s_cache_can_be_used_after_an_error(model):
    cache = prefill(model, PROMPTS)
    before = ask(model, PROMPTS, cache=cache)
    with pytest.raises(UserError, match="not finite"):
        ask(model, [[1, BAD], [2]], cache=cache)
    np.testing.assert_array_equal(ask(model, PROMPTS, cache=cache).tokens, before.tokens)


def test_no_token_is_drawn_from_logits_that_are_not_finite(clean):
    twice = PROMPTS[:1] * 2
    answer = generate(clean, twice, NINE).tokens[0].tolist()
    bad = next(x for x in answer[2:] if x not in PROMPTS[0] and x not in answer[:2])
    model = tiny_model(tied=False)
    with use_mesh(model):
        with_rows(model.embed, [bad])
    blocks = stream(model, twice, NINE, block=1)
    for token in answer[: answer.index(bad) + 1]:
        assert next(blocks).tokens[0].tolist() == [token]
    with pytest.raises(UserError, match="not finite"):
        next(blocks)
    with use_mesh(model):
        with_rows(model.head, [60], jnp.inf)
    with pytest.raises(UserError, match="not finite"):
        next(stream(model, twice))


@pytest.mark.slow
def test_observers_that_are_not_finite_are_an_error(model):
    gates = tiny_gates(model)
    for policy in (
        make_policy("snapkv:ratio=0.5,observed=4"),
        make_policy("wgkv:tau=0.1,window=6+snapkv:observed=4,ratio=0.5", model=model, gates=gates),
    ):
        with pytest.raises(UserError, match="not finite"):
            prefill(model, PROMPTS[:1], policy=policy, observers=[[3, BAD, 4]])


def damaged_policy(name, model):
    if name == "wgkv":
        gates = tiny_gates(model)
        gates.w2[...] = gates.w2[...] * jnp.nan
        return make_policy({name: {"tau": 0.5, "window": 6}}, model=model, gates=gates)
    if name == "kvpop":
        scorers = tiny_scorers(model)
        scorers.w_i[...] = scorers.w_i[...] * jnp.nan
        return make_policy({name: {"window": 6, "max_entries": 12, "scorers": scorers}}, model=model)
    gates = tiny_sink_gates(model)
    gates.b[...] = gates.b[...] * jnp.nan
    return make_policy(
        f"{name}:entries=8,when=position,every=4,buffer=4,protected.last=4", model=model, gates=gates
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wgkv", pytest.param("kvpop", marks=pytest.mark.thorough), "fast_kvzip"])
def test_gates_and_scorers_that_give_nan_are_an_error(clean, name):
    with use_mesh(clean):
        policy = damaged_policy(name, clean)
    with pytest.raises(UserError, match="its gates or its scorers are damaged"):
        generate(clean, PROMPTS[:1], NINE, policy=policy)


def test_float16_suggests_another_dtype():
    with use_mesh():
        model = filled(tiny_config(), jnp.float16)
        model.layers.down[...] = model.layers.down[...] * 60000
    with pytest.raises(UserError, match=r"in float16: load it with dtype='bfloat16' or 'float32'$"):
        prefill(model, PROMPTS)


def test_a_donated_cache_is_a_one_line_error(clean, tmp_path):
    blocks = stream(clean, PROMPTS, NINE, block=1)
    cache = next(blocks).cache
    next(blocks)
    for use in (
        lambda: kvjax.stats(cache),
        lambda: ask(clean, PROMPTS, cache=cache),
        lambda: kvjax.save_cache(tmp_path / "a", cache, clean),
        lambda: next(captured_layers(clean, make_policy("full"), cache, PROMPTS, ["k"])),
    ):
        with pytest.raises(UserError, match="donated to a later step and is gone"):
            use()
