"""Stripes: a row's global region dealt page by page to all devices that split the kv heads.

Heads keep different numbers of tokens. Where each device has the rows of its own kv heads, a step waits for the device
whose heads keep most, and the pools of all are as large as its own. Striped, device d has of every head x the pages of
the columns c with (c + x) mod devices = d: as many as any other device, but for a page a row. The entries of a row and
their order are the same. Rings are equally long, and stay with their heads.

A call's queries, and what leaves the rings, then go to all devices, and what each device's pages gave of the attention
goes back to the queries' own (`kvjax.inference.striped`). For rows that only grow: nothing here is compacted.

Local to one shard, inside `shard_map`, but for `striped` and `by_heads`.
"""

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from kvjax.cache.pages import Cache, LayerCache, Pages, Stripes, ring_pages
from kvjax.cache.ring import with_pages
from kvjax.mesh import HEADS, axis_size

Whole = TypeVar("Whole", jax.Array, np.ndarray)


def own_pages(pages: Whole, device: int | Int[Array, ""], devices: int) -> Whole:
    """How many of the first `pages[…, k]` pages of each row of kv head k a device has."""
    first = (device - np.arange(pages.shape[-1])) % devices
    return (pages - first + devices - 1) // devices


def own_length(length: Int[Array, "*r k"], page_size: int) -> Int[Array, "*r k"]:
    """How many of each row's entries this device has: they are the first of its columns."""
    device, devices = lax.axis_index(HEADS), axis_size(*HEADS)
    full, rest = length // page_size, length % page_size
    last = (full + jnp.arange(length.shape[-1])) % devices == device
    return own_pages(full, device, devices) * page_size + jnp.where(last, rest, 0)


def append(
    pages: Pages, stripes: Stripes, kv: Float[Array, "b k t kv"], stays: Bool[Array, "b k t"]
) -> tuple[Pages, Stripes]:
    """Those of all heads' entries that stay come behind their rows, on this device the ones of its pages."""
    device, devices = lax.axis_index(HEADS), axis_size(*HEADS)
    (capacity, page_size, _), columns = pages.pool.shape, stripes.page_table.shape[-1]
    place = stripes.length[..., None] + jnp.cumsum(stays, -1, dtype=jnp.int32) - 1
    length = stripes.length + stays.sum(-1, dtype=jnp.int32)
    had, now = (-(-own_length(x, page_size) // page_size) for x in (stripes.length, length))
    most = -(-stays.shape[-1] // (page_size * devices))
    pages, table = with_pages(pages, stripes.page_table, had[..., None], (now - had)[..., None], most)
    column = place // page_size
    own = stays & ((column + jnp.arange(stays.shape[1])[:, None]) % devices == device)
    page = jnp.take_along_axis(table, jnp.minimum(column // devices, columns - 1), 2)
    pages = pages.with_entries(jnp.where(own, page, capacity), place % page_size, kv)
    return pages, Stripes(table, length)


def to_all(x: Shaped[Array, "b k ..."]) -> Shaped[Array, "b heads ..."]:
    """All devices' heads."""
    return lax.all_gather(x, HEADS, axis=1, tiled=True)


def to_own(x: Shaped[Array, "b heads ..."]) -> Shaped[Array, "b devices k ..."]:
    """Of this device's own heads what each device has."""
    x = x.reshape(x.shape[0], axis_size(*HEADS), -1, *x.shape[2:])
    return lax.all_to_all(x, HEADS, split_axis=1, concat_axis=1, tiled=True)


def striped(cache: Cache, pages: int) -> Cache:
    """A copy whose rows are striped, with `pages` pages a shard, which must be enough. There are neither bounds nor
    planes, and no branches."""
    devices = axis_size(*HEADS)
    ring = ring_pages(cache.window, cache.page_size)

    def deal(old: Pages, layers: LayerCache) -> tuple[Pages, LayerCache]:
        device = lax.axis_index(HEADS)
        heads, columns = layers.page_table.shape[2:]
        region = layers.page_table[..., ring:]
        more = -(columns - ring) % devices
        none = old.pool.shape[0]
        region = jnp.pad(region, ((0, 0), (0, 0), (0, 0), (0, more)), constant_values=none)
        region = region.reshape(*region.shape[:3], -1, devices)
        # the columns of a group by the device that each goes to
        own_heads = device * heads + jnp.arange(heads)[:, None]
        to = (jnp.arange(devices) - own_heads) % devices
        region = jnp.take_along_axis(region, to[None, None, :, None], 4)
        length = lax.all_gather(layers.length, HEADS, axis=2, tiled=True)
        need = -(-own_length(length, cache.page_size) // cache.page_size)
        new, (ring_table, table) = _laid(old, layers, ring, need, region.shape[3], pages)

        def one(pool, xs):
            old_ring, new_ring, old_region, new_region = xs
            pool = pool.at[new_ring].set(old.pool.at[old_ring].get(mode="clip"), mode="drop")
            sent = old.pool.at[old_region].get(mode="clip")
            received = lax.all_to_all(sent, HEADS, split_axis=3, concat_axis=1, tiled=True)[:, :, :, 0]
            return pool.at[new_region].set(received, mode="drop"), None

        xs = layers.page_table[..., :ring], ring_table[..., :ring], region, table
        pool, _ = lax.scan(one, new.pool, xs)
        stripes = Stripes(table, length)
        return dataclasses.replace(new, pool=pool), dataclasses.replace(
            layers, page_table=ring_table, stripes=stripes
        )

    like = dataclasses.replace(cache.layers, stripes=Stripes(cache.layers.page_table, cache.layers.length))
    return _with(cache, deal, like)


def by_heads(cache: Cache, pages: int) -> Cache:
    """The opposite of `striped`."""
    devices = axis_size(*HEADS)
    ring = ring_pages(cache.window, cache.page_size)

    def collect(old: Pages, layers: LayerCache) -> tuple[Pages, LayerCache]:
        device, heads, dealt = lax.axis_index(HEADS), layers.length.shape[2], layers.stripes
        assert dealt is not None
        own_heads = device * heads + jnp.arange(heads)[:, None]
        # of the columns of a group, from which device each comes
        source = (jnp.arange(devices) + own_heads) % devices
        need = -(-layers.length // cache.page_size)
        columns = dealt.page_table.shape[3] * devices
        new, (ring_table, table) = _laid(old, layers, ring, need, columns, pages)

        def one(pool, xs):
            old_ring, new_ring, old_region, new_region = xs
            pool = pool.at[new_ring].set(old.pool.at[old_ring].get(mode="clip"), mode="drop")
            sent = old.pool.at[old_region].get(mode="clip")[:, :, :, None]
            found = lax.all_to_all(sent, HEADS, split_axis=1, concat_axis=3, tiled=True)
            found = jnp.take_along_axis(found, source[None, :, None, :, None, None], 3)
            found = found.reshape(*new_region.shape, *found.shape[4:])
            return pool.at[new_region].set(found, mode="drop"), None

        xs = layers.page_table[..., :ring], ring_table[..., :ring], dealt.page_table, table
        pool, _ = lax.scan(one, new.pool, xs)
        table = jnp.concatenate([ring_table[..., :ring], table], -1)
        return dataclasses.replace(new, pool=pool), dataclasses.replace(
            layers, page_table=table, stripes=None
        )

    return _with(cache, collect, dataclasses.replace(cache.layers, stripes=None))


def _with(
    cache: Cache, change: Callable[[Pages, LayerCache], tuple[Pages, LayerCache]], like: LayerCache
) -> Cache:
    """The cache after a change on each shard, whose layers are split as `like` is."""
    specs = jax.tree.map(lambda leaf: jax.typeof(leaf).sharding.spec, (cache.pages, like))
    pages, layers = jax.shard_map(change, out_specs=specs)(cache.pages, cache.layers)
    return dataclasses.replace(cache, pages=pages, layers=layers)


def _laid(
    old: Pages, layers: LayerCache, ring: int, need: Int[Array, "l b rows"], columns: int, pages: int
) -> tuple[Pages, tuple[Int[Array, "l b k ring"], Int[Array, "l b rows c"]]]:
    """An empty pool of so many pages, and tables of what will be in it: of the rings' pages, and of as many as each
    row needs."""
    # a table without a ring has a column all the same
    ring_table = layers.page_table[..., : max(ring, 1)]
    held = (ring_table < old.pool.shape[0]) & (jnp.arange(ring_table.shape[-1]) < ring)
    at = jnp.cumsum(held, dtype=jnp.int32).reshape(held.shape) - 1
    used = held.sum(dtype=jnp.int32)
    begin = used + (jnp.cumsum(need, dtype=jnp.int32).reshape(need.shape) - need)
    column = jnp.arange(columns, dtype=jnp.int32)
    table = jnp.where(column < need[..., None], begin[..., None] + column, pages)
    used += need.sum(dtype=jnp.int32)
    # the stack's top is the page behind the last one in use
    free = jnp.arange(pages, dtype=jnp.int32)[::-1]
    pool = jnp.zeros_like(old.pool, shape=(pages, *old.pool.shape[1:]))
    new = dataclasses.replace(old, pool=pool, free=free, free_count=pages - used[None])
    return new, (jnp.where(held, at, pages), table)
