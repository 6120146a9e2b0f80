"""Test guidance: it keeps the entries that its queries attend to, and leaves the context unchanged. Test also
OracleKV's allocations and its texts."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import cache as caches
from kvjax.errors import UserError
from kvjax.inference import generate, prefill
from kvjax.policies import OracleKV, Policy, Ratio, Schedule, Trigger, make_policy
from kvjax.policies.base import Guided
from kvjax.policies.budget import whole_entries
from kvjax.policies.guidance import TEXTS, text, token_ids
from kvjax.policies.registry import EVICTIONS
from kvjax.policies.views import Stored
from kvjax.sampling_params import SamplingParams
from tests.policies import published
from tests.policies.captured import LENGTHS, PAGE, captured_layers, entries, pages_are_whole, retained_pages
from tests.tasks.model_tokenizers import byte_tokenizer

GUIDANCE = (3, 9, 27, 20, 7, 11, 50, 2, 31, 44)
RATIO = 0.3
PREFILL = {"max_new_tokens": 12, "page_size": PAGE}
"""The options of most prefills here, so that they share programs."""
QUESTIONS, ANSWERS = [[5, 6, 7], [8, 9]], SamplingParams(max_new_tokens=8, logprobs=0)


def guided_scores(model, prompt, tokens=GUIDANCE, **options):
    """Return by layer the attention that the guidance's queries pay to the prompt's entries, by the dense formula `[k
    s]`."""
    layers = captured_layers(model, np.concatenate([prompt, tokens]))
    return [published.snapkv(c, len(tokens), **options)[:, : len(prompt)] for c in layers]


def keys_of(model, prompt):
    """Return by layer the prompt's keys, where nothing follows it."""
    return [c.k for c in captured_layers(model, prompt)]


def stored_entries(cache):
    """Return the retained entries of each head, keys and values as they are stored."""
    length, pool = np.asarray(cache.layers.length), np.asarray(cache.pages.pool)
    return [
        pool[retained_pages(cache, *row)].reshape(-1, pool.shape[-1])[: length[row]]
        for row in np.ndindex(length.shape)
    ]


@pytest.mark.slow
def test_the_entries_that_guidance_attends_to_stay(model, prompts):
    """The score is the sum over the guidance's queries, smoothed over five neighbours, as a mean over the group. There
    is no window and no sink; no token of the guidance is kept, and keys are as they are without it."""
    policy = make_policy({"oraclekv": {"ratio": RATIO, "guidance": GUIDANCE}}, model=model)
    cache = prefill(model, prompts, policy=policy, **PREFILL)
    pages_are_whole(cache)
    np.testing.assert_array_equal(cache.seen, LENGTHS)
    dropped_last_tokens = 0
    for b, prompt in enumerate(prompts):
        kept = whole_entries(RATIO * LENGTHS[b])
        for layer, (scores, k) in enumerate(
            zip(guided_scores(model, prompt), keys_of(model, prompt), strict=True)
        ):
            for head, mask in enumerate(published.best(scores, kept)):
                keys = entries(cache, layer, b, head)
                assert len(keys) == kept
                np.testing.assert_allclose(keys, k[head, mask], atol=1e-4)
                dropped_last_tokens += not mask[-1]
    assert dropped_last_tokens, "the last token of a prompt is not protected"


@pytest.mark.parametrize(
    ("pool", "expected", "best"),
    [(1, [0.5, 0.2, 0.8, 0.2], {0, 2}), (3, [0.7 / 3, 0.5, 0.4, 1 / 3], {1, 2})],
)
def test_smoothing_changes_the_best_entries(pool, expected, best):
    """In the note's example, a head attends to four entries with guidance of two tokens. Without smoothing the first
    and third of the sums are best; with three neighbours others are."""
    rows = np.array([[0.4, 0.1, 0.3, 0.1, 0.1, 1], [0.1, 0.1, 0.5, 0.1, 0.1, 0.1]])
    q = np.log(rows) * 6**0.5
    blank, all_of_them = jnp.zeros((1, 1, 6), jnp.int32), jnp.ones((1, 1, 6), bool)
    stored = Stored(
        k=jnp.asarray(np.eye(6, dtype=np.float32)[None, None]),
        v=jnp.zeros((1, 1, 6, 6)),
        place=jnp.arange(6)[None, None],
        scored=all_of_them,
        eligible=all_of_them,
        forced=~all_of_them,
        count=blank[..., 0],
        seen=blank[0, 0, :1],
        output=jnp.zeros((1, 6, 1)),
        frequencies=np.zeros(3, np.float32),
        rope_scale=1.0,
        layer=blank[0, 0, 0],
        head=blank[0, 0, :1],
        metadata={},
        observations=jnp.asarray(q, jnp.float32)[None, None],
        causal=True,
    )
    # the score is the mean over the two rows, and the sum is twice that
    score = 2 * np.asarray(jax.jit(lambda: OracleKV(observed=2, pool=pool).score((), stored))())[0, 0, :4]
    np.testing.assert_allclose(score, expected, atol=1e-5)
    assert set(np.argsort(-score)[:2]) == best


@pytest.mark.slow
def test_with_a_full_budget_guidance_changes_nothing(model, prompts):
    """Keys and values are those of a cache that never saw the guidance. A question is answered as if there had been no
    guidance, at the positions after the context, for guidance of any length."""
    policies = [
        make_policy("full", model=model),
        *(
            make_policy({"oraclekv": {"ratio": 1.0, "guidance": GUIDANCE[:count]}}, model=model)
            for count in (1, 10)
        ),
    ]
    stored, answers = [], []
    for policy in policies:
        cache = prefill(model, prompts, policy=policy, **PREFILL)
        np.testing.assert_array_equal(cache.seen, LENGTHS)
        stored.append(stored_entries(cache))
        answers.append(generate(model, QUESTIONS, ANSWERS, policy=policy, cache=cache))
    for rows, answer in zip(stored[1:], answers[1:], strict=True):
        for guided, unguided in zip(rows, stored[0], strict=True):
            np.testing.assert_array_equal(guided, unguided)
        np.testing.assert_array_equal(answer.tokens, answers[0].tokens)
        for logprobs, expected in zip(answer.logprobs, answers[0].logprobs, strict=True):
            np.testing.assert_array_equal(logprobs.chosen, expected.chosen)


def test_guidance_by_the_question_matches_snapkv_with_the_question(model, prompts):
    """SnapKV's window is the question, which it keeps; with guidance the question comes afterwards."""
    policy = make_policy({"oraclekv": {"entries": 20, "guidance": GUIDANCE}}, model=model)
    guided_cache = prefill(model, prompts, policy=policy, **PREFILL)
    count = len(GUIDANCE)
    aware = make_policy({"snapkv": {"entries": 20 + count, "observed": count}}, model=model)
    both = [np.concatenate([prompt, GUIDANCE]) for prompt in prompts]
    aware_cache = prefill(model, both, policy=aware, page_size=PAGE)
    for row in np.ndindex(3, 2, 4):
        np.testing.assert_allclose(
            entries(guided_cache, *row), entries(aware_cache, *row)[:-count], atol=1e-5
        )


def test_questions_do_not_change_the_cache(model, prompts):
    policy = make_policy({"oraclekv": {"ratio": RATIO, "guidance": GUIDANCE}}, model=model)
    cache = prefill(model, prompts, policy=policy, **PREFILL)
    before = [entries(cache, *row).copy() for row in np.ndindex(3, 2, 4)]
    first, _, again = (
        generate(model, questions, ANSWERS, policy=policy, cache=cache).tokens
        for questions in (QUESTIONS, [[8, 9, 10], [10, 11]], QUESTIONS)
    )
    np.testing.assert_array_equal(first, again)
    for row, expected in zip(np.ndindex(3, 2, 4), before, strict=True):
        np.testing.assert_array_equal(entries(cache, *row), expected)


def test_allocations_share_the_budget_by_head_or_by_layer(model, prompts):
    """Ada: the total is the same, and each head has at least a fifth of its share. Pyramid: the budgets lie on
    kvpress's line if its last layer has as many entries as the guidance has tokens; otherwise they are equal."""
    lengths = {}
    for name, count in (("uniform", 1), ("ada", 1), ("pyramid", 1), ("a pyramid of too few", 10)):
        allocation = "pyramid" if "pyramid" in name else name
        options = {"ratio": 0.5, "guidance": GUIDANCE[:count], "allocation": allocation}
        policy = make_policy({"oraclekv": options}, model=model)
        cache = prefill(model, prompts, policy=policy, **PREFILL)
        lengths[name] = np.asarray(cache.layers.length)
    share = lengths["uniform"]
    np.testing.assert_array_equal(share[:, 0], 30)
    np.testing.assert_array_equal(lengths["ada"].sum(-1), share.sum(-1))
    assert (lengths["ada"] >= whole_entries(0.2 * share.min())).all()
    assert (lengths["ada"] != share).any()
    # layers lie on a line from 1.5 to 58.5
    np.testing.assert_array_equal(lengths["pyramid"][:, 0], np.repeat([[58], [30], [2]], 4, 1))
    np.testing.assert_array_equal(lengths["a pyramid of too few"], share)


@pytest.mark.slow
def test_guidance_protects_no_entries(model, prompts):
    """This holds for a small budget, a small chunk or a window: no place is reserved for the guidance or the newest
    tokens."""
    small_budget = make_policy({"oraclekv": {"ratio": 0.1, "guidance": GUIDANCE}}, model=model)
    cache = prefill(model, [GUIDANCE[:6], prompts[0]], policy=small_budget, page_size=PAGE)
    assert np.asarray(cache.layers.length)[0, :, 0].tolist() == [1, 6]
    # a tenth of the chunk's 20 tokens, or of the last chunk's one, is fewer than the tokens of guidance
    by_chunk = make_policy(
        {"snapkv": {"ratio": 0.1, "guidance": GUIDANCE, "when": "chunk", "chunk": 20}}, model=model
    )
    cache = prefill(model, [prompts[1]], policy=by_chunk, page_size=PAGE)
    assert np.asarray(cache.layers.length)[0, 0].tolist() == [5] * 4
    assert (
        make_policy(
            {"snapkv": {"ratio": 0.4, "guidance": GUIDANCE, "when": "chunk", "chunk": 8}}
        ).schedule.observed_in_context
        == 0
    )
    over = {"streaming_llm": {"sink": 20, "window": 6}, "snapkv": {"entries": 15, "guidance": GUIDANCE}}
    cache = prefill(model, prompts, policy=make_policy(over, model=model), page_size=PAGE)
    np.testing.assert_array_equal(cache.layers.length, 10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("snapkv", {}),
        pytest.param("snapkv", {"group": "max"}, marks=pytest.mark.thorough),
        pytest.param("r_kv", {}, marks=pytest.mark.slow),
    ],
)
def test_without_a_local_window_guidance_looks_at_all_stored_entries(model, prompts, name, options):
    """No guidance token is stored, so the guidance follows every entry. The first layer keeps the same as with a local
    window of one token."""
    kept = []
    for window in (1, 2):
        eviction = {"entries": 9 + window, "guidance": GUIDANCE, **options}
        policy = make_policy({"streaming_llm": {"sink": 20, "window": window}, name: eviction})
        kept.append(prefill(model, prompts, policy=policy, **PREFILL))
    for b, head in np.ndindex(2, 4):
        without_window, with_window = (entries(cache, 0, b, head) for cache in kept)
        assert len(without_window) == 10
        np.testing.assert_array_equal(without_window, with_window)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("snapkv:adakv", marks=pytest.mark.slow),
        *(
            pytest.param(x, marks=pytest.mark.thorough)
            for x in ("tova", "snapkv", "snapkv:pyramidkv", "snapkv:critical_kv", "r_kv")
        ),
    ],
)
def test_methods_that_look_back_take_guidance(model, prompts, name):
    """This holds at the prompt's end, by chunk, and over an admission; the guidance gives the same as observers if all
    of them are used."""
    base, *wrapper = name.split(":")
    wrappers: dict[str, Any] = {x: {} for x in wrapper}
    observing = {"observed": len(GUIDANCE)} if base != "tova" else {}
    for more in ({"ratio": 0.4}, {"ratio": 0.5, "when": "chunk", "chunk": 24}):
        guided = make_policy({base: {"guidance": GUIDANCE} | more | wrappers}, model=model)
        observed = make_policy({base: {"observers": GUIDANCE} | more | wrappers | observing}, model=model)
        caches_of = [prefill(model, prompts, policy=policy, page_size=PAGE) for policy in (guided, observed)]
        assert caches.stats(caches_of[0]).kv_ratio < 0.6
        for row in np.ndindex(3, 2, 4):
            np.testing.assert_array_equal(*(entries(cache, *row) for cache in caches_of))
    eviction = {"entries": 25, "guidance": GUIDANCE} | wrappers
    over = make_policy({"streaming_llm": {"sink": 20, "window": 12}, base: eviction}, model=model)
    cache = prefill(model, prompts, policy=over)
    np.testing.assert_array_equal(cache.seen, LENGTHS)


def test_observed_limits_the_queries_of_guidance():
    options = {"observed": 4, "ratio": 0.5, "guidance": GUIDANCE}
    for policy in (make_policy({"snapkv": options}), make_policy({"snapkv": options | {"adakv": {}}})):
        assert policy.schedule.needs.observed == 4
    assert make_policy(
        {"snapkv": {"ratio": 0.5, "guidance": np.array(GUIDANCE), "adakv": {}}}
    ).schedule.needs.observed == len(GUIDANCE)
    policy = make_policy({"oraclekv": {"observed": 3, "ratio": 0.5, "observers": np.array(GUIDANCE)}})
    assert (policy.schedule.trigger.guidance, policy.schedule.needs.observed) == (GUIDANCE, 3)


def test_guidance_texts_are_tokenized():
    """The text is tokenized by itself after an empty line, and G1 is the default."""
    tokenizer = byte_tokenizer()
    usual = make_policy("oraclekv:ratio=0.2", tokenizer=tokenizer)
    ids = tuple(tokenizer("\n\n" + text("G1"), add_special_tokens=False)["input_ids"])
    assert usual.schedule.trigger == Trigger(observers=ids)
    assert usual.schedule.needs.observed == len(ids)
    assert make_policy("oraclekv:ratio=0.2,guidance=G1", tokenizer=tokenizer).schedule == usual.schedule
    policy = make_policy(
        {"snapkv": {"ratio": 0.2, "guidance": "What is it?", "when": "chunk", "chunk": 512}},
        tokenizer=tokenizer,
    )
    assert policy.schedule.trigger == Trigger(
        "chunk", chunk=512, observers=token_ids("What is it?", tokenizer)
    )
    assert policy.schedule.needs.observed == len("\n\nWhat is it?")


def test_the_published_texts_are_included():
    """The texts are those of Table A4, with its typing errors."""
    assert set(TEXTS) == {"G1", "G2", "G3", "G4", "G5", "G6", "G7", "T1", "T2"}
    for name, words in {
        "G1": "Also, Do not forget the global information and the relations between entities.",
        "G2": "regarding the context above. including specific details",
        "G3": "3. relations, like family ties and event linkages, 4. semantic details",
        "G4": "9) Calculating extreme values from arrays.",
        "G5": "4) Write code accurately based on the textual instructions or examples.",
        "G6": "paragraph counting, retrival, etc.",
        "G7": "These questions will ask you to summarize the above context includes: question answering",
        "T1": "write a summary of all the contexts above. Please take care of the global information.",
        "T2": "find a special number in the context above.",
    }.items():
        assert words in text(name)
        assert "\n" not in text(name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"name": "knorm", "guidance": GUIDANCE},
            "knorm: guidance is for methods that look back at the last tokens (snapkv, oraclekv, defensive_kv, dropkv, "
            "tova, r_kv)",
        ),
        ({"guidance": 5}, "guidance must be a text or at least one token id, got 5"),
        ({"guidance": ["a"]}, "guidance must be a text or at least one token id, got ['a']"),
        ({"guidance": {"a": 1}}, "guidance must be a text or at least one token id, got {'a': 1}"),
        ({"guidance": ""}, "guidance must be one of G1, "),
        ({"guidance": []}, "guidance must be a text or at least one token id, got none"),
        ({"guidance": "G1"}, "guidance='G1' is a text, which needs tokenizer= (or give its token ids)"),
        ({}, "guidance='G1' is a text, which needs tokenizer="),
        ({"guidance": b"ab"}, "guidance must be a text or at least one token id, got b'ab'"),
        (
            {"tokenizer": "Qwen/Qwen3-4B"},
            "guidance: tokenizer must come from kvjax.load_tokenizer, got 'Qwen/Qwen3-4B'",
        ),
        (
            {"guidance": "a\ud800b", "tokenizer": byte_tokenizer()},
            "guidance must be Unicode text, but character 1 is not: 'a\\ud800b'",
        ),
        ({"guidance": [61]}, "oraclekv: observers have token id 61, the model's vocabulary is 0 … 60"),
        (
            {"guidance": [1], "observers": np.array([2, 3])},
            "oraclekv: got observers and guidance, expected one of them",
        ),
        ({"guidance": [1], "allocation": "fair"}, "allocation is one of uniform, ada, pyramid, got 'fair'"),
        ({"guidance": [1], "when": "every", "every": 4}, "observers=(1,) needs when='prompt' or 'chunk'"),
    ],
)
def test_invalid_guidance_gives_one_line_errors(model, options, message):
    options = {"ratio": 0.5} | options
    name, tokenizer = options.pop("name", "oraclekv"), options.pop("tokenizer", None)
    with pytest.raises(UserError, match=re.escape(message)):
        make_policy({name: options}, model=model, tokenizer=tokenizer)


@pytest.mark.parametrize("name", [x for x, kind in EVICTIONS.items() if not issubclass(kind, Guided)])
def test_methods_that_do_not_look_back_refuse_guidance(model, name):
    with pytest.raises(UserError, match="guidance is for methods that look back at the last tokens"):
        make_policy({name: {"ratio": 0.5, "guidance": GUIDANCE}}, model=model)


def test_a_policy_of_objects_needs_guidance():
    with pytest.raises(UserError, match="oraclekv needs guidance: a text or token ids"):
        Policy(eviction=OracleKV(), schedule=Schedule(Ratio(0.5)))
    policy = Policy(eviction=OracleKV(observed=2), schedule=Schedule(Ratio(0.5), Trigger(observers=(1, 2))))
    assert policy.schedule.needs.observed == 2
