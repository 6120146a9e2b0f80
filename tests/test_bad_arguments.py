"""Tests that a bad argument raises a one-line error with its name and value, before anything compiles."""

from functools import partial

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

import kvjax
from kvjax import inference
from kvjax.errors import UserError, real_number, whole_number
from kvjax.mesh import use_mesh
from kvjax.policies import Ratio, make_policy
from kvjax.policies.compiled import on_mesh
from kvjax.sampling_params import SamplingParams
from tests.tiny_models import tiny_gates, tiny_model

NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="module")
def model():
    return tiny_model(qk_norm=False)


@pytest.fixture(scope="module")
def gates(model):
    return tiny_gates(model)


@pytest.fixture(autouse=True)
def unchecked(monkeypatch):
    """Disable the type checks of the other tests, which users do not have: they would refuse most of these values."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture(scope="module")
def compiled(model, gates):
    """Return a list that receives the time of each program compiled from here on, also of programs that another test
    compiled before."""
    jax.clear_caches()
    times = []

    def note(event, seconds, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            times.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(note)
    return times


POLICIES = {
    "snapkv": {"snapkv": {"ratio": 0.5}},
    "chunks": {"snapkv": {"ratio": 0.5, "when": "chunk"}},
    "periods": {"snapkv": {"ratio": 0.5, "when": "every"}},
    "overflows": {"snapkv": {"entries": 70, "when": "overflow"}},
    "unbudgeted": {"snapkv": {}},
    "expected_attention": {"expected_attention": {"ratio": 0.5}},
    "r_kv": {"r_kv": {"ratio": 0.5}},
    "defensive_kv": {"defensive_kv": {"ratio": 0.5}},
    "dropkv": {"dropkv": {"ratio": 0.5}},
    "h2o": {"h2o": {"ratio": 0.5}},
    "random_eviction": {"random_eviction": {"ratio": 0.5}},
    "quest": {"quest": {"tokens": 8}},
    "quest by ratio": {"quest": {}},
    "full": {"full": {}},
    "streaming_llm": {"streaming_llm": {"window": 8}},
    "random": {"random": {"window": 8, "ratio": 0.5}},
    "rates": {"random": {"window": 8}},
    "head_pattern": {"head_pattern": {"pattern": np.ones((3, 4)), "window": 8, "sink": 1}},
    "wgkv": {"wgkv": {"window": 8}},
}
BAD_POLICIES = [
    ("unbudgeted", "entries", (NAN, INF, "64", [64], True, 1.5, 0)),
    ("unbudgeted", "size", (INF, "2GiG", "GiB", True, -1)),
    ("unbudgeted", "ratio", ("0.5", True, NAN, 0, [0.5])),
    ("unbudgeted", "threshold", ("a", INF, True, 1e39)),
    ("snapkv", "adakv.pinned", ("a", None, NAN, 2)),
    ("snapkv", "pyramidkv.beta", ("a", NAN, INF, 1)),
    ("snapkv", "adakv.over", (5, None, ["head"], np.ones(3))),
    ("snapkv", "observed", ("8", None, 2.5, 0, NAN, np.ones((9, 9)), 2**31)),
    ("snapkv", "pool", ("5", 2.5, None)),
    ("snapkv", "pooling", (None, ["max"])),
    ("snapkv", "group", (5,)),
    ("snapkv", "protected.first", ("a", NAN, INF, -1, 2.5)),
    ("snapkv", "protected.last", ("a", True)),
    ("snapkv", "when", (5, None)),
    ("snapkv", "adakv", (5, "layer")),
    ("chunks", "chunk", ("128", NAN, 16.5, None, -1)),
    ("periods", "every", ("8", None, 2.5, INF)),
    ("overflows", "drop", ("a", NAN, 0)),
    ("snapkv", "critical_kv.first_stage", ("a", NAN, 1.5)),
    ("snapkv", "critical_kv.epsilon", ("a", NAN, -1)),
    ("expected_attention", "future", ("a", 2.5, 0)),
    ("expected_attention", "epsilon", ("a", NAN, None)),
    ("expected_attention", "sink", ("a", -1, 2.5)),
    ("expected_attention", "values", ("yes",)),
    ("r_kv", "balance", ("a", NAN)),
    ("r_kv", "alike", ("a", NAN)),
    ("r_kv", "sink", ("a", 2.5, -1)),
    ("r_kv", "observed", (1.5,)),
    ("defensive_kv", "observed", (1.5, 0)),
    ("defensive_kv", "pool", ("a", 2.5)),
    ("defensive_kv", "values", ("yes",)),
    ("dropkv", "observed", (1.5, 0)),
    ("dropkv", "pool", ("a", 2.5)),
    ("dropkv", "pooling", (None, "sum")),
    ("h2o", "recent", ("a", None, 2)),
    ("random_eviction", "seed", ("a", None, 2**40)),
    ("quest by ratio", "tokens", ("a", NAN, INF)),
    ("quest by ratio", "ratio", ("a", NAN)),
    ("quest", "skip", ("a", None, 1.5, 4)),
    ("full", "window", ("a", NAN, INF, True)),
    ("streaming_llm", "window", ("a", 2.5)),
    ("streaming_llm", "sink", ("a", None, 2.5, -1, 2**31)),
    ("quest", "layers", ("a",)),
    ("random", "ratio", ("a", NAN, -1, [0.5])),
    ("random", "seed", ("a", 2.5, -1)),
    (
        "rates",
        "rates",
        (
            "a",
            0.5,
            [["0.5"] * 4] * 3,
            [[1], [1, 2]],
            np.full((3, 4), NAN),
            np.full((3, 4), 2),
            np.ones((2, 4)),
        ),
    ),
    ("head_pattern", "pattern", (5, [[1], [1, 2]], np.full((3, 4), NAN), np.ones(3), np.ones((0, 4)))),
    ("head_pattern", "sparsity", ("a", NAN, -0.1, 1.1)),
    ("head_pattern", "sink", ("a", 2.5)),
    ("head_pattern", "window", ("a", INF)),
    ("wgkv", "tau", ("a", NAN, 2)),
    ("wgkv", "window", ("a",)),
    ("wgkv", "rate", ("a", np.full((3, 4), 1.5), np.ones(2))),
    ("wgkv", "gates", (5, [1])),
]
PROMPTS = [[1, 2, 3]]
BAD_SAMPLING = [
    ("max_new_tokens", ("5", None, 2.5, 0, True, NAN)),
    ("temperature", ("a", NAN, -1, None, 1e-40)),
    ("top_k", ("a", 1.5, -1)),
    ("top_p", ("a", NAN, 0, 2)),
    ("min_p", ("a", NAN, -1, 7)),
    ("repetition_penalty", ("a", 0, INF)),
    ("presence_penalty", ("a", 3)),
    ("frequency_penalty", (None, -3)),
    ("logit_bias", (5, "a", [1])),
    ("n", ("2", None, 2.5, 0)),
    ("seed", ("a", 1.5, -1, 2**40)),
    ("stop", ("a", [""], [5], 5)),
    ("stop_token_ids", (5, "a", [1.5], np.array(5), [-1], [2**40])),
    ("ignore_eos", ("yes", 2)),
    ("logprobs", ("yes", -1, 5000, [])),
]
BAD_CALLS = [
    ("generate", "sampling", (5, None, [5])),
    ("generate", "tokenizer", ("x", 5, len)),
    ("generate", "block", (None, 2.5, 0)),
    ("generate", "cache", ("x",)),
    ("generate", "page_size", ("16", 0)),
    ("generate", "chunk", ("a",)),
    ("prefill", "max_new_tokens", ("a", None, -5, 2.5)),
    ("prefill", "page_size", (2.5, "16", 0)),
    ("prefill", "capacity", (NAN, [5], True, 0, "x", "5", "aGiB")),
    ("prefill", "chunk", (2.5, None, 0)),
    ("prefill", "policy", ("snapkv", 5)),
    ("prefill", "model", ("x", None)),
    ("prefill", "prompt", (None, 5, [[1, [2]]], "text", ["text"], [None], [{1, 2}], [[True]], [[2**70]], np.array(5))),
]  # fmt: skip


REFUSED = [
    (lambda m: kvjax.load_model("", "float32"), "a model is the path of a folder .* got ''"),
    (
        lambda m: inference.generate((m, None), PROMPTS),
        "model must come from .*; kvjax.load gives a model and its tokenizer",
    ),
    (
        lambda m: inference.prefill(m, prompts=PROMPTS),
        "prefill has no argument 'prompts'; it has model, tokens, ",
    ),
    (lambda m: Ratio(rato=0.5), "Ratio has no argument 'rato'; it has ratio; the nearest: ratio"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_other_bad_arguments_raise_one_line(model, compiled, call, message):
    with pytest.raises(UserError, match=message):
        call(model)
    assert not compiled


def one_line(call, argument, value):
    with pytest.raises(UserError) as error:
        call()
    line = str(error.value)
    assert type(error.value) is UserError
    assert argument in line
    # an array or a list is shortened
    assert isinstance(value, np.ndarray | jax.Array | list) or str(value) in line


@pytest.mark.parametrize(("policy", "argument", "values"), BAD_POLICIES)
def test_bad_arguments_of_policies_raise_one_line(model, gates, compiled, policy, argument, values):
    ((name, arguments),) = POLICIES[policy].items()
    arguments = ({"gates": gates} if policy == "wgkv" else {}) | arguments
    wrapper, _, field = argument.rpartition(".")
    for value in values:
        changed = arguments | ({wrapper: {field: value}} if wrapper else {field: value})
        one_line(partial(make_policy, {name: changed}, model=model), field, value)
    assert not compiled


@pytest.mark.parametrize("policy", [5, ["snapkv"], None, {}])
def test_values_that_are_not_policies_are_refused(compiled, policy):
    one_line(partial(make_policy, policy), "got", policy)
    assert not compiled


@pytest.mark.parametrize("other", ["builtin", 5])
def test_values_that_are_not_models_are_refused(compiled, other):
    one_line(partial(make_policy, "full", model=other), "model", other)
    assert not compiled


@pytest.mark.parametrize(("argument", "values"), BAD_SAMPLING)
def test_bad_sampling_params_raise_one_line(compiled, argument, values):
    for value in values:
        one_line(partial(SamplingParams, **{argument: value}), argument, value)
    assert not compiled


@pytest.mark.parametrize(("function", "argument", "values"), BAD_CALLS)
def test_bad_arguments_of_calls_raise_one_line(model, compiled, function, argument, values):
    call = getattr(inference, function)
    for value in values:
        options = {} if argument in ("model", "prompt") else {argument: value}
        prompts = value if argument == "prompt" else PROMPTS
        first = value if argument == "model" else model
        one_line(partial(call, first, prompts, **options), argument, value)
        if argument in ("chunk", "page_size", "policy", "prompt"):
            one_line(partial(next, inference.stream(first, prompts, **options)), argument, value)
    assert not compiled


def test_policy_of_another_model_is_refused(model):
    for layers, kv_heads in ((2, 4), (3, 2)):
        with use_mesh(model):
            policy = on_mesh(make_policy("streaming_llm:window=2"), layers, kv_heads)
        for call in (inference.prefill, inference.generate):
            with pytest.raises(
                UserError, match="policy streaming_llm is for another model than this of 3 layers × 4"
            ):
                call(model, PROMPTS, policy=policy)


def test_rates_of_another_model_are_refused(model):
    policy = make_policy({"random": {"window": 2, "rates": np.ones((2, 4))}})
    with pytest.raises(
        UserError, match="^policy random: rates is made for 2 layers × 4 kv heads, the model has 3 × 4$"
    ):
        inference.prefill(model, PROMPTS, policy=policy)


def test_policy_made_without_a_model_serves_any_model(model):
    """It keeps the same entries as a policy that was made for the model."""
    for name, arguments in (
        ("streaming_llm", {"window": 3, "sink": 1}),
        ("random", {"window": 3, "ratio": 0.5}),
    ):
        policies = make_policy({name: arguments}), make_policy({name: arguments}, model=model)
        kept = [
            inference.prefill(model, [np.arange(1, 40)], policy=policy).layers.length for policy in policies
        ]
        np.testing.assert_array_equal(*kept)


def test_numbers_of_any_type_become_python_numbers():
    for value in (8, 8.0, np.int64(8), np.float32(8), np.array(8), jnp.int32(8)):
        for check, kind in ((whole_number, int), (real_number, float)):
            got = check("", "", value)
            assert got == 8
            assert type(got) is kind


def test_prompts_and_stop_tokens_may_be_iterators(model):
    plain = inference.generate(model, PROMPTS, SamplingParams(max_new_tokens=2, ignore_eos=True))
    assert plain.finish_reasons == ["length"]
    stop = plain.tokens[0][0]
    ended = inference.generate(
        model, iter(PROMPTS), SamplingParams(max_new_tokens=2, ignore_eos=True, stop_token_ids=iter([stop]))
    )
    assert ended.finish_reasons == ["stop"]
    assert ended.tokens[0].size == 0
