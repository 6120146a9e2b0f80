"""Tests of several questions about one context, as a batch that shares its pages."""

import jax
import numpy as np
import pytest

import kvjax
from kvjax import cache as caches
from kvjax.cache import CapacityError
from kvjax.errors import UserError
from kvjax.inference import generate, prefill, stream
from kvjax.mesh import make_mesh
from kvjax.models.decoder import unfused_values
from kvjax.policies import make_policy
from kvjax.sampling_params import SamplingParams
from tests.inference.contexts import CONTEXTS, QUESTIONS, RANDOM, SAMPLING, WITH_LOGPROBS, policies
from tests.policies.captured import PAGE, pages_are_whole
from tests.tiny_models import tiny_gates, tiny_model

THOROUGH = "full", "snapkv", "h2o", "r_kv", "wgkv", "max_entries", "fast_kvzip"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.thorough if x in THOROUGH else ()) for x in policies(None)]
)
def test_forks_give_the_answers_of_lone_questions_and_do_not_change_the_context(model, name):
    policy = policies(model)[name]()
    cache = prefill(model, CONTEXTS[:1], policy=policy, page_size=PAGE, chunk=32)
    before = jax.device_get(cache)
    alone = [
        generate(model, [row], policy=policy, cache=cache, sampling=SAMPLING).tokens[0] for row in QUESTIONS
    ]
    parts = []
    for block in stream(model, QUESTIONS, SAMPLING, policy=policy, cache=cache, share=True):
        pages_are_whole(block.cache)
        parts.append(block.tokens)
    together = list(map(np.concatenate, zip(*parts, strict=True)))
    np.testing.assert_array_equal(together, alone)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(cache), before)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["r_kv", "wgkv"])
def test_other_questions_do_not_change_a_fork_s_answer(model, name):
    policy = policies(model)[name]()
    cache = prefill(model, CONTEXTS[:1], policy=policy, page_size=PAGE, chunk=32)
    question, reversed_question, shifted_question = QUESTIONS[2], QUESTIONS[2][::-1], (QUESTIONS[2] + 1) % 61
    options = {"policy": policy, "cache": cache, "share": True, "sampling": WITH_LOGPROBS}
    first, second = (
        generate(model, [question, row], **options) for row in (reversed_question, shifted_question)
    )
    np.testing.assert_array_equal(first.tokens[0], second.tokens[0])
    np.testing.assert_array_equal(first.logprobs[0].chosen, second.logprobs[0].chosen)
    assert (first.logprobs[1].chosen != second.logprobs[1].chosen).any()


@pytest.mark.slow
def test_sixteen_questions_take_little_more_than_one(model):
    policy, questions = make_policy("full"), [RANDOM.integers(0, 61, 4) for _ in range(16)]
    cache = prefill(model, [np.tile(CONTEXTS[0], 30)], policy=policy)
    sampling = SamplingParams(max_new_tokens=12, ignore_eos=True)
    options = {"sampling": sampling, "policy": policy, "cache": cache}
    one, all_ = generate(model, questions[:1], **options), generate(model, questions, share=True, **options)
    np.testing.assert_array_equal(all_.tokens[0], one.tokens[0])
    assert (one.stats.entries == 1890 + 4 + 11).all()
    assert all_.stats.bytes <= 1.3 * one.stats.bytes
    # the context is held once, and every fork has the page that it goes on in and the next one
    assert all_.stats.pages == 12 * (1890 // 16 + 16 * 2)


@pytest.mark.mesh
@pytest.mark.parametrize(
    "shape", [pytest.param({}, marks=pytest.mark.thorough), {"fsdp": 2, "tensor": 2}], ids=str
)
def test_each_context_has_its_own_questions(shape):
    """This holds on a mesh too, where a context's forks stay on its devices."""
    with jax.set_mesh(make_mesh(**shape)):
        model = tiny_model(qk_norm=False)
        policy = make_policy("wgkv:tau=0.5,window=6", model=model, gates=tiny_gates(model))
        cache = prefill(model, CONTEXTS, policy=policy, page_size=PAGE)
        options = {"policy": policy, "cache": cache, "sampling": WITH_LOGPROBS}
        found = generate(model, QUESTIONS, share=[1, 0, 1], **options)
        for place, context in enumerate([1, 0, 1]):
            alone = generate(model, [QUESTIONS[place]] * 2, **options)
            np.testing.assert_array_equal(found.tokens[place], alone.tokens[context])
            np.testing.assert_allclose(
                found.logprobs[place].chosen, alone.logprobs[context].chosen, atol=1e-5
            )
            np.testing.assert_array_equal(found.stats.entries[:, place], alone.stats.entries[:, context])
            assert found.stats.tokens[place] == alone.stats.tokens[context]
        assert found.stats.tokens.shape == (3,)


@pytest.mark.thorough
def test_n_answers_to_a_question_are_forks(model):
    policy = make_policy("full")
    cache = prefill(model, CONTEXTS, policy=policy)
    sampling = SamplingParams(max_new_tokens=8, temperature=1.0, n=2, ignore_eos=True)
    found = generate(model, [*QUESTIONS[:2]] * 2, sampling, policy=policy, cache=cache, share=True)
    lines = [np.concatenate([CONTEXTS[of // 2], QUESTIONS[of % 2]]) for of in range(4)]
    np.testing.assert_array_equal(found.tokens, generate(model, lines, sampling, policy=policy).tokens)


@pytest.mark.thorough
def test_forks_can_be_forked_and_unused_contexts_are_freed(model):
    policy = make_policy("wgkv:tau=0.5,window=6", model=model, gates=tiny_gates(model))
    cache = prefill(model, CONTEXTS, policy=policy, page_size=PAGE)
    for block in stream(model, QUESTIONS[:2], SAMPLING, policy=policy, cache=cache, share=[0, 0]):
        last = block.cache
    again = generate(model, [QUESTIONS[2]] * 4, policy=policy, cache=last, share=True, sampling=SAMPLING)
    np.testing.assert_array_equal(again.tokens[0], again.tokens[1])
    np.testing.assert_array_equal(again.tokens[2], again.tokens[3])
    first = generate(model, [QUESTIONS[0]] * 2, policy=policy, cache=cache, sampling=SAMPLING).tokens[0]
    line = np.concatenate([CONTEXTS[0], QUESTIONS[0], first[:-1], QUESTIONS[2]])
    # the last token of an answer is not yet read
    assert int(last.seen[0]) == 63 + 5 + 17 - 1
    whole = generate(model, [line], policy=policy, page_size=PAGE, sampling=SAMPLING)
    np.testing.assert_array_equal(again.tokens[0], whole.tokens[0])
    assert int(np.asarray(last.layers.length)[:, :2].sum()) == int(np.asarray(last.layers.length).sum())


@pytest.mark.mesh
@pytest.mark.parametrize("over", ["layer", pytest.param("model", marks=pytest.mark.thorough)])
def test_forks_with_a_shared_budget_get_enough_pages_on_each_device(over):
    """The keys of the heads are unequal, so that all of the budget goes to one device's heads."""
    with jax.set_mesh(make_mesh(tensor=2)):
        model = tiny_model(qk_norm=False)
        of_heads = np.array([1e-3, 1e-3, 1, 1], np.float32)
        own = unfused_values(model)
        model = model.with_unfused(own | {"layers.k.value": own["layers.k.value"] * of_heads[:, None]})
        policy = make_policy(
            {"knorm": {"entries": 130, "when": "position", "every": 8, "adakv": {"over": over}}}, model=model
        )
        cache = prefill(model, [np.tile(CONTEXTS[0], 6)], policy=make_policy("full"), page_size=PAGE)
        options = {"policy": policy, "cache": cache, "sampling": SAMPLING}
        questions = [*QUESTIONS] * 4
        together = generate(model, questions, share=True, **options)
        for place, question in enumerate(QUESTIONS):
            alone = generate(model, [question], **options)
            np.testing.assert_array_equal(together.tokens[place::3], np.tile(alone.tokens, (4, 1)))
        assert alone.stats.entries[..., :2].sum() > 0.8 * alone.stats.entries.sum()


def test_a_stated_capacity_limits_forks(model):
    cache = prefill(model, CONTEXTS[:1], policy=make_policy("full"), capacity=80, page_size=PAGE)
    with pytest.raises(CapacityError, match="policy full needs"):
        generate(model, QUESTIONS, cache=cache, share=True, sampling=SAMPLING)


@pytest.mark.parametrize(
    ("share", "questions", "message"),
    [
        (True, 3, "the same number of questions of each of the cache's 2 contexts, got 3; share="),
        ([0, 2], 2, "a context in share must be a whole number of at most 1, got 2"),
        ([0], 2, "must say the context of each of 2 questions, got 1"),
        ("all", 2, "share must be True, False or a list"),
    ],
)
def test_a_share_that_does_not_fit_is_refused(model, share, questions, message):
    cache = prefill(model, CONTEXTS)
    with pytest.raises(UserError, match=message):
        generate(model, QUESTIONS[:questions], cache=cache, share=share)


def test_share_needs_a_cache_and_several_questions_need_share(model):
    with pytest.raises(UserError, match="share is for questions of a cache"):
        generate(model, QUESTIONS, share=True)
    with pytest.raises(UserError, match="share=True asks several of each"):
        generate(model, QUESTIONS, cache=prefill(model, CONTEXTS[:1]))
    assert caches.stats(prefill(model, CONTEXTS[:1])).pages > 0


@pytest.mark.mesh
def test_several_questions_need_share_on_a_mesh_too():
    """The mesh adds an empty sequence to the cache, for which there is no question."""
    with jax.set_mesh(make_mesh(fsdp=2)):
        model = tiny_model(qk_norm=False)
        cache = prefill(model, CONTEXTS[:1])
        with pytest.raises(
            UserError, match="the cache holds 1 sequences, got 2 prompts: share=True asks several"
        ):
            generate(model, QUESTIONS[:2], cache=cache)


@pytest.mark.slow
def test_forks_that_compact_get_enough_pages(model):
    policy = make_policy("r_kv:entries=24,when=every,every=8", model=model)
    questions = [RANDOM.integers(0, 61, 3) for _ in range(12)]
    options = {"policy": policy, "sampling": WITH_LOGPROBS}
    cache = prefill(model, CONTEXTS[:1], policy=policy, page_size=PAGE)
    found = generate(model, questions, cache=cache, share=True, **options)
    for place in (0, 11):
        alone = generate(model, questions[place : place + 1], cache=cache, **options)
        np.testing.assert_array_equal(found.tokens[place], alone.tokens[0])
        np.testing.assert_allclose(found.logprobs[place].chosen, alone.logprobs[0].chosen, atol=1e-5)


@pytest.mark.mesh
@pytest.mark.thorough
def test_forks_that_are_unequally_spread_over_devices_are_not_continued(tmp_path):
    with jax.set_mesh(make_mesh(fsdp=2)):
        model, policy = tiny_model(qk_norm=False), make_policy("full")
        cache = prefill(model, CONTEXTS, policy=policy)
        for block in stream(model, QUESTIONS, SAMPLING, policy=policy, cache=cache, share=[1, 0, 1]):
            unequal = block.cache
        for ask in (
            lambda: generate(model, QUESTIONS, policy=policy, cache=unequal, sampling=SAMPLING),
            lambda: generate(model, QUESTIONS, policy=policy, cache=unequal, share=True, sampling=SAMPLING),
            lambda: kvjax.save_cache(tmp_path, unequal, model, policy),
        ):
            with pytest.raises(UserError, match="forks that are unequally spread over the mesh's devices"):
                ask()
