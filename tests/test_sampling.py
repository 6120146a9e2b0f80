"""Prefill, chunked prefill and decode against dense attention under the same visibility rule."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax.sampling as sampling
from kvjax import cache as caches
from kvjax.cache import CapacityError
from kvjax.errors import UserError
from kvjax.mesh import AXES, gather, make_mesh, use_mesh
from kvjax.models.decoder import scan_layers
from kvjax.policies import make_policy
from tests.tiny_models import policies_for, tiny_model

LENGTH = 40


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(0).integers(0, 61, (2, LENGTH))


def dense_logits(model, policy, tokens):
    """Every token's logits with the mask {i − j < window} ∪ {j kept} spelled out, and what was kept [l b k t]."""

    def attend(step, _, admission):
        _, priority, _ = admission.score((), step)
        kept = priority >= admission.keep().threshold
        q, k, v, kept = gather((step.q, step.k, step.v, kept), *AXES)
        t, groups = k.shape[2], q.shape[1] // k.shape[1]
        age = jnp.arange(t)[:, None] - jnp.arange(t)
        seen = (age >= 0) & ((age < policy.window) | kept[:, :, None])
        k, v, seen = (jnp.repeat(x, groups, 1) for x in (k, v, seen))
        s = jnp.einsum("bnth,bnsh->bnts", q, k) / np.sqrt(k.shape[-1])
        p = jax.nn.softmax(jnp.where(seen, s, -1e30), -1)
        o = jnp.einsum("bnts,bnsh->bnth", p, v)
        return jax.sharding.reshard(o, jax.typeof(step.q).sharding.spec), None, kept

    with use_mesh(model):
        tokens = jnp.asarray(tokens, jnp.int32)
        position = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        x = model.embed_tokens(tokens)
        admission = gather(policy.admission, "data", "fsdp")
        x, _, kept = scan_layers(model, x, position, attend, xs=admission)
        return np.asarray(model.logits(model.norm(x))), np.asarray(kept)


def cached_logits(model, policy, tokens, calls, page_size=4, lengths=None):
    """Logits of every token fed to the cache in calls of the given sizes, and the cache."""
    lengths = np.full(len(tokens), tokens.shape[1]) if lengths is None else lengths
    with use_mesh(model):
        cache = caches.empty(
            policy, batch=len(tokens), layers=3, kv_heads=4, head_dim=8, tokens=tokens.shape[1],
            dtype=jnp.float32, page_size=page_size, capacity=tokens.shape[1] + policy.window + page_size,
        )  # fmt: skip
        run = jax.jit(lambda m, p, c, t, n: sampling.extend(m, p, c, t, n), donate_argnums=2)
        out, start = [], 0
        for size in calls:
            part = tokens[:, start : start + size]
            valid = np.clip(lengths - start, 0, part.shape[1]).astype(np.int32)
            cache, hidden = run(model, policy, cache, jnp.asarray(part, jnp.int32), jnp.asarray(valid))
            out.append(np.asarray(model.logits(hidden)))
            start += size
        caches.check(cache, policy)
        return np.concatenate(out, 1), cache


@pytest.mark.parametrize(
    ("name", "window"),
    [("full", 1), ("streaming_llm", 6), ("local", 6), ("head_pattern", 6), ("random", 6), ("wgkv", 1), ("wgkv", 6)],
)
def test_prefill_chunks_and_decode_see_exactly_the_window_and_what_was_kept(model, tokens, name, window):
    policy = policies_for(model, window)[name]
    want, kept = dense_logits(model, policy, tokens)
    once, cache = cached_logits(model, policy, tokens, [LENGTH])
    assert np.abs(once - want).max() < 1e-4
    left = kept[..., : LENGTH - window + 1].sum(-1)
    np.testing.assert_array_equal(np.asarray(cache.layers.length), left)
    mixed, cache = cached_logits(model, policy, tokens, [3, 8, 8, 8, 8, 1, 1, 1, 1, 1], page_size=3)
    assert np.abs(mixed - want).max() < 1e-4
    np.testing.assert_array_equal(np.asarray(cache.layers.length), left)
