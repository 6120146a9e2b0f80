"""Test targets against a direct computation: dense attention of plain forward passes over each teacher's sequences."""

import functools

import jax
import numpy as np
import pytest

from kvjax.inference.capture import captured_layers
from kvjax.mesh import make_mesh
from kvjax.policies import Policy, Ratio, Schedule
from kvjax.policies.eviction.kvzip import KVzip
from kvjax.train.contexts import Context
from kvjax.train.features import MemoryStore
from kvjax.train.reconstruction import reconstruction
from kvjax.train.targets import answer, collect, larger, next_token, position_layout
from tests.tiny_models import tiny_model

PREFIX, LONGEST = 2, 56
"""Numbers of tokens of a context's prefix, and of the longest sequence that is read."""


def context(seed, tokens, questions=()):
    random = np.random.default_rng(seed)
    draw = lambda count: random.integers(4, 61, count).astype(np.int32)  # noqa: E731
    return Context(draw(PREFIX), draw(tokens), tuple(map(draw, questions)))


CONTEXTS = [context(0, 21, (3, 5)), context(1, 30, (4,)), context(2, 17, (2,))]
REPETITION = Policy(
    eviction=KVzip(instruction=(1, 2), resumption=(3,), tail=(1,), opening=(), prefix=PREFIX, repeated=12),
    schedule=Schedule(Ratio(1.0)),
)
TEACHERS = {
    "next_token": next_token,
    "answer": answer,
    "reconstruction": functools.partial(reconstruction, policy=REPETITION),
}


def compute_targets(model, teacher, which="hidden"):
    store = MemoryStore(position_layout(model, which), [len(x.tokens) for x in CONTEXTS])
    collect(model, CONTEXTS, store, TEACHERS[teacher], which)
    features = store.read()
    return features.take(np.arange(len(features)))


def read(model, row):
    """Return the results of a plain forward pass of one sequence, by layer."""
    names, count = ("hidden", "q", "k", "k_pre"), len(row)
    # all are padded at the end to the same number of tokens, and share a program
    layers = captured_layers(model, Policy(), None, [np.pad(row, (0, LONGEST - count))], names)
    return [{n: np.float64(x[n][0])[..., :count, :] for n in names} for x in layers]


def attention(layer, queries, keys):
    """Return the attention of these queries to these keys, of which each query sees those up to its own place, [n q
    s]."""
    group = len(layer["q"]) // len(layer["k"])
    k = np.repeat(layer["k"], group, 0)[:, keys]
    logits = np.einsum("nqh,nsh->nqs", layer["q"][:, queries], k) / np.sqrt(k.shape[-1])
    logits = np.where(np.asarray(keys) <= np.asarray(queries)[:, None], logits, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def max_by_group(weights, heads):
    """Return the maximum over queries and the heads of each group, [k s]."""
    return weights.max(1).reshape(heads, -1, weights.shape[-1]).max(1)


def compute_directly(model, teacher, example):
    """Return the targets of a context [n l k], computed directly."""
    row, n, heads = example.row, len(example.tokens), model.config.num_kv_heads
    own_positions = np.arange(PREFIX, len(row))
    if teacher == "next_token":
        layers = []
        for layer in read(model, row):
            weights = attention(layer, np.arange(len(row)), np.arange(len(row)))
            np.einsum("nqq->nq", weights)[...] = 0  # a token's own query is not a later one
            layers.append(max_by_group(weights, heads)[:, own_positions])
    elif teacher == "answer":
        layers = np.zeros((model.config.num_layers, heads, n))
        for question in example.questions:
            question_positions = np.arange(len(row), len(row) + len(question))
            all_positions = np.arange(len(row) + len(question))
            for best, layer in zip(layers, read(model, np.concatenate([row, question])), strict=True):
                np.maximum(
                    best,
                    max_by_group(attention(layer, question_positions, all_positions), heads)[
                        :, own_positions
                    ],
                    out=best,
                )
    else:
        layers = np.zeros((model.config.num_layers, heads, n))
        for start in range(PREFIX, len(row), 12):
            stop = min(start + 12, len(row))
            prompt = [1, 2] if start == PREFIX else [3, *row[start - 8 : start]]
            tokens = np.array([*prompt, 1, *row[start:stop]], np.int32)
            queries = np.arange(len(row), len(row) + len(tokens))
            keys = np.concatenate([np.arange(PREFIX), np.arange(start, stop), queries])
            for best, layer in zip(layers, read(model, np.concatenate([row, tokens])), strict=True):
                weights = max_by_group(attention(layer, queries, keys), heads)
                best[:, start - PREFIX : stop - PREFIX] = weights[:, PREFIX : PREFIX + stop - start]
    return np.stack(layers).transpose(2, 0, 1)


@functools.cache
def targets_on_one_device(teacher):
    with jax.set_mesh(make_mesh()):
        return compute_targets(tiny_model(), teacher)


@pytest.mark.parametrize(
    "teacher", [pytest.param(x, marks=pytest.mark.thorough if x == "answer" else ()) for x in TEACHERS]
)
def test_targets_match_a_direct_computation(teacher):
    with jax.set_mesh(make_mesh()):
        model = tiny_model()
        expected = np.concatenate([compute_directly(model, teacher, example) for example in CONTEXTS])
    score = targets_on_one_device(teacher)["score"]
    np.testing.assert_allclose(score, expected, atol=2e-5)
    assert score.min() >= 0
    assert score.max() <= 1
    assert np.ptp(score) > 0.1


@pytest.mark.slow
def test_larger_takes_the_larger_score_of_two_teachers():
    names = "answer", "reconstruction"
    teacher = larger(*(TEACHERS[name] for name in names))
    with jax.set_mesh(make_mesh()):
        model = tiny_model()
        store = MemoryStore(position_layout(model, "hidden"), [len(x.tokens) for x in CONTEXTS])
        collect(model, CONTEXTS, store, teacher, "hidden")
    features = store.read().take(np.arange(68))
    first, second = (targets_on_one_device(name)["score"] for name in names)
    assert (first > second).any()
    assert (second > first).any()
    np.testing.assert_allclose(features["score"], np.maximum(first, second), atol=1e-6)
    np.testing.assert_allclose(features["input"], targets_on_one_device("answer")["input"], atol=1e-6)


@pytest.mark.parametrize("teacher", ["next_token", "reconstruction"])
def test_inputs_are_those_of_the_layers(teacher):
    with jax.set_mesh(make_mesh()):
        model = tiny_model()
        for which in ("hidden", "k_pre"):
            inputs = compute_targets(model, teacher, which)["input"]
            start = 0
            for example in CONTEXTS:
                layers = [layer[which] for layer in read(model, example.row)]
                swapped = layers if which == "hidden" else [x.swapaxes(0, 1) for x in layers]
                expected = np.stack([x[PREFIX:] for x in swapped], 1)
                np.testing.assert_allclose(inputs[start : start + len(expected)], expected, atol=2e-5)
                start += len(expected)


@pytest.mark.mesh
@pytest.mark.thorough
@pytest.mark.parametrize("teacher", TEACHERS)
def test_a_mesh_gives_the_same_targets(teacher):
    """The mesh splits sequences and heads."""
    with jax.set_mesh(make_mesh(fsdp=4, tensor=2)):
        split = compute_targets(tiny_model(), teacher)
    for name, x in split.items():
        np.testing.assert_allclose(x, targets_on_one_device(teacher)[name], atol=1e-5)


def test_a_finished_context_is_not_computed_again():
    with jax.set_mesh(make_mesh()):
        model = tiny_model()
        store, calls = MemoryStore(position_layout(model, "hidden"), [len(x.tokens) for x in CONTEXTS]), []

        def teacher(model, contexts, which, outputs):
            calls.append([bool(arrays) for arrays in outputs])
            for arrays in filter(None, outputs):
                arrays["score"][...] = len(calls)

        with store.writing(1) as arrays:
            arrays["score"][...] = 9
        collect(model, CONTEXTS, store, teacher, "hidden")
        collect(model, CONTEXTS, store, teacher, "hidden")
    assert len(calls) == 1
    assert sum(calls[0]) == 2
    score = store.read().take(np.arange(68))["score"]
    assert score[:21].max() == score[51:].min() == 1
    assert score[21:51].min() == 9
