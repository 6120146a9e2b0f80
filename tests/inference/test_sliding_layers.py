"""Tests of models with sliding-window layers, whose windows go on beside what policies do with the other layers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache.rollback import marked, rolled_back
from kvjax.engine import Engine
from kvjax.errors import UserError
from kvjax.evaluate.teacher_forcing import TeacherForcing
from kvjax.inference import generate, load_cache, logits, prefill, save_cache
from kvjax.inference.capture import captured_layers
from kvjax.inference.forward import last_logits, padded
from kvjax.mesh import make_mesh, use_mesh
from kvjax.models.periods import Segment, segments
from kvjax.policies import Policy, make_policy
from kvjax.tasks.sample import Question, Sample
from kvjax.train.objective import Deployed, student
from tests.inference.cached import LENGTH, cached_logits
from tests.inference.dense import dense_logits
from tests.tiny_models import policies_for, sliding_model, tiny_model

pytestmark = pytest.mark.slow

GREEDY = kvjax.SamplingParams(max_new_tokens=12, ignore_eos=True)
PROMPTS = [np.random.default_rng(1).integers(0, 61, size) for size in (50, 23)]
QUESTIONS = [np.random.default_rng(2).integers(0, 61, size) for size in (9, 4)]
TEXTS = {"instruction": (1, 2), "resumption": (3,), "tail": (4,)}


@pytest.fixture(scope="module")
def model():
    return sliding_model()


def continued(model, rows):
    """Return the tokens that follow each row greedily, computed from whole sequences."""
    found = []
    for row in rows:
        for _ in range(GREEDY.max_new_tokens):
            padded = np.pad(row, (0, -row.size % 64))  # few lengths need few programs
            row = np.append(row, logits(model, padded[None])[0, row.size - 1].argmax())
        found.append(row[-GREEDY.max_new_tokens :])
    return found


@pytest.mark.parametrize(
    ("kinds", "wanted"),
    [
        ("fff", [("f", 3)]),
        ("ssssf" * 3, [("ssssf", 3)]),
        ("sf" * 3 + "s", [("sf", 3), ("s", 1)]),
        ("ssf" * 2 + "ss", [("ssf", 2), ("s", 2)]),
        ("ffss", [("f", 2), ("s", 2)]),
        ("ssf", [("s", 2), ("f", 1)]),
        ("ss", [("s", 2), ("f", 0)]),
    ],
)
def test_repeating_layers_share_a_scan(kinds, wanted):
    found = segments(tuple(kind == "s" for kind in kinds))
    assert [("".join("fs"[one] for one in own.slides), own.repeats) for own in found] == wanted
    assert [own.first for own in found] == [sum(own.layers for own in found[:at]) for at in range(len(found))]
    assert isinstance(found[0], Segment)


@pytest.mark.parametrize(
    "layers",
    [
        (0, 2, 4, 6),
        pytest.param((1, 2, 3, 4, 5, 6), marks=pytest.mark.thorough),
        pytest.param((0, 1, 3, 4, 6), marks=pytest.mark.thorough),
        tuple(range(7)),
    ],
)
def test_the_cache_gives_the_answers_of_whole_sequences(layers):
    """Prompts are longer than the window and read in pieces, one of which has another length than the window."""
    model = sliding_model(sliding_layers=layers)
    found = generate(model, PROMPTS, GREEDY, chunk=16)
    np.testing.assert_array_equal(found.tokens, continued(model, PROMPTS))


def test_a_model_with_sinks_and_experts_gives_the_answers_of_whole_sequences():
    """gpt-oss has them in layers of both kinds. Calls have many tokens and one."""
    own = {
        "num_experts": 4,
        "experts_per_token": 2,
        "expert_bias": True,
        "swiglu": (1.7, 7.0),
        "attention_sinks": True,
    }
    other = sliding_model(**own)
    found = generate(other, PROMPTS, GREEDY, chunk=16).tokens
    np.testing.assert_array_equal(found, continued(other, PROMPTS))


def test_policies_apply_to_layers_with_full_attention_only(model):
    tokens = np.random.default_rng(0).integers(0, 61, (2, LENGTH))
    policy = policies_for(model, 6)["wgkv"]
    want, kept = dense_logits(model, policy, tokens)
    assert len(kept) == model.config.num_full_layers == 3
    found, cache = cached_logits(model, policy, tokens, [8] * 4 + [1] * 8, page_size=3)
    assert np.abs(found - want).max() < 1e-4
    np.testing.assert_array_equal(np.asarray(cache.layers.length), kept.sum(-1))


@pytest.mark.parametrize(
    "policy",
    [
        "snapkv:ratio=1.0,observed=4",
        "knorm:ratio=1.0,when=chunk,chunk=16",
        {"kvzip": {"ratio": 1.0} | TEXTS},
    ],
)
def test_a_ratio_of_1_gives_the_answers_of_the_full_cache(model, policy):
    """The windows are those of the prompt's end, whatever was read behind the prompt to observe it."""
    policy = make_policy(policy, model=model)
    observers = QUESTIONS if policy.observes else None
    cache = prefill(model, PROMPTS, policy=policy, chunk=16, observers=observers)
    found = generate(model, QUESTIONS, GREEDY, policy=policy, cache=cache)
    rows = [np.concatenate(pair) for pair in zip(PROMPTS, QUESTIONS, strict=True)]
    np.testing.assert_array_equal(found.tokens, continued(model, rows))
    assert cache.layers.length.shape[0] == 3


def test_forked_and_loaded_contexts_give_the_same_answers(model, tmp_path):
    policy = make_policy("snapkv:ratio=0.5", model=model)
    cache = prefill(model, [row[:5] for row in PROMPTS], policy=policy)
    want = generate(model, QUESTIONS, GREEDY, policy=policy, cache=cache).tokens
    questions = [QUESTIONS[0], QUESTIONS[1], QUESTIONS[0], QUESTIONS[1]]
    shared = generate(model, questions, GREEDY, policy=policy, cache=cache, share=True).tokens
    np.testing.assert_array_equal([shared[0], shared[3]], want)
    save_cache(tmp_path / "saved", cache, model, policy)
    loaded = load_cache(tmp_path / "saved", model, policy)
    np.testing.assert_array_equal(
        generate(model, QUESTIONS, GREEDY, policy=policy, cache=loaded).tokens, want
    )


def test_windows_grow_with_their_sequences(tmp_path):
    """The contexts are shorter than the window, and the questions longer than what it had room for."""
    model, short = sliding_model(sliding_window=150), [row[:5] for row in PROMPTS]
    cache, long = prefill(model, short), [np.tile(QUESTIONS[0], 20)] * 2
    assert cache.sliding.shape[3] == 128
    rows = [np.append(row, long[0]) for row in short]
    save_cache(tmp_path / "saved", cache, model)
    asked = dataclasses.replace(GREEDY, logprobs=0)
    want = generate(model, rows, asked)
    for held in (cache, load_cache(tmp_path / "saved", model)):
        found = generate(model, long, asked, cache=held)
        np.testing.assert_array_equal(found.tokens, want.tokens)
        for one, other in zip(found.logprobs, want.logprobs, strict=True):
            np.testing.assert_allclose(one.chosen, other.chosen, atol=1e-4)
    assert cache.sliding.shape[3] == 128


def test_rollback_restores_windows(model):
    cache = prefill(model, PROMPTS, max_new_tokens=20)
    before = np.asarray(cache.sliding)
    with use_mesh(model):
        view, mark = Policy().compile(model).extend, marked(cache)
        later, _ = last_logits(model, view, cache, *padded(QUESTIONS, 16))
        assert not np.array_equal(later.sliding, before)
        np.testing.assert_array_equal(rolled_back(later, mark).sliding, before)


def test_a_cache_with_other_windows_is_refused(model):
    cache = prefill(model, PROMPTS)
    for other in (sliding_model(sliding_window=8), tiny_model()):
        with pytest.raises(
            UserError, match="the cache is for 4 layers with a sliding window of 7, the model has"
        ):
            generate(other, QUESTIONS, GREEDY, cache=cache)
    with pytest.raises(UserError, match="the cache is for 0 layers with a sliding window of 0"):
        generate(model, QUESTIONS, GREEDY, cache=prefill(tiny_model(), PROMPTS))


@pytest.fixture(scope="module")
def none_full():
    """Return a model such as Mistral 7B 0.1, which has no layer for policies to decide on."""
    return sliding_model(num_layers=3, sliding_layers=(0, 1, 2))


def test_without_full_attention_questions_continue_contexts(none_full):
    cache = prefill(none_full, PROMPTS, capacity=64)
    rows = [np.concatenate(pair) for pair in zip(PROMPTS, QUESTIONS, strict=True)]
    np.testing.assert_array_equal(
        generate(none_full, QUESTIONS, GREEDY, cache=cache).tokens, continued(none_full, rows)
    )
    assert "0 of" in repr(kvjax.cache.stats(cache))


def test_without_full_attention_policies_are_refused(none_full):
    for name in ("snapkv:ratio=0.5", "streaming_llm:window=8", "quest:ratio=0.5"):
        with pytest.raises(UserError, match="every layer of this model has a sliding window"):
            prefill(none_full, PROMPTS, policy=make_policy(name))
    with pytest.raises(UserError, match="save_cache: every layer of this model has a sliding window"):
        save_cache("unused", prefill(none_full, PROMPTS), none_full)


def test_without_full_attention_the_engine_answers(none_full):
    engine = Engine(none_full, slots=2, max_length=128, chunk=16, block=4)
    engine.warm_up()
    assert engine.holds(64)[0] >= 0
    requests = [engine.submit(row.tolist(), GREEDY)[0] for row in PROMPTS]
    while engine.busy:
        engine.step()
    np.testing.assert_array_equal([request.tokens for request in requests], continued(none_full, PROMPTS))


def test_a_paused_answer_keeps_its_windows(model):
    """Its pages and windows were in host memory meanwhile."""
    engine = Engine(model, slots=2, max_length=128, page_size=4, capacity=70, chunk=16, block=4)
    asked = kvjax.SamplingParams(max_new_tokens=40, ignore_eos=True)
    requests = [engine.submit(row.tolist(), asked, expected=1)[0] for row in PROMPTS]
    paused = 0
    while engine.busy:
        engine.step()
        paused = max(paused, engine.stats.paused)
    assert paused
    for row, request in zip(PROMPTS, requests, strict=True):
        alone = generate(model, [row], asked, chunk=16, page_size=4).tokens[0]
        np.testing.assert_array_equal(request.tokens, alone)


@pytest.mark.parametrize("name", [pytest.param("full", marks=pytest.mark.thorough), "snapkv:ratio=0.5"])
def test_the_engine_gives_the_answers_of_generate(model, name):
    policy = make_policy(name, model=model)
    engine = Engine(model, policy, slots=2, max_length=128, capacity=128, page_size=4, chunk=16, block=4)
    rows = [*PROMPTS, *QUESTIONS]
    requests = [engine.submit(row.tolist(), GREEDY)[0] for row in rows]
    while engine.busy:
        engine.step()
    for row, request in zip(rows, requests, strict=True):
        alone = generate(model, [row], GREEDY, policy=policy, chunk=16, page_size=4).tokens[0]
        np.testing.assert_array_equal(request.tokens, alone)


@pytest.mark.mesh
def test_a_mesh_gives_the_same_answers(model):
    want = generate(model, PROMPTS, GREEDY, chunk=16).tokens
    with jax.set_mesh(make_mesh(data=2, tensor=2, sequence=2)):
        split = sliding_model()
        np.testing.assert_array_equal(generate(split, PROMPTS, GREEDY, chunk=16).tokens, want)


def test_features_and_losses_use_layers_with_full_attention(model):
    """The student that keeps everything and teacher forcing compute what whole sequences do."""
    row = np.random.default_rng(3).integers(0, 61, 64)
    layers = list(captured_layers(model, Policy(), None, [row], ["hidden", "k"]))
    assert len(layers) == 3
    everything = make_policy("full", model=model)
    with use_mesh(model):
        method = Deployed(everything.compile(model).read.admission, window=1)
        hidden, _ = jax.jit(student, static_argnames="window")(
            method, model, jnp.asarray(row[None]), window=1
        )
        student_logits = np.asarray(jax.jit(lambda model, x: model.logits(x))(model, hidden))[0]
    np.testing.assert_allclose(student_logits, logits(model, row[None])[0], atol=1e-5)
    question = Question(row[40:50], row[50:56], "")
    sample = Sample(context=row[:40], questions=(question,))
    run = TeacherForcing(model, [sample])
    found = run(np.ones((3, 4), bool), 1, 1)
    chosen = jax.nn.log_softmax(student_logits[49:55], -1)[np.arange(6), row[50:56]]
    np.testing.assert_allclose(found.loss, -chosen.mean(), rtol=1e-5)


@pytest.mark.thorough
def test_recomputing_layers_of_two_kinds_gives_the_same_gradients(model):
    row = np.random.default_rng(4).integers(0, 61, (1, 64))

    @jax.jit
    def gradients(model, row):
        def loss(model, remat):
            return (model.hidden(row, remat=remat) ** 2).sum()

        return [jax.grad(loss)(model, remat) for remat in (False, True)]

    with use_mesh(model):
        one, other = jax.device_get(gradients(model, jnp.asarray(row)))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4), one, other)
    assert all(np.abs(layer).max() > 0 for layer in jax.tree.leaves(one.layers.qkv)[0])


def test_models_with_other_windows_are_unequal(model):
    other = dataclasses.replace(model.config, sliding_window=8)
    assert other != model.config
