"""A policy's rule written out: dense attention under the mask of what each query sees."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import cache as caches
from kvjax.mesh import AXES, gather, use_mesh
from kvjax.models.decoder import scan_layers
from kvjax.policies.base import BIAS
from kvjax.policies.compiled import on_mesh
from tests.policies.steps import shape_of


def stored(priority, keep, window):
    """Return which tokens are retained for each query and after the last one, [b k t + 1 t], from the `priority` [b k
    t] of each token. Every token is compared with every other."""
    t = priority.shape[-1]
    wanted = priority >= keep.threshold
    left = jnp.arange(t + 1)[:, None] - jnp.arange(t) >= window
    competing = left & wanted[:, :, None]
    if keep.max_entries is None:
        return competing
    mine, other = priority[..., :, None], priority[..., None, :]
    better = (other > mine) | ((other == mine) & (jnp.arange(t) < jnp.arange(t)[:, None]))
    ahead = jnp.einsum("bkqo,bkjo->bkqj", competing.astype(jnp.int32), better.astype(jnp.int32))
    return competing & (ahead < jnp.broadcast_to(keep.max_entries, priority.shape[1])[:, None, None])


@functools.partial(jax.jit, static_argnames="window")
def _dense_logits(model, admission, tokens, window):
    def attend(step, _, admission):
        b, t = step.position.shape
        state = admission.init(shape_of(step))
        _, priority, delay = admission.score(state, step, jnp.zeros(b, jnp.int32), jnp.full(b, t))
        q, k, v, priority, keep = gather((step.q, step.k, step.v, priority, admission.keep()), *AXES)
        # none of the last tokens, whose priorities are not known yet, has left the window
        priority = jnp.roll(priority, -delay, -1).at[..., t - delay :].set(-jnp.inf)
        held = stored(priority, keep, window)
        age = jnp.arange(t)[:, None] - jnp.arange(t)
        seen = (age >= 0) & ((age < window) | held[:, :, :t])
        k, v, seen = (jnp.repeat(x, q.shape[1] // k.shape[1], 1) for x in (k, v, seen))
        s = jnp.einsum("bnth,bnsh->bnts", q, k) / np.sqrt(k.shape[-1])
        if BIAS in admission.planes:
            bias = jnp.repeat(gather(admission.bias(state, step), *AXES), q.shape[1] // step.k.shape[1], 1)
            s += jnp.where(age >= window, bias[:, :, None], 0)
        p = jax.nn.softmax(jnp.where(seen, s, -1e30), -1)
        o = jnp.einsum("bnts,bnsh->bnth", p, v)
        return jax.sharding.reshard(o, jax.typeof(step.q).sharding.spec), None, held[:, :, t]

    position = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    admission = gather(admission, "data", "fsdp")
    x, _, kept, _ = scan_layers(
        model, model.embed_tokens(tokens), position, attend, xs=admission, token=tokens
    )
    return model.logits(model.norm(x)), kept


def dense_logits(model, policy, tokens):
    """Return every token's logits with the mask {i − j < window} ∪ {j retained}, where retained tokens have biases, and
    which tokens are retained at the end [l b k t]."""
    with use_mesh(model):
        admission = on_mesh(policy.admission, model.config.num_full_layers, model.config.num_kv_heads)
        found = _dense_logits(model, admission, jnp.asarray(tokens, jnp.int32), policy.window)
        return tuple(map(np.asarray, found))


PLACES, POOL = 192, 4096
"""Entries of a head cache and of the pool to which arrays are padded, so that caches of all sizes share one program."""


@jax.jit
def _logits_over(model, tables, lengths, seen, pool, biases, window, ring, token):
    def attend(step, _, layer):
        q, k, v = gather((step.q, step.k, step.v), *AXES)
        table, length = layer
        entries = pool[table]
        place = jnp.arange(entries.shape[2])
        exists = (place < jnp.minimum(seen, window - 1)[:, None, None]) & (place < ring)
        exists |= (place >= ring) & (place < ring + length[..., None])
        s, last = (jnp.einsum("bkgh,bksh->bkgs", grouped(q, k), x) for x in (entries[..., : k.shape[-1]], k))
        s += jnp.where(place < ring, 0, biases[table])[:, :, None] * np.sqrt(k.shape[-1])
        s = jnp.concatenate([jnp.where(exists[:, :, None], s, -jnp.inf), last], -1) / np.sqrt(k.shape[-1])
        values = jnp.concatenate([jnp.where(exists[..., None], entries[..., k.shape[-1] :], 0), v], 2)
        o = jnp.einsum("bkgs,bksh->bkgh", jax.nn.softmax(s, -1), values).reshape(q.shape)
        return jax.sharding.reshard(o, jax.typeof(step.q).sharding.spec), None, None

    def grouped(q, k):
        return q.reshape(*k.shape[:2], -1, k.shape[-1])

    xs = tables, lengths
    x = model.embed_tokens(token[:, None])
    x, *_ = scan_layers(model, x, seen[:, None], attend, xs=xs, token=token[:, None])
    return model.logits(model.norm(x))[:, 0]


def logits_over_what_is_stored(model, cache, token):
    """Return the logits after one more token [b] that sees itself and every entry of the cache. Entries outside the
    local window have their biases."""
    size, pool = cache.page_size, np.asarray(cache.pages.pool)
    biases = np.asarray(cache.pages.planes.get(BIAS, np.zeros(pool.shape[:2], np.float32)))
    page = np.minimum(np.asarray(cache.layers.page_table), len(pool) - 1)
    table = (page[..., None] * size + np.arange(size)).reshape(*page.shape[:3], -1)
    pool, biases = pool.reshape(-1, pool.shape[-1]), biases.reshape(-1)
    assert table.shape[-1] <= PLACES
    assert len(pool) <= POOL
    with use_mesh(model):
        found = _logits_over(
            model,
            np.pad(table, [(0, 0)] * 3 + [(0, PLACES - table.shape[-1])]),
            np.asarray(cache.layers.length),
            np.asarray(cache.seen),
            np.pad(pool, [(0, POOL - len(pool)), (0, 0)]),
            np.pad(biases, (0, POOL - len(biases))),
            cache.window,
            caches.ring_pages(cache.window, size) * size,
            np.asarray(token),
        )
        return np.asarray(found)
