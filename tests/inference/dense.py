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


def has_left(gone, window):
    """Return a mask of the tokens that have left the window for each query, [b t + 1 t]. After each token the window
    holds the last `window − 1` tokens that are not `gone` for that token's query. `gone` has the same shape."""
    index = jnp.arange(gone.shape[-1])
    present = (index <= index[:, None]) & ~gone[:, :-1]
    later = present.sum(-1, keepdims=True) - jnp.cumsum(present, -1)
    left = (later >= window - 1) & (index <= index[:, None])
    return jnp.pad(jnp.cumsum(left, 1) > 0, ((0, 0), (1, 0), (0, 0)))


def stored(priority, keep, window, left=None):
    """Return a mask of the tokens that are retained for each query and after the last one, [b k t + 1 t], given the
    `priority` [b k t] of each token. Every token is compared with every other. left: a mask of those that have left the
    window."""
    t = priority.shape[-1]
    wanted = priority >= keep.threshold
    if left is None:
        left = has_left(jnp.zeros((1, t + 1, t), bool), window)
    competing = left[:, None] & wanted[:, :, None]
    if keep.max_entries is None:
        return competing
    mine, other = priority[..., :, None], priority[..., None, :]
    better = (other > mine) | ((other == mine) & (jnp.arange(t) < jnp.arange(t)[:, None]))
    ahead = jnp.einsum("bkqo,bkjo->bkqj", competing.astype(jnp.int32), better.astype(jnp.int32))
    return competing & (ahead < jnp.broadcast_to(keep.max_entries, priority.shape[1])[:, None, None])


def attention(step, seen, bias=None):
    """Return dense attention over the tokens that each query has `seen` [b k|1 t t], with a bias for each logit."""
    q, k, v = gather((step.q, step.k, step.v), *AXES)
    group = q.shape[1] // k.shape[1]
    k, v, seen = (jnp.repeat(x, group if x.shape[1] > 1 else q.shape[1], 1) for x in (k, v, seen))
    s = jnp.einsum("bnth,bnsh->bnts", q, k) / np.sqrt(k.shape[-1])
    s = s if bias is None else s + jnp.repeat(bias, group, 1)
    p = jax.nn.softmax(jnp.where(seen, s, -1e30), -1)
    o = jnp.einsum("bnts,bnsh->bnth", p, v)
    return jax.sharding.reshard(o, jax.typeof(step.q).sharding.spec)


@functools.partial(jax.jit, static_argnames="window")
def _dense_logits(model, admission, tokens, gone, window):
    left, t = has_left(gone, window), tokens.shape[1]
    age, gone = jnp.arange(t)[:, None] - jnp.arange(t), gone[:, None]

    def attend(step, _, admission):
        b = step.position.shape[0]
        state = admission.init(shape_of(step))
        _, priority, delay = admission.score(state, step, jnp.zeros(b, jnp.int32), jnp.full(b, t))
        priority, keep = gather((priority, admission.keep()), *AXES)
        # none of the last tokens, whose priorities are not known yet, has left the window
        priority = jnp.roll(priority, -delay, -1).at[..., t - delay :].set(-jnp.inf)
        held, bias = stored(priority, keep, window, left) & ~gone, None
        seen = (age >= 0) & ((~left[:, None] & ~gone)[:, :, :t] | held[:, :, :t])
        if BIAS in admission.metadata:
            bias = gather(admission.bias(state, step), *AXES)
            bias = jnp.where(left[:, None, :t], bias[:, :, None], 0)
        return attention(step, seen, bias), None, held[:, :, t]

    def slide(step, carry, _):
        seen = (age >= 0) & (age < model.config.sliding_window) & ~gone[:, :, :t]
        return attention(step, seen), carry, None

    position = jnp.broadcast_to(jnp.arange(t), tokens.shape)
    admission, x = gather(admission, "data", "fsdp"), model.embed_tokens(tokens)
    x, _, kept, _ = scan_layers(model, x, position, attend, xs=admission, slide=slide, token=tokens)
    return model.logits(model.norm(x)), kept


def dense_logits(model, policy, tokens, gone=None):
    """Return every token's logits under the mask {i − j < window} ∪ {j retained}, where retained tokens have biases,
    and a mask of the tokens that are retained at the end [l b k t]. gone: a mask of the tokens that were dropped before
    each query and at the end, [b t + 1 t]. The window does not count them."""
    size = tokens.shape[1]
    gone = np.zeros((len(tokens), size + 1, size), bool) if gone is None else gone
    with use_mesh(model):
        admission = on_mesh(policy.admission, model.config.num_full_layers, model.config.num_kv_heads)
        found = _dense_logits(model, admission, jnp.asarray(tokens, jnp.int32), gone, policy.window)
        return tuple(map(np.asarray, found))


PLACES, POOL = 192, 4096
"""Entries of a head cache and of the pool to which arrays are padded, so that caches of all sizes share one program."""


@jax.jit
def _logits_over(model, tables, lengths, seen, counted, pool, biases, window, ring, token):
    def attend(step, _, layer):
        q, k, v = gather((step.q, step.k, step.v), *AXES)
        table, length = layer
        entries = pool[table]
        place = jnp.arange(entries.shape[2])
        exists = (place < jnp.minimum(counted, window - 1)[:, None, None]) & (place < ring)
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


def logits_over_stored_entries(model, cache, token):
    """Return the logits after one more token [b] that sees itself and every entry of the cache. Entries outside the
    local window have their biases."""
    size, pool = cache.page_size, np.asarray(cache.pages.pool)
    biases = np.asarray(cache.pages.metadata.get(BIAS, np.zeros(pool.shape[:2], np.float32)))
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
            np.asarray(cache.counted),
            np.pad(pool, [(0, POOL - len(pool)), (0, 0)]),
            np.pad(biases, (0, POOL - len(biases))),
            cache.window,
            caches.ring_pages(cache.window, size) * size,
            np.asarray(token),
        )
        return np.asarray(found)
