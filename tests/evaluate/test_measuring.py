"""Tests of answers from a cache, with questions that were known or unknown when the contexts were read. For
teacher-forced texts, agreement and perplexity are compared with densely recomputed attention."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cli.stopwatch import Stopwatch
from kvjax.errors import UserError
from kvjax.evaluate import measuring
from kvjax.evaluate.measuring import MeasureSettings, measure, measure_together
from kvjax.inference import generate, logits
from kvjax.mesh import AXES, gather, use_mesh
from kvjax.models import load_model
from kvjax.models.decoder import scan_layers
from kvjax.policies import make_policy
from kvjax.sampling_params import SamplingParams
from kvjax.tasks import Needle, Question, Recall, Sample, builtin_task
from kvjax.tasks.sample import one_question, question_aware, score_agreements
from kvjax.tasks.text import continuation
from tests.inference.delayed import delayed
from tests.tiny_models import tiny_model

CONTEXT, RATIO = 512, 0.2
SETTINGS = MeasureSettings(chunk=128, capacity=1152)
"""The settings of measuring the built-in model's samples."""
TEXT_RATIO = 0.25
LENGTHS = (41, 48, 56)
"""Lengths of the texts that are given."""


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def greedy(model, context, prompt, tokens):
    """Return greedy tokens after context and prompt, by plain attention over a padded line."""
    line = np.concatenate([context, prompt])
    for _ in range(tokens):
        padded = np.pad(line, (0, 40 - line.size))
        line = np.append(line, logits(model, [padded])[0, line.size - 1].argmax())
    return line[-tokens:].astype(np.int32)


def test_answers_are_scored_against_the_models_answers(model):
    """Half of the expected answers are the full model's own, and the others differ in one token."""
    rng = np.random.default_rng(0)
    samples = []
    for _ in range(4):
        context = rng.integers(0, 61, 30).astype(np.int32)
        questions = []
        for kind, wrong in (("right", 0), ("wrong", 1)):
            prompt = rng.integers(0, 61, 3).astype(np.int32)
            answer = greedy(model, context, prompt, 2)
            answer[1] = (answer[1] + wrong) % 61
            questions.append(Question(prompt, answer, kind))
        samples.append(Sample(context, tuple(questions)))
    found = measure(model, make_policy("full"), samples, MeasureSettings(batch=2))
    assert found.by_kind == {"right": 1.0, "wrong": 0.0}
    assert (found.score, found.answers, found.kv_ratio) == (0.5, 8, 1.0)
    np.testing.assert_array_equal(found.rates, 1.0)


@pytest.mark.parametrize("conversation", [False, True])
def test_questions_are_asked_by_themselves_or_in_turn(model, conversation):
    """One sample of the batch has three questions, and the other has one. In a conversation, each question follows the
    earlier questions and the model's answers to them."""
    rng = np.random.default_rng(1)
    samples, wanted = [], []
    for count in (1, 3):
        context, before, answers = rng.integers(0, 61, 12).astype(np.int32), np.zeros(0, np.int32), []
        prompts = [rng.integers(0, 61, 3).astype(np.int32) for _ in range(count)]
        for prompt in prompts:
            answers.append(greedy(model, context, np.concatenate([before, prompt]), 2))
            if conversation:
                before = np.concatenate([before, prompt, answers[-1]])
        questions = (
            Question(*pair, f"{at}") for at, pair in enumerate(zip(prompts, answers, strict=True), 1)
        )
        samples.append(Sample(context, tuple(questions), conversation=conversation))
        wanted.append(answers)
    found = measure(model, make_policy("full"), samples, MeasureSettings(batch=2))
    assert [[tokens.tolist() for tokens in outputs] for outputs in found.outputs] == [
        [tokens.tolist() for tokens in outputs] for outputs in wanted
    ]
    assert (found.score, found.answers) == (1, 4)
    assert found.by_kind == {"1": 1, "2": 1, "3": 1}
    assert found.footprint == 1


@pytest.mark.thorough
def test_max_entries_and_biases_also_apply_to_questions(model):
    """The answers equal those of a run without a break between context and question."""
    rng = np.random.default_rng(1)
    policy = delayed(window=6, max_entries=5, delay=2, biased=True)
    samples = [
        Sample(rng.integers(0, 61, 30), (Question(rng.integers(0, 61, 12), rng.integers(0, 61, 6), "any"),))
        for _ in range(2)
    ]
    found = measure(model, policy, samples, MeasureSettings(batch=2))
    assert found.kv_ratio == 10 / 30
    for sample, (output,) in zip(samples, found.outputs, strict=True):
        line = np.concatenate([sample.context, sample.questions[0].prompt])
        want = generate(model, [line], SamplingParams(max_new_tokens=6, ignore_eos=True), policy=policy)
        np.testing.assert_array_equal(output, want.tokens[0])


def test_policies_that_cannot_share_a_reading_are_refused(model):
    samples = [Sample(np.arange(30), (Question(np.arange(3), np.arange(2), "any"),))]
    for policy in (
        delayed(window=6, max_entries=5),
        delayed(window=6, biased=True),
        make_policy({"snapkv": {"ratio": 0.5, "observed": 4, "observers": [1, 2, 3, 4]}}, model=model),
    ):
        with pytest.raises(UserError, match="cannot share a reading"):
            measure_together(model, [[policy], [make_policy("full")]], samples, MeasureSettings())


@pytest.mark.slow
def test_the_built_in_gates_keep_the_entries_that_questions_need(builtin):
    task = builtin_task(Recall)
    policy = make_policy("wgkv", model=builtin, gates="builtin")
    found = measure(builtin, policy, [task.sample(50 + seed, 512) for seed in range(4)], MeasureSettings())
    assert found.answers == 64
    assert found.score > 0.9
    assert found.kv_ratio < 0.2


@pytest.fixture(scope="module")
def builtin():
    return load_model("builtin")


@pytest.fixture(
    scope="module",
    params=[Needle, pytest.param(Recall, marks=pytest.mark.thorough)],
    ids=lambda kind: kind.name,
)
def samples(request):
    """Return twelve samples, each with one of its questions, at any depth."""
    task = builtin_task(request.param)
    return question_aware(one_question([task.sample(70 + seed, CONTEXT) for seed in range(12)]))


@pytest.mark.thorough
def test_methods_that_observe_the_question_keep_the_entries_it_needs(builtin, samples):
    """Every method that observes queries keeps the entries that the question asks for, at a fifth of all entries."""
    together = [
        [make_policy("full", model=builtin)],
        [make_policy({"snapkv": {"ratio": RATIO, "observed": 8}}, model=builtin)],
        [make_policy({"snapkv": {"observed": 8, "ratio": RATIO, "adakv": {}}}, model=builtin)],
        [make_policy({"tova": {"ratio": RATIO}}, model=builtin)],
        [make_policy({"r_kv": {"ratio": RATIO}}, model=builtin)],
    ]
    full, *found = measure_together(builtin, together, samples, SETTINGS)
    found.append(measure(builtin, make_policy({"h2o": {"ratio": RATIO}}, model=builtin), samples, SETTINGS))
    assert full.score == 1
    assert all(measured.kv_ratio == pytest.approx(RATIO, abs=0.01) for measured in found)
    assert [measured.score for measured in found if measured.score < 0.9] == []


@pytest.mark.thorough
def test_chunks_patched_with_the_question_score_far_better(builtin, samples):
    """PyramidKV runs after every chunk, patched with the question's tokens or naive (KV footprint, section 4)."""

    def score(observers):
        chunks = {"when": "chunk", "chunk": 128, "observers": observers}
        arguments = {"ratio": RATIO, "observed": 8, "pyramidkv": {}}
        policy = make_policy({"snapkv": arguments | chunks}, model=builtin)
        return measure(builtin, policy, samples, SETTINGS).score

    patched, naive = score("prompt"), score("own")
    assert patched >= 0.9
    assert patched > naive + 0.5


@pytest.mark.thorough
def test_only_observing_methods_read_a_known_question(unnormed):
    """KNorm and the full cache are measured as if the question were unknown, alone and together with a method that
    observes it."""
    random = np.random.default_rng(2)
    questions = [Question(random.integers(0, 61, 5), random.integers(0, 61, 3), "any") for _ in range(2)]
    aware = question_aware([Sample(random.integers(0, 61, 30), tuple(questions))])
    policies = [
        [make_policy("full", model=unnormed)],
        [make_policy("knorm:ratio=0.5", model=unnormed)],
        [make_policy("snapkv:ratio=0.5,observed=4", model=unnormed)],
    ]
    together = measure_together(unnormed, policies, aware, MeasureSettings())
    alone = [measure(unnormed, policy, aware, MeasureSettings()) for (policy,) in policies]
    unknown = [dataclasses.replace(sample, question_known=False) for sample in aware]
    for found in (alone, together):
        for (policy,), measured in zip(policies[:2], found[:2], strict=True):
            want = measure(unnormed, policy, unknown, MeasureSettings())
            assert measured.interval == (0, 1), "both questions are about one context"
            for name in ("outputs", "footprint", "footprint_held", "peak", "kv_ratio"):
                np.testing.assert_array_equal(
                    getattr(measured, name), getattr(want, name), f"{policy.name} {name}"
                )
        assert found[2].footprint_held > found[2].footprint


@pytest.fixture(scope="module")
def unnormed():
    return tiny_model(qk_norm=False)  # otherwise all keys would have one norm


@pytest.fixture(scope="module")
def texts():
    """Return texts in which no token comes twice, because its keys would have one norm in the first layer."""
    return [np.random.default_rng(n).permutation(61)[:n].astype(np.int32) for n in LENGTHS]


def dense_logits(model, text, read, kept):
    """Return the logits after every token if each head, after `read` tokens, keeps the `kept` entries with the smallest
    keys, as the eviction by the keys' norm does."""
    padded = np.pad(text, (0, max(LENGTHS) - text.size))
    with use_mesh(model):
        return np.asarray(dense_logits_of_padded(model, padded, read, kept), np.float64)[: text.size]


@jax.jit
def dense_logits_of_padded(model, text, read, kept):
    def attend(step, _, xs):
        q, k, v = gather((step.q, step.k, step.v), *AXES)
        index, groups = jnp.arange(k.shape[2]), q.shape[1] // k.shape[1]
        norm = jnp.where(index < read, jnp.linalg.norm(k, axis=-1), jnp.inf)
        stays = (jnp.argsort(jnp.argsort(norm)) < kept) | (index >= read)
        seen = (index[:, None] >= index) & (stays[:, :, None] | (index < read)[:, None])
        k, v, seen = (jnp.repeat(x, groups, 1) for x in (k, v, seen))
        s = jnp.einsum("bnth,bnsh->bnts", q, k) / np.sqrt(k.shape[-1])
        o = jnp.einsum("bnts,bnsh->bnth", jax.nn.softmax(jnp.where(seen, s, -1e30), -1), v)
        return jax.sharding.reshard(o, jax.typeof(step.q).sharding.spec), None, None

    position = jnp.arange(text.size)[None]
    layers = jnp.zeros(model.config.num_layers)
    x, *_ = scan_layers(model, model.embed_tokens(text[None]), position, attend, xs=layers)
    return model.logits(model.norm(x))[0]


def test_agreement_and_perplexity_equal_those_of_dense_attention(unnormed, texts):
    samples, settings = [continuation(text) for text in texts], MeasureSettings(batch=3)
    full = measure(unnormed, make_policy("full", model=unnormed), samples, settings)
    knorm = make_policy({"knorm": {"ratio": TEXT_RATIO}}, model=unnormed)
    found = measure(unnormed, knorm, score_agreements(samples, full.outputs), settings)
    same, right, surprise, surprise_full = [], [], [], []
    for text, sample in zip(texts, samples, strict=True):
        read, count = len(sample.context), len(sample.questions[0].answer)
        assert count == len(text) // 8
        true, last = text[-count:], slice(-count - 1, -1)
        ours = dense_logits(unnormed, text, read, int(TEXT_RATIO * read))[last]
        whole = dense_logits(unnormed, text, read, read)[last]
        same.append((ours.argmax(-1) == whole.argmax(-1)).mean())
        right.append((whole.argmax(-1) == true).mean())
        for row, record in ((ours, surprise), (whole, surprise_full)):
            record += (np.log(np.exp(row).sum(-1)) - row[np.arange(count), true]).tolist()
    assert 0 < np.mean(same) < 1
    assert found.score == pytest.approx(np.mean(same))
    assert found.perplexity == pytest.approx(np.exp(np.mean(surprise)), rel=1e-4)
    assert full.score == pytest.approx(np.mean(right))
    assert full.perplexity == pytest.approx(np.exp(np.mean(surprise_full)), rel=1e-4)
    assert abs(full.perplexity - found.perplexity) > 0.01 * full.perplexity
    assert found.answers == full.answers == sum(length // 8 for length in LENGTHS)


@pytest.mark.slow
def test_the_full_cache_agrees_with_itself_in_any_batch(unnormed, texts):
    samples, full = [continuation(text) for text in texts], make_policy("full", model=unnormed)
    outputs = measure(unnormed, full, samples, MeasureSettings(batch=1)).outputs
    assert (
        measure(unnormed, full, score_agreements(samples, outputs), MeasureSettings(batch=3, chunk=16)).score
        == 1
    )


ASKED = {"instruction": [3, 1], "resumption": [3, 2], "tail": [4]}


@pytest.mark.thorough
def test_repeating_a_context_counts_in_the_held_footprint(unnormed):
    """The repetition counts in the footprint of what is held, not in the sequence's own. A context of 30 tokens is
    repeated in three parts, each read after all of it."""
    random = np.random.default_rng(2)
    question = Question(random.integers(0, 61, 5), random.integers(0, 61, 3), "any")
    samples, asked = [Sample(random.integers(0, 61, 30), (question,))], 2 + 1
    repeating = make_policy({"kvzip": {"ratio": 1.0, "repeated": 12, **ASKED}}, model=unnormed)
    full = measure(unnormed, make_policy("full", model=unnormed), samples, MeasureSettings())
    found = measure(unnormed, repeating, samples, MeasureSettings())
    assert (found.footprint, found.kv_ratio) == (full.footprint, 1.0)
    np.testing.assert_array_equal(found.outputs, full.outputs)
    length = 30 + 5 + 3 - 1
    # the second and third parts are read with the last 8 tokens of the part before
    passes = np.array([asked + 12, asked + 8 + 12, asked + 8 + 6])
    more = (passes * 30 + passes * (passes + 1) / 2).sum() / (length * (length + 1) / 2)
    assert found.footprint_held == pytest.approx(full.footprint_held + more)
    assert found.peak == pytest.approx((30 + passes.max()) / length)


@pytest.mark.thorough
def test_sharing_a_reading_does_not_change_measurements(unnormed, texts, monkeypatch):
    samples, settings, groups = [continuation(text) for text in texts], MeasureSettings(batch=2), []
    policies = [
        [make_policy("full", model=unnormed)],
        [make_policy({"knorm": {"ratio": ratio}}, model=unnormed) for ratio in (TEXT_RATIO, 0.5)],
        [make_policy("snapkv:ratio=0.5,observed=4", model=unnormed)],
        [make_policy("expected_attention:ratio=0.5", model=unnormed)],
        [make_policy({"quest": {"ratio": ratio}}, model=unnormed) for ratio in (0.2, 0.6)],
        [make_policy("h2o:ratio=0.5", model=unnormed)],
        [
            make_policy({"kvzip": {"ratio": ratio, "repeated": 12, **ASKED}}, model=unnormed)
            for ratio in (0.5, 0.25)
        ],
    ]
    alone = [measure(unnormed, policy, samples, settings) for budgets in policies for policy in budgets]
    read = measuring.read
    monkeypatch.setattr(measuring, "read", lambda *given: (groups.append(given[2]), read(*given))[1])
    together = measure_together(unnormed, policies, samples, settings)
    assert groups == [samples[:2], samples[2:]]
    for one, other in zip(alone, together, strict=True):
        assert (one.score, one.footprint, one.footprint_held, one.peak, one.bytes) == (
            other.score, other.footprint, other.footprint_held, other.peak, other.bytes,
        )  # fmt: skip
        assert one.perplexity == pytest.approx(other.perplexity, rel=1e-5)
        np.testing.assert_array_equal(one.kv_ratios, other.kv_ratios)
    figures = [found.perplexity for found in together]
    assert all(abs(one - other) > 1e-3 for one, other in itertools.combinations(figures, 2))
    # budgets are traced
    policies[1] = [make_policy({"knorm": {"ratio": ratio}}, model=unnormed) for ratio in (0.3, 0.6)]
    watch = Stopwatch()
    measure_together(unnormed, policies, samples, settings)
    watch.lap()
    assert not watch.compiled


@pytest.mark.thorough
def test_int8_entries_keep_their_scales_when_methods_share_a_reading(texts):
    model = tiny_model(qk_norm=False, kv_cache_dtype="int8")
    samples, settings = [continuation(text) for text in texts[:1]], MeasureSettings()
    repeating = {"kvzip": {"ratio": 0.5, "repeated": 12, **ASKED}}
    policies = [[make_policy(policy, model=model)] for policy in ("full", "h2o:ratio=0.5", repeating)]
    together = measure_together(model, policies, samples, settings)
    for (policy,), found in zip(policies, together, strict=True):
        alone = measure(model, policy, samples, settings)
        assert alone.perplexity == pytest.approx(found.perplexity, rel=1e-5)
