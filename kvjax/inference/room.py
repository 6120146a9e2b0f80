"""Room for what is to come: a new cache for prompts, and pools that grow for questions and answers."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from kvjax import cache as caches
from kvjax.cache import Cache, Layout
from kvjax.errors import UserError, whole_number
from kvjax.inference.quota import entry_bytes
from kvjax.mesh import BATCH, P, axis_size, batch_shards, gather, on_cpu
from kvjax.models.decoder import Decoder
from kvjax.policies.policy import Policy
from kvjax.step import Shape

grown = jax.jit(caches.grown, static_argnums=(1, 2))
trimmed = jax.jit(caches.trimmed, static_argnums=1)


def empty_cache(
    policy: Policy,
    *,
    batch: int,
    layers: int,
    kv_heads: int,
    head_dim: int,
    tokens: int,
    dtype: Any,
    group: int = 1,
    page_size: int = caches.PAGE_SIZE,
    capacity: int | str | None = None,
) -> Cache:
    """A cache that has seen nothing, for `batch` sequences (a multiple of the mesh's batch shards) of at most `tokens`
    tokens each (`rounded_up`), on the current mesh. `group`: query heads of a kv head, for methods that remember
    queries. `capacity` as in `kvjax.cache.pages_for`."""
    page_size = whole_number("cache", "page_size", page_size)
    most = policy.most_stored
    tokens = caches.rounded_up(tokens if most is None else min(tokens, most + policy.window - 1))
    dtype = jnp.dtype(dtype)
    stored, bounds = (jnp.uint16, jnp.float32) if dtype.itemsize == 2 and on_cpu() else (dtype, dtype)
    own = {} if most is None else caches.CAPACITY_PLANES
    if taken := sorted(set(caches.CAPACITY_PLANES) & set(policy.planes)):
        raise UserError(f"policy {policy.name}: a plane called {taken[0]!r} is the cache's own")
    planes = tuple((name, jnp.dtype(own)) for name, own in (policy.planes | own).items())
    page_bytes = page_size * (2 * head_dim * dtype.itemsize + sum(own.itemsize for _, own in planes))
    page_bytes += 2 * head_dim * jnp.dtype(bounds).itemsize * (policy.selection is not None)
    pages = caches.pages_for(
        capacity,
        expected=policy.expected_entries(tokens, layers * kv_heads * page_bytes // page_size),
        window=policy.window,
        tokens=tokens,
        rows=(layers, batch // batch_shards(), kv_heads),
        page_size=page_size,
        page_bytes=page_bytes,
    )
    layout = Layout(
        batch=batch, layers=layers, kv_heads=kv_heads, head_dim=head_dim, window=policy.window, tokens=tokens,
        page_size=page_size, pages=pages, dtype=dtype, stored=jnp.dtype(stored),
        bounds=None if policy.selection is None else jnp.dtype(bounds), planes=planes,
        bounded=capacity is not None,
    )  # fmt: skip
    return laid_out(policy.traced, layout, group)


@functools.partial(jax.jit, static_argnums=(1, 2))
def laid_out(policy: Policy, layout: Layout, group: int) -> Cache:
    """An empty cache of this shape, with the policy's states, for `group` query heads of a kv head."""

    def shape(batch: int, heads: int) -> Shape:
        return Shape(batch, heads, group, layout.head_dim, layout.dtype)

    local = shape(layout.batch // batch_shards(), layout.kv_heads // axis_size("tensor"))
    one, two = (policy.state_shapes(shape(1, heads), layout.layers) for heads in (1, 2))
    specs = jax.tree.map(_split_like_heads, one, two)
    whole = gather(policy, "data", "fsdp")
    states = jax.shard_map(lambda policy: policy.states(local, layout.layers), out_specs=specs)(whole)
    return caches.empty(layout, states)


def _split_like_heads(one: jax.ShapeDtypeStruct, two: jax.ShapeDtypeStruct) -> P:
    """The split of a state `[l b …]`, of one kv head and of two: axes that grow with the heads go with them."""
    axes = zip(one.shape[2:], two.shape[2:], strict=True)
    return P(None, BATCH, *("tensor" if small != large else None for small, large in axes))


def new_cache(
    model: Decoder,
    policy: Policy,
    rows: list[np.ndarray],
    room: int,
    page_size: int,
    capacity: int | str | None,
) -> Cache:
    """An empty cache for prompts and `room` more tokens."""
    shards, config, plan = batch_shards(), model.config, policy.plan
    tokens = max(row.size for row in rows) + room
    if plan is not None:
        tokens += plan.read_behind
    if plan is not None and plan.schedule.while_decoding and capacity is None:
        tokens -= room  # which is made when the prompt was compacted
    return empty_cache(
        policy,
        batch=-(-len(rows) // shards) * shards,
        layers=config.num_layers,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        tokens=tokens,
        dtype=model.embed.dtype,
        group=config.num_heads // config.num_kv_heads,
        page_size=page_size,
        capacity=capacity,
    )


def pool_pages(cache: Cache) -> int:
    """Pages of a shard."""
    return cache.pages.pool.shape[0] // len(np.asarray(cache.pages.free_count))


def _shard_sums(cache: Cache, rows: Int[np.ndarray, "l b k"]) -> Int[np.ndarray, "data tensor"]:
    """Sums of an `[l b k]` array over each shard's rows."""
    shards = len(np.asarray(cache.pages.free_count))
    layers, _, heads = rows.shape
    tensor = shards // batch_shards()
    return rows.reshape(layers, batch_shards(), -1, tensor, heads // tensor).sum((0, 2, 4))


def more_pages(cache: Cache, tokens: int, most: int | None = None) -> int:
    """The most pages of a shard that `tokens` more entries in each row take, beside those in use, of rows of at most
    `most` entries."""
    length = np.asarray(cache.layers.length)
    longer = length + tokens if most is None else np.maximum(np.minimum(length + tokens, most), length)
    return int(_shard_sums(cache, -(-longer // cache.page_size) - -(-length // cache.page_size)).max())


def _wanted(policy: Policy, cache: Cache, asked: int, answered: int) -> int:
    """Pages of a shard for what is stored and, in each sequence, a question and an answer of so many tokens."""
    free, pool = int(np.asarray(cache.pages.free_count).min()), pool_pages(cache)
    used, tokens, plan = pool - free, asked + answered, policy.plan
    if tokens == 0:
        return max(used, 1)
    layers, batch, heads = cache.layers.length.shape
    # every row may start a page, and then takes what the policy admits of the new tokens
    kept = np.broadcast_to(policy.admission.admitted(tokens + cache.window) * caches.MARGIN, (layers, heads))
    each = np.ceil(np.minimum(kept, tokens) / cache.page_size) + 1
    tensor = len(np.asarray(cache.pages.free_count)) // batch_shards()
    need = used + batch // batch_shards() * caches.largest_shard(each, tensor)
    need = min(need, used + more_pages(cache, tokens, policy.most_stored))
    if plan is None or not plan.schedule.while_decoding:
        return need
    # or what the budget lets stand, and what comes between two compactions
    between = asked + max(plan.schedule.every, 1)
    share = plan.kept([int(np.asarray(cache.seen).max()) + tokens], entry_bytes(cache))[0]
    budget = np.full(cache.layers.length.shape, -(-int(share + between) // cache.page_size) + 1)
    ring = caches.ring_pages(cache.window, cache.page_size)
    planned = int(_shard_sums(cache, budget + ring).max())
    return min(need, max(planned, used + more_pages(cache, between)))


def _lacking(policy: Policy, cache: Cache, asked: int, answered: int) -> int:
    """Pages that the pool lacks of what is wanted, rounded up; below 0 if it has more, 0 if its size was stated."""
    need, have = _wanted(policy, cache, asked, answered), pool_pages(cache)
    rounded = caches.rounded_up(need)
    return 0 if cache.bounded or need <= have <= rounded else rounded - have


def _columns(policy: Policy, cache: Cache, tokens: int) -> int:
    """Columns that the page table lacks for `tokens` more tokens; where it lacks any, of a number rounded up."""
    seen, longest = int(np.asarray(cache.seen).max()), int(np.asarray(cache.layers.length).max())
    most = min(max(seen + tokens - cache.window + 1, 0), longest + tokens)
    if policy.most_stored is not None:
        most = min(most, max(policy.most_stored, longest))
    ring = caches.ring_pages(cache.window, cache.page_size)
    have, need = cache.layers.page_table.shape[-1], ring + -(-most // cache.page_size)
    return caches.rounded_up(need) - have if need > have else 0


def fitted(policy: Policy, cache: Cache, tokens: int) -> Cache:
    """The cache with a pool as large as what is stored takes and so many decoded tokens, unless its size was stated."""
    lacking, columns = _lacking(policy, cache, 0, tokens), _columns(policy, cache, tokens)
    if lacking < 0:
        cache = trimmed(cache, pool_pages(cache) + lacking)
    if columns or lacking > 0:
        cache = grown(cache, max(0, lacking), columns)
    return cache


def with_room(cache: Cache, policy: Policy, asked: int, answered: int) -> Cache:
    """A copy of `cache` that can take a question and an answer of so many tokens a sequence; its pool grows unless
    its size was stated."""
    lacking = _lacking(policy, cache, asked, answered)
    return grown(cache, max(0, lacking), _columns(policy, cache, asked + answered))
