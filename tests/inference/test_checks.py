"""Tests of prompts, arguments and caches that do not fit and are refused before anything runs."""

import dataclasses
import inspect

import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from kvjax import cache as caches
from kvjax import inference
from kvjax.errors import UserError
from kvjax.inference.allocation import new_cache
from kvjax.mesh import BATCH, make_mesh, put, use_mesh
from kvjax.models import load_model
from kvjax.policies import make_policy
from kvjax.sampling_params import SamplingParams
from tests.policies.captured import PAGE
from tests.tiny_models import filled, tiny_config, tiny_model, tiny_sink_gates

ENTRIES = 24


def in_halves():
    with use_mesh():
        return filled(tiny_config(), jnp.bfloat16)


def unread(model, prompts=([1],)):
    """Return a cache that claims to have seen the prompts, although nothing of them was read."""
    with use_mesh(model):
        cache = new_cache(model, make_policy("full").compile(model), [np.array(row) for row in prompts])
        return dataclasses.replace(cache, seen=put(np.array(list(map(len, prompts)), np.int32), BATCH))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: inference.generate(m, []), "no prompt"),
        (lambda m: inference.generate(m, [[]]), "prompt 0 is empty"),
        (
            lambda m: inference.generate(m, [5, 6]),
            r"prompt 0 must be a list of whole token ids, got shape \(\)",
        ),
        (lambda m: inference.generate(m, [[0.5]]), "must be a list of whole token ids"),
        (lambda m: inference.prefill(m, [[1]], capacity="nan%"), "more than 0% and at most 100%"),
        (lambda m: inference.prefill(m, [[1]], capacity="200%"), "more than 0% and at most 100%"),
        (
            lambda m: inference.generate(m, [[1]], cache=unread(m), capacity=9),
            "capacity is stated where the cache is made",
        ),
        (
            lambda m: inference.generate(m, [[1]], cache=unread(tiny_model(num_layers=2))),
            r"the cache is for \(layers, kv heads, head_dim\) = \(2, 4, 8\), the model has \(3, 4, 8\)",
        ),
        (
            lambda m: inference.generate(m, [[1]] * 2, cache=unread(in_halves()), share=True),
            "the cache has entries in bfloat16, the model is in float32",
        ),
        (lambda m: inference.generate(m, ["text"]), "must be token ids"),
        (lambda m: inference.generate(m, [[1, 61]]), r"token id 61, the model's vocabulary is 0 … 60"),
        (lambda m: inference.prefill(m, [[1]], capacity="12 apples"), "capacity '12 apples'"),
        (lambda m: inference.prefill(m, [[1]], capacity="-3GiB"), "expected entries per kv head"),
        (
            lambda m: inference.prefill(m, [[1]], page_size=0),
            "page_size must be a whole number of at least 1",
        ),
        (
            lambda m: inference.prefill(m, [[1] * 60], policy=make_policy("full:window=50"), capacity=20),
            "capacity 20: .* fewer than",
        ),
        (lambda m: inference.logits(m, [[1], [1, 2]]), "one length"),
    ],
)
def test_mistakes_are_one_line_errors(model, call, message):
    with pytest.raises(UserError, match=message):
        call(model)


@pytest.mark.parametrize("policy", ["h2o", "r_kv"])
def test_a_cache_without_the_eviction_s_state_is_refused(model, prompts, policy):
    evicting = make_policy({policy: {"entries": ENTRIES, "when": "every", "every": 4}}, model=model)
    with pytest.raises(UserError, match=f"the cache was not made with policy {policy}"):
        inference.generate(model, prompts, cache=unread(model, prompts), policy=evicting)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "policy", ["fast_kvzip", *(pytest.param(x, marks=pytest.mark.thorough) for x in ("snapkv", "h2o"))]
)
def test_a_cache_that_decoded_without_its_eviction_is_refused(model, prompts, policy):
    """The eviction's state would lack the tokens since the prompt; the prompt's own cache has all of it."""
    own = {"gates": tiny_sink_gates(model), "buffer": 1} if policy == "fast_kvzip" else {}
    at_prompt = make_policy({policy: {"entries": 200, "when": "prompt", **own}}, model=model)
    every = make_policy({policy: {"entries": 200, "when": "every", "every": 4, **own}}, model=model)
    for read_by in (at_prompt, every):
        cache = inference.prefill(model, prompts, policy=read_by, page_size=PAGE)
        inference.generate(model, prompts, SamplingParams(max_new_tokens=2), cache=cache, policy=every)
    *_, last = inference.stream(
        model, prompts, SamplingParams(max_new_tokens=2), cache=cache, policy=at_prompt
    )
    cache = last.cache
    inference.generate(model, prompts, SamplingParams(max_new_tokens=2), cache=cache, policy=at_prompt)
    with pytest.raises(UserError, match=f"the cache was not made with policy {policy}"):
        inference.generate(model, prompts, cache=cache, policy=every)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda m: SamplingParams(max_new_token=3),
            r"SamplingParams has no argument 'max_new_token'; it has .*; the nearest: max_new_tokens",
        ),
        (lambda m: inference.stream(m, [[1]], seed=0), "stream has no argument 'seed'; it has model, "),
        (
            lambda m: inference.prefill(m, [[1]], pageSize=16),
            "prefill has no argument 'pageSize'; .* nearest: page_size",
        ),
        (
            lambda m: inference.generate(m, {"input_ids": [[1]], "attention_mask": [[1]]}),
            "prompts must be .*, got a dict of input_ids, attention_mask: give its 'input_ids', unpadded",
        ),
        (lambda m: inference.generate(m, "text"), r"prompts must be a list of prompts, got one text: \['text'\]"),
        (
            lambda m: SamplingParams(stop_token_ids="</s>"),
            r"got the text '</s>': stop=\['</s>'\] ends an answer",
        ),
        (
            lambda m: caches.stats(inference.generate(m, [[1]], SamplingParams(max_new_tokens=1))),
            "stats: cache must come from prefill, got Generation: use its stats",
        ),
        (lambda m: caches.stats(None), "stats: cache must come from prefill, got NoneType$"),
        (lambda m: load_model(None), "a model is the path of a folder .* or 'builtin', got None"),
        (
            lambda m: make_mesh(fsdp=4, tensor=4),
            r"make_mesh: fsdp=4, tensor=4 takes 16 devices, there are 8; .*'jax_num_cpu_devices', 16\)",
        ),
        (lambda m: make_mesh(fsdp=0), "make_mesh: fsdp must be a whole number of at least 1, got 0"),
    ],
)  # fmt: skip
def test_errors_say_what_was_given_and_expected(model, monkeypatch, call, message):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(UserError, match=message):
        call(model)


def test_the_help_of_a_call_names_its_arguments():
    for call in (inference.generate, inference.stream, inference.prefill):
        parameters = inspect.signature(call).parameters
        assert {"policy", "tokenizer", "capacity"} <= set(parameters)
        assert all(x.kind is not x.VAR_KEYWORD for x in parameters.values())
