"""Texts that are given: agreement with the full cache and perplexity, against attention recomputed densely."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.command.stopwatch import Stopwatch
from kvjax.evaluate import measuring
from kvjax.evaluate.measuring import Manner, measure, measure_together
from kvjax.mesh import AXES, gather, use_mesh
from kvjax.models.decoder import scan_layers
from kvjax.policies import make_policy
from kvjax.tasks.sample import score_agreements
from kvjax.tasks.text import continuation
from tests.tiny_models import tiny_model

RATIO = 0.25
LENGTHS = (41, 48, 56)


@pytest.fixture(scope="module")
def model():
    return tiny_model(qk_norm=False)  # else all keys have one norm


@pytest.fixture(scope="module")
def texts():
    """No token comes twice in one: in the first layer its keys would have one norm."""
    return [np.random.default_rng(n).permutation(61)[:n].astype(np.int32) for n in LENGTHS]


def dense_logits(model, text, read, kept):
    """Logits after every token where, once `read` tokens were read, each head keeps those `kept` with the smallest
    keys, as the eviction by the keys' norm does."""

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

    with use_mesh(model):
        tokens = jnp.asarray(text[None])
        position = jnp.broadcast_to(jnp.arange(text.size), tokens.shape)
        layers = jnp.zeros(model.config.num_layers)
        x, _, _ = scan_layers(model, model.embed_tokens(tokens), position, attend, xs=layers)
        return np.asarray(model.logits(model.norm(x)), np.float64)[0]


def test_agreement_and_perplexity_are_those_of_dense_attention(model, texts):
    samples, manner = [continuation(text) for text in texts], Manner(batch=2)
    full = measure(model, make_policy("full", model=model), samples, manner)
    knorm = make_policy("knorm", model=model, ratio=RATIO)
    found = measure(model, knorm, score_agreements(samples, full.said), manner)
    same, right, surprise, surprise_full = [], [], [], []
    for text, sample in zip(texts, samples, strict=True):
        read, count = len(sample.context), len(sample.questions[0].answer)
        assert count == len(text) // 8
        true, last = text[-count:], slice(-count - 1, -1)
        ours = dense_logits(model, text, read, int(RATIO * read))[last]
        whole = dense_logits(model, text, read, read)[last]
        same.append((ours.argmax(-1) == whole.argmax(-1)).mean())
        right.append((whole.argmax(-1) == true).mean())
        for logits, record in ((ours, surprise), (whole, surprise_full)):
            record += (np.log(np.exp(logits).sum(-1)) - logits[np.arange(count), true]).tolist()
    assert 0 < np.mean(same) < 1
    assert found.score == pytest.approx(np.mean(same))
    assert found.perplexity == pytest.approx(np.exp(np.mean(surprise)), rel=1e-4)
    assert full.score == pytest.approx(np.mean(right))
    assert full.perplexity == pytest.approx(np.exp(np.mean(surprise_full)), rel=1e-4)
    assert abs(full.perplexity - found.perplexity) > 0.01 * full.perplexity
    assert found.answers == full.answers == sum(length // 8 for length in LENGTHS)


def test_the_full_cache_agrees_with_itself_in_any_batch(model, texts):
    samples, full = [continuation(text) for text in texts], make_policy("full", model=model)
    said = measure(model, full, samples, Manner(batch=2)).said
    assert measure(model, full, score_agreements(samples, said), Manner(batch=3, chunk=16)).score == 1


def test_methods_that_share_a_reading_are_measured_as_each_alone(model, texts, monkeypatch):
    samples, manner, groups = [continuation(text) for text in texts], Manner(batch=2), []
    policies = [
        [make_policy("full", model=model)],
        [make_policy("knorm", model=model, ratio=ratio) for ratio in (RATIO, 0.5)],
        [make_policy("snapkv", model=model, ratio=0.5, observed=4)],
        [make_policy("expected_attention", model=model, ratio=0.5)],
        [make_policy("quest", model=model, ratio=ratio) for ratio in (0.2, 0.6)],
        [make_policy("h2o", model=model, ratio=0.5)],
    ]
    alone = [measure(model, policy, samples, manner) for own in policies for policy in own]
    read = measuring.read
    monkeypatch.setattr(measuring, "read", lambda *given: (groups.append(given[2]), read(*given))[1])
    together = measure_together(model, policies, samples, manner)
    assert groups == [samples[:2], samples[2:]]
    for one, other in zip(alone, together, strict=True):
        assert (one.score, one.footprint, one.peak, one.bytes) == (
            other.score, other.footprint, other.peak, other.bytes,
        )  # fmt: skip
        assert one.perplexity == pytest.approx(other.perplexity, rel=1e-5)
        np.testing.assert_array_equal(one.kv_ratios, other.kv_ratios)
    figures = [found.perplexity for found in together]
    assert all(abs(one - other) > 1e-3 for one, other in itertools.combinations(figures, 2))
    # budgets are traced
    policies[1] = [make_policy("knorm", model=model, ratio=ratio) for ratio in (0.3, 0.6)]
    watch = Stopwatch()
    measure_together(model, policies, samples, manner)
    watch.lap()
    assert not watch.compiled
