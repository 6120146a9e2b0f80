"""Compute a real prefill's queries, keys and values, and read a cache's entries."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import cache as caches
from kvjax.cache.observations import by_layer
from kvjax.inference import compaction
from kvjax.inference.allocation import new_cache
from kvjax.inference.forward import feed
from kvjax.inference.prefill import CHUNK
from kvjax.mesh import AXES, BATCH, HEADS, P, gather, use_mesh
from kvjax.models.decoder import scan_layers, unfused_values
from tests.policies.published import Captured
from tests.tiny_models import tiny_model

OBSERVED, PAGE = 6, 4
WINDOW = 9
"""Window of the policies that have an admission."""
LENGTHS = 60, 41
"""Numbers of tokens of the two prompts."""


@functools.cache
def unnormed():
    """Return the tiny model without QK-norm, which would give all keys one norm."""
    return tiny_model(qk_norm=False)


@functools.cache
def two_prompts() -> list[np.ndarray]:
    """Return two prompts in which no token occurs twice, because repeated tokens would have equal scores in the first
    layer, up to rounding."""
    random = np.random.default_rng(3)
    return [random.permutation(61)[:length] for length in LENGTHS]


@functools.cache
def captured_prompts() -> list[list[Captured]]:
    """Return, by sequence and layer, the results of plain causal attention on the two prompts, without QK-norm."""
    return [captured_layers(unnormed(), prompt) for prompt in two_prompts()]


@jax.jit
def _captured(model, tokens):
    def attend(step, _, xs):
        hidden, q, k, v = gather((step.hidden, step.q, step.k, step.v), *AXES)
        group = q.shape[1] // k.shape[1]
        o = jax.nn.dot_product_attention(
            *(jnp.swapaxes(x, 1, 2) for x in (q, jnp.repeat(k, group, 1), jnp.repeat(v, group, 1))),
            is_causal=True,
        )
        return jnp.swapaxes(o, 1, 2), None, (hidden[:, None], q, step.q_pre, k, v)

    position = jnp.arange(tokens.shape[1])[None]
    return scan_layers(model, model.embed_tokens(tokens), position, attend)[2]


def captured_layers(model, prompt) -> list[Captured]:
    tokens = np.zeros((1, -(-len(prompt) // 64) * 64), np.int32)  # few lengths need few programs
    tokens[0, : len(prompt)] = prompt
    with use_mesh(model):
        found = _captured(model, tokens)
    arrays = [np.asarray(x, np.float64)[:, 0, :, : len(prompt)] for x in found]
    output = np.asarray(unfused_values(model)["layers.o.value"], np.float64)
    frequencies = model.config.rotation()[0].astype(np.float64)
    return [
        Captured(arrays[0][layer, 0], *(x[layer] for x in arrays[1:]), output[layer], frequencies[layer])
        for layer in range(len(output))
    ]


def scored(model, policy, prompts):
    """Return the scores `[l b k s]` of a prefilled cache, aligned with the right end."""
    with use_mesh(model):
        compiled = policy.compile(model)
        cache = new_cache(model, compiled, prompts, 0, PAGE, None)
        quota = compaction.quota(compiled.host, cache, [len(x) for x in prompts])
        cache, _ = feed(model, compiled.host, compiled.read, cache, prompts, CHUNK)
        heads = jax.sharding.reshard(jnp.asarray(model.config.head_at_place), P(None, HEADS))
        output = {"values": gather(model.layers.o[...], "fsdp")}

        def local(eviction, output, pages, layers, observations, seen, *others):
            observations = jax.tree.map(lambda buffer: by_layer(buffer, seen, pages.dtype), observations)
            stored = eviction, output, pages, layers, observations, seen, *others
            how = max(LENGTHS), policy.window, compiled.read.stores_all
            return compaction.scores(*stored, model.config.rotation(), *how)

        arguments = (
            compiled.compact,
            output,
            cache.pages,
            cache.layers,
            cache.observations,
            cache.seen,
            heads,
            quota,
        )
        run = jax.shard_map(local, out_specs=P(None, BATCH, HEADS, None))
        return np.asarray(jax.jit(run)(*arguments))


def retained_pages(cache, layer, b, head) -> np.ndarray:
    """Return the indices of the pages of a head's retained entries."""
    first = caches.ring_pages(cache.window, cache.page_size)
    count = -(-int(np.asarray(cache.layers.length)[layer, b, head]) // cache.page_size)
    return np.asarray(cache.layers.page_table)[layer, b, head, first : first + count]


def entries(cache, layer, b, head) -> np.ndarray:
    """Return the keys of a head's retained entries."""
    length = int(cache.layers.length[layer, b, head])
    pages = np.asarray(cache.pages.pool)[retained_pages(cache, layer, b, head)]
    rows = pages.reshape(-1, pages.shape[-1])[:length]
    return rows[:, : rows.shape[1] // 2]


def pages_are_whole(cache):
    """Check that every page is free or belongs to as many heads as its counter says (one, if no fork shares it), and
    that a head has no more pages than its retained entries and its local window need."""
    length, window_pages = np.asarray(cache.layers.length), caches.ring_pages(cache.window, cache.page_size)
    table, pool = np.asarray(cache.layers.page_table), cache.pages.pool.shape[0]
    used_window_pages = caches.ring_pages(np.minimum(np.asarray(cache.counted) + 1, cache.window), PAGE)
    column, used = np.arange(table.shape[-1]), []
    for row in np.ndindex(length.shape):
        belongs = (column < used_window_pages[row[1]]) | (
            (column >= window_pages) & (column < window_pages - (-length[row] // PAGE))
        )
        used += table[row][belongs].tolist()
        assert (table[row][~belongs] >= pool).all()
    free = np.asarray(cache.pages.free)[: int(cache.pages.free_count[0])].tolist()
    rows = np.bincount(np.array(used, int), minlength=pool)
    assert sorted([*set(used), *free]) == list(range(pool))
    others = np.zeros(pool) if cache.pages.others is None else np.asarray(cache.pages.others)
    np.testing.assert_array_equal(others, np.maximum(rows - 1, 0))
    assert caches.stats(cache).pages == len(set(used))
