"""Heads that stream between calls: what each query sees, against masks that are written out call by call."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.inference import sampling
from kvjax.inference.forward import pieces
from kvjax.mesh import AXES, gather, use_mesh
from kvjax.models.decoder import scan_layers
from kvjax.policies import make_policy
from tests.inference.cached import LENGTH, cached_logits
from tests.inference.dense import dense_logits, logits_over_what_is_stored

SINK, RECENT, NEW, LONGEST = 2, 7, 6, 150
WHOLE = np.array([[1, 0, 0, 1], [0, 1, 0, 0], [0, 0, 0, 1]])
LENGTHS = 120, 77, 3
RANDOM = np.random.default_rng(5)
PROMPTS = [RANDOM.integers(0, 61, length) for length in LENGTHS]


@pytest.fixture(scope="module")
def policy(model):
    table = {"pattern": WHOLE, "sink": SINK, "window": RECENT + 1}
    return make_policy("head_pattern", model=model, streaming="between_calls", **table)


def chunks(tokens, size):
    return [min(size, tokens - at) for at in range(0, tokens, size)]


def visible(calls):
    """What each query of a streaming head sees [t t], by a list of what it holds."""
    mask, held, seen = np.zeros((sum(calls), sum(calls)), bool), [], 0
    for count in calls:
        for query in range(seen, seen + count):
            held.append(query)
            mask[query, held] = True
        seen += count
        held = [j for j in held if j < SINK or j >= seen - RECENT]
    return mask


@jax.jit
def _masked(model, tokens, streaming, whole):
    def attend(step, _, whole):
        q, k, v = gather((step.q, step.k, step.v), *AXES)
        index = jnp.arange(q.shape[2])
        mask = jnp.where(whole[:, None, None], index[:, None] >= index, streaming)
        k, v, mask = (
            jnp.repeat(x, q.shape[1] // whole.size, axis) for x, axis in ((k, 1), (v, 1), (mask, 0))
        )
        s = jnp.einsum("bnth,bnsh->bnts", q, k) / np.sqrt(k.shape[-1])
        o = jnp.einsum("bnts,bnsh->bnth", jax.nn.softmax(jnp.where(mask, s, -1e30), -1), v)
        return jax.sharding.reshard(o, jax.typeof(step.q).sharding.spec), None, None

    position = jnp.arange(tokens.shape[1])[None]
    x = scan_layers(model, model.embed_tokens(tokens), position, attend, xs=whole, token=tokens)[0]
    return jax.nn.log_softmax(model.logits(model.norm(x)))[0]


def expected(model, tokens, calls, whole=WHOLE):
    """The log-probabilities after every token, read in these calls; padded, so that all share a program."""
    assert sum(calls) == len(tokens)
    streaming = visible([*calls, LONGEST - len(tokens)])
    with use_mesh(model):
        padded = jnp.asarray(np.pad(tokens, (0, LONGEST - len(tokens))), jnp.int32)[None]
        return np.asarray(_masked(model, padded, streaming, np.asarray(whole, bool)))[: len(tokens)]


def check_answers(model, answers, before, calls):
    """Greedy answers and their log-probabilities, of tokens that were read in these calls before them."""
    for answer, logprobs, tokens, own in zip(answers.tokens, answers.logprobs, before, calls, strict=True):
        line = np.concatenate([tokens, answer[:-1]])
        want = expected(model, line, [*own, *[1] * (NEW - 1)])[len(tokens) - 1 :]
        np.testing.assert_array_equal(answer, want.argmax(-1))
        np.testing.assert_allclose(logprobs, want.max(-1), atol=1e-5)


@pytest.mark.parametrize(
    "chunk", [7, *(pytest.param(x, marks=pytest.mark.thorough) for x in (1, 40, 100, 200))]
)
def test_a_prompt_s_chunks_are_its_calls_and_then_every_token_is_one(model, policy, chunk):
    """Prompts of several lengths in a batch. Of 120 and 100 tokens a call would else be cut into compiled sizes."""
    options = {"max_new_tokens": NEW, "eos": (), "logprobs": True, "page_size": 4}
    answers = kvjax.sample(model, PROMPTS, policy=policy, chunk=chunk, **options)
    check_answers(model, answers, PROMPTS, [chunks(length, chunk) for length in LENGTHS])


@pytest.mark.thorough
def test_a_conversation_goes_on_with_calls_of_its_own(model, policy):
    questions = [RANDOM.integers(0, 61, length) for length in (13, 1, 9)]
    cache = kvjax.prefill(model, PROMPTS, policy=policy, chunk=40, page_size=4)
    options = {"max_new_tokens": NEW, "eos": (), "logprobs": True}
    answers = kvjax.sample(model, questions, policy=policy, cache=cache, chunk=8, **options)
    lines = [np.concatenate(both) for both in zip(PROMPTS, questions, strict=True)]
    calls = [chunks(n, 40) + chunks(len(q), 8) for n, q in zip(LENGTHS, questions, strict=True)]
    check_answers(model, answers, lines, calls)


@pytest.mark.thorough
def test_padding_leaves_no_trace(model, policy, tokens):
    """Every token's logits, in calls of which a row has all, some or none; what is padding has any content."""
    lengths, padded = np.array([LENGTH, 21]), np.array(tokens)
    padded[1, 21:] = 60
    found, cache = cached_logits(model, policy, padded, [16, 10, 14], lengths=lengths)
    for row, calls in enumerate(([16, 10, 14], [16, 5])):
        want = expected(model, tokens[row, : sum(calls)], calls)
        own = np.asarray(jax.nn.log_softmax(found[row, : sum(calls)]))
        np.testing.assert_allclose(own, want, atol=1e-5)
        length = np.asarray(cache.layers.length)[:, row]
        np.testing.assert_array_equal(length, np.where(WHOLE, sum(calls) - RECENT, SINK))


def test_one_call_is_dense_attention_whatever_streams(model, policy, tokens):
    found, _ = cached_logits(model, policy, tokens, [LENGTH])
    np.testing.assert_allclose(found, kvjax.logits(model, tokens), atol=1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize("streaming", ["exact", "between_calls"])
def test_heads_that_all_keep_everything_are_full_attention(model, tokens, streaming):
    table = {"pattern": np.ones((3, 4)), "sink": 0, "window": 3}
    policy = make_policy("head_pattern", model=model, streaming=streaming, **table)
    found, _ = cached_logits(model, policy, tokens, [9, 16, 1, 14])
    np.testing.assert_allclose(found, kvjax.logits(model, tokens), atol=1e-4)


def test_calls_of_one_token_are_the_exact_window(model, policy, tokens):
    """Which counts the query's own token: RECENT older ones and itself."""
    exact = make_policy("head_pattern", model=model, pattern=WHOLE, sink=SINK, window=RECENT + 1)
    want, _ = dense_logits(model, exact, tokens)
    found, _ = cached_logits(model, policy, tokens, [1] * LENGTH)
    np.testing.assert_allclose(found, want, atol=1e-4)


def test_streaming_llm_has_it_too(model):
    policy = make_policy(
        "streaming_llm", model=model, sink=SINK, window=RECENT + 1, streaming="between_calls"
    )
    answer = kvjax.sample(
        model, PROMPTS[:1], policy=policy, chunk=40, max_new_tokens=1, eos=(), logprobs=True
    )
    want = expected(model, PROMPTS[0], [40, 40, 40], np.zeros((3, 4)))[-1]
    assert answer.logprobs is not None
    np.testing.assert_allclose(answer.logprobs[0], [want.max()], atol=1e-5)


@pytest.mark.thorough
def test_an_eviction_over_it_leaves_what_is_then_seen(model, policy):
    """A call of one token after the compaction sees itself and every entry that is stored."""
    told = {"pattern": WHOLE, "sink": SINK, "window": RECENT + 1, "streaming": "between_calls"}
    prompts = [PROMPTS[0][:60], PROMPTS[1][:55]]
    over = make_policy("head_pattern", model=model, eviction="snapkv:observed=4", entries=20, **told)
    cache = kvjax.prefill(model, prompts, policy=over, chunk=40, page_size=4)
    before = kvjax.prefill(model, prompts, policy=policy, chunk=40, page_size=4)
    lengths, had = np.asarray(cache.layers.length), np.asarray(before.layers.length)
    np.testing.assert_array_equal(lengths, np.minimum(had, 20 - RECENT))
    want = logits_over_what_is_stored(model, cache, [5, 6])
    answers = sampling.sample(
        model, [[5], [6]], policy=over, cache=cache, max_new_tokens=1, eos=(), logprobs=True
    )
    assert answers.logprobs is not None
    likely = np.asarray(jax.nn.log_softmax(want)).max(-1)
    np.testing.assert_allclose(np.concatenate(answers.logprobs), likely, atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 16, 100, 3000, 40000])
def test_a_chunk_that_is_one_call_is_padded_to_the_next_size(chunk):
    """Those that other policies run, too."""
    few = {size for tokens in range(1, chunk + 1, 7) for _, size in pieces(tokens, chunk)}
    for tokens in {1, chunk // 3 + 1, chunk - 1 or 1, chunk}:
        ((count, size),) = pieces(tokens, chunk, whole=True)
        assert count == tokens
        assert size in few | {max(chunk, 16)}
        assert all(other < tokens for other in few if other < size)
