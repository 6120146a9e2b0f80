"""The cache: a ring of the last tokens and a paged global region, ragged by layer, sequence and kv head.

One pool of fixed-size pages per device shard serves all layers and heads; a row is one (layer, sequence, kv head) and
has its page table and its length. A token is written to its rows' rings; when it leaves the ring (`window − 1` tokens
later: with the query itself a query then sees `window` tokens) it is copied to the global region of each row that keeps
it, and nowhere else. A pool that runs out is counted, not overwritten: `check` then names policy, capacity and need.

`Pages`, `LayerCache` and the functions on them that take `window` are local to one shard of batch and kv heads.
"""

import dataclasses
import math
import os
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jaxtyping import Array, Bool, Float, Int, UInt16

from kvjax.errors import UserError, whole_number
from kvjax.mesh import BATCH, SHARDS, P, axis_size, batch_shards, on_cpu
from kvjax.policies.policy import Policy
from kvjax.struct import static, struct
from pallas_kernels.bits import as_bits, as_floats

PAGE_SIZE = 16
"""Default tokens per page, the papers' choice; 128 and more are faster on TPU."""
MARGIN = 1.25
"""How much larger than the policy's expected need the default pool is (never larger than the full cache)."""


SLACK = 1.05
"""How much more than what was missed the capacity is that an error names."""


class CapacityError(UserError):
    """The pool is too small for what the policy keeps of these tokens."""


@struct
class Pages:
    """The pool of one shard and its free list (a stack: `free[:free_count]` are free). A negative count is a debt:
    that many pages were needed and not there.

    dtype: of the entries, whose bits the pool holds if it holds integers (`pallas_kernels.bits`). bounds, for policies
    that select pages: of the keys k in each page of a global region, the smallest components of k and, beside them, of
    −k. Infinite where there are none; float32 where the pool holds integers. attended, for policies that ask: the
    attention that each entry got so far, its group's mean.
    """

    pool: Float[Array, "p page kv"] | UInt16[Array, "p page kv"]
    free: Int[Array, " p"]
    free_count: Int[Array, " shards"]
    dtype: Any = static()
    bounds: Float[Array, "p kv"] | None = None
    attended: Float[Array, "p page"] | None = None

    def entries(
        self, page: Int[Array, "b k s"], offset: Int[Array, "b k_or_1 s"]
    ) -> Float[Array, "b k s kv"]:
        """The entries at these places."""
        return as_floats(self.pool[page, offset], self.dtype)

    def with_entries(
        self, page: Int[Array, "b k s"], offset: Int[Array, "b k s"], kv: Float[Array, "b k s kv"]
    ) -> "Pages":
        """These written; those whose page is past the pool's end are dropped."""
        kv = kv.astype(self.dtype)
        kv = as_bits(kv) if self.as_integers else kv
        return dataclasses.replace(self, pool=self.pool.at[page, offset].set(kv, mode="drop"))

    @property
    def as_integers(self) -> bool:
        """Whether the pool holds the bits of the entries."""
        return self.pool.dtype != self.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the entries and of what stands beside them."""
        return sum(x.nbytes for x in (self.pool, self.bounds, self.attended) if x is not None)


@struct
class LayerCache:
    """What a layer knows of its rows. Stacked over layers in `Cache`.

    The first `ring_pages` columns of `page_table` are the ring's pages, the rest the global region's in order;
    a column that holds no page has an index past the pool's end. `priority` is that of the ring's tokens by slot.
    """

    page_table: Int[Array, "*l b k c"]
    length: Int[Array, "*l b k"]
    priority: Float[Array, "*l b k r"]
    state: Any


@struct
class Cache:
    """Everything a model remembers of a batch of sequences. Made by `empty`, advanced by `kvjax.sampling`."""

    pages: Pages
    layers: LayerCache
    seen: Int[Array, " b"]
    window: int = static()
    bounded: bool = static()
    """The user stated the capacity: the pool must not grow."""

    @property
    def page_size(self) -> int:
        return self.pages.pool.shape[1]


def ring_pages(window: int, page_size: int) -> int:
    """Pages that a ring of `window − 1` slots takes."""
    return -(-(window - 1) // page_size)


# --- sizes -----------------------------------------------------------------------------------------------------------


def _device_bytes() -> int:
    """Memory of one device; of the host, divided among its virtual devices, where the device does not say."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // jax.local_device_count()


def rounded_up(number: int) -> int:
    """The number, or up to a sixteenth more: contexts of about one length get tables and pools of one size, and run
    the programs that were compiled for the first of them."""
    step = 1 << max(0, number.bit_length() - 5)
    return -(-number // step) * step


def parse_capacity(text: str) -> int | str:
    """A capacity as written on a command line: `4096` entries per kv head, `2GiB`, or `30%` of a device's memory."""
    return int(text) if text.isdigit() else text


def pages_for(
    policy: Policy,
    tokens: int,
    rows: tuple[int, int, int],
    page_size: int,
    page_bytes: int,
    capacity: int | str | None,
) -> int:
    """Pages of one shard's pool.

    Args:
        policy: gives the expected need where no capacity is stated.
        tokens: the longest sequence, prompt and new tokens.
        rows: layers, sequences of one shard, kv heads of the whole model.
        capacity: entries per kv head on average (an int), bytes of all shards together ("2GiB", "500MB"), a share of
            each device's memory ("30%"), or None: the policy's expected need with a margin.
    """
    layers, batch, heads = rows
    tensor = axis_size("tensor")
    local_rows = layers * batch * heads // tensor
    ring = ring_pages(policy.window, page_size)
    if capacity is None:
        entry_bytes = layers * heads * page_bytes // page_size
        need = np.minimum(policy.expected_entries(tokens, entry_bytes) * MARGIN, tokens)
        held = np.maximum(need - min(tokens, policy.window - 1), 0)
        # a mean says little of one row: each may have a page more, as long as there are tokens for it
        most = -(-max(tokens - policy.window + 1, 0) // page_size)
        pages = ring + np.minimum(np.ceil(held / page_size) + (held > 0), most)
        return max(1, batch * largest_shard(np.broadcast_to(pages, (layers, heads)), tensor))
    if not isinstance(capacity, str):
        what = "capacity (entries per kv head, bytes as 2GiB or a share as 30%)"
        pages = -(-whole_number("cache", what, capacity, most=2**62) * local_rows // page_size)
    elif capacity.endswith("%"):
        pages = int(_number(capacity[:-1], capacity) / 100 * _device_bytes()) // page_bytes
    else:
        units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
        unit = next((u for u in units if capacity.endswith(u)), None)
        if unit is None:
            raise UserError(
                f"capacity {capacity!r}: expected entries per kv head (4096), bytes (2GiB) or a share (30%)"
            )
        pages = int(_number(capacity[: -len(unit)], capacity) * units[unit]) // (
            page_bytes * axis_size(*SHARDS)
        )
    if pages < local_rows * max(ring, 1):
        raise CapacityError(
            f"capacity {capacity}: {pages} pages of {page_size} tokens a device are fewer than the "
            f"{local_rows * max(ring, 1)} that the windows of {local_rows} (layer, sequence, kv head) rows take"
        )
    return min(pages, local_rows * (ring + -(-tokens // page_size)))


def largest_shard(pages: Float[np.ndarray, "l k"], shards: int) -> int:
    """The pages of the one of `shards` shards of the kv heads that has most."""
    return int(rearrange(pages, "l (shards k) -> shards (l k)", shards=shards).sum(-1).max())


def _number(text: str, capacity: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < math.inf:
        raise UserError(f"capacity {capacity!r}: expected a positive number before its unit")
    return value


def empty(
    policy: Policy,
    *,
    batch: int,
    layers: int,
    kv_heads: int,
    head_dim: int,
    tokens: int,
    dtype: Any,
    page_size: int = PAGE_SIZE,
    capacity: int | str | None = None,
) -> Cache:
    """A cache that has seen nothing, for `batch` sequences (a multiple of the mesh's batch shards) of at most `tokens`
    tokens each (`rounded_up`), on the current mesh. `capacity` as in `pages_for`."""
    page_size = whole_number("cache", "page_size", page_size)
    tokens = rounded_up(tokens)
    local_batch = batch // batch_shards()
    dtype = jnp.dtype(dtype)
    stored, bounds = (jnp.uint16, jnp.float32) if dtype.itemsize == 2 and on_cpu() else (dtype, dtype)
    page_bytes = page_size * 2 * head_dim * dtype.itemsize + 4 * page_size * policy.attended
    page_bytes += 2 * head_dim * jnp.dtype(bounds).itemsize * (policy.selection is not None)
    pages = pages_for(policy, tokens, (layers, local_batch, kv_heads), page_size, page_bytes, capacity)
    sizes = batch, layers, kv_heads, head_dim, tokens
    dtypes = dtype, jnp.dtype(stored), jnp.dtype(bounds)
    return _empty(policy.traced, *sizes, dtypes, page_size, pages, capacity is not None)


@partial(jax.jit, static_argnums=range(1, 10))
def _empty(policy, batch, layers, kv_heads, head_dim, tokens, dtypes, page_size, pages, bounded):
    """A cache with `pages` pages a shard. dtypes: of the entries, of what holds them, and of bounds."""
    dtype, stored, bounded_by = dtypes
    shards, slots, tensor = axis_size(*SHARDS), policy.window - 1, axis_size("tensor")
    ring = ring_pages(policy.window, page_size)
    local = layers, batch // batch_shards(), kv_heads // tensor
    n_rings = math.prod(local) * ring
    columns = max(1, ring + min(-(-max(tokens - slots, 0) // page_size), pages - ring))
    rows = P(None, BATCH, "tensor", None)

    # the rings' pages are the first ones of the pool; the rest are free
    def tables():
        ids = jnp.arange(n_rings, dtype=jnp.int32).reshape(*local, ring)
        none = jnp.full((*local, columns - ring), pages, jnp.int32)
        free = jnp.arange(pages, dtype=jnp.int32)[::-1]
        return jnp.concatenate([ids, none], -1), free, jnp.full(1, pages - n_rings, jnp.int32)

    table, free, count = jax.shard_map(tables, in_specs=(), out_specs=(rows, P(SHARDS), P(SHARDS)))()
    pool = jnp.zeros((shards * pages, page_size, 2 * head_dim), stored, out_sharding=P(SHARDS, None, None))
    bounds = attended = None
    if policy.selection is not None:
        bounds = jnp.full((shards * pages, 2 * head_dim), jnp.inf, bounded_by, out_sharding=P(SHARDS, None))
    if policy.attended:
        attended = jnp.zeros(pool.shape[:2], jnp.float32, out_sharding=P(SHARDS, None))
    layer_cache = LayerCache(
        page_table=table,
        length=jnp.zeros((layers, batch, kv_heads), jnp.int32, out_sharding=P(None, BATCH, "tensor")),
        priority=jnp.full((layers, batch, kv_heads, slots), jnp.nan, jnp.float32, out_sharding=rows),
        state=jax.vmap(lambda _: policy.init(batch))(jnp.arange(layers)),
    )
    seen = jnp.zeros(batch, jnp.int32, out_sharding=P(BATCH))
    pages_ = Pages(pool, free, count, dtype, bounds, attended)
    return Cache(pages_, layer_cache, seen, window=policy.window, bounded=bounded)


def grown(cache: Cache, pages: int, columns: int) -> Cache:
    """A copy with `pages` more pages a shard and `columns` more columns in the page table."""

    def more(pages_, layers):
        had = pages_.pool.shape[0]
        pool = jnp.pad(pages_.pool, ((0, pages), (0, 0), (0, 0)))
        count = pages_.free_count
        index = jnp.arange(had + pages)
        new = had + index - count
        free = jnp.where(index < count, jnp.pad(pages_.free, (0, pages)), new).astype(jnp.int32)
        table = jnp.where(layers.page_table >= had, had + pages, layers.page_table)
        table = jnp.pad(table, ((0, 0), (0, 0), (0, 0), (0, columns)), constant_values=had + pages)
        bounds, attended = pages_.bounds, pages_.attended
        if bounds is not None:
            bounds = jnp.pad(bounds, ((0, pages), (0, 0)), constant_values=jnp.inf)
        if attended is not None:
            attended = jnp.pad(attended, ((0, pages), (0, 0)))
        new_pages = Pages(pool, free, count + pages, pages_.dtype, bounds, attended)
        return new_pages, dataclasses.replace(layers, page_table=table)

    specs = jax.tree.map(lambda leaf: jax.typeof(leaf).sharding.spec, (cache.pages, cache.layers))
    new_pages, new_layers = jax.shard_map(more, out_specs=specs)(cache.pages, cache.layers)
    return dataclasses.replace(cache, pages=new_pages, layers=new_layers)


def trimmed(cache: Cache, pages: int) -> Cache:
    """A copy whose pool has `pages` pages a shard, which must be at least those in use."""

    def less(pages_, layers):
        table = layers.page_table
        used = table < pages_.pool.shape[0]
        place = jnp.cumsum(used, dtype=jnp.int32).reshape(used.shape) - 1
        source = jnp.zeros(pages, jnp.int32).at[jnp.where(used, place, pages)].set(table, mode="drop")
        free = jnp.arange(pages, dtype=jnp.int32)[::-1]
        count = pages - used.sum(dtype=jnp.int32)[None]
        table = jnp.where(used, place, pages)
        bounds, attended = pages_.bounds, pages_.attended
        if bounds is not None:
            bounds = jnp.where(jnp.arange(pages)[:, None] < pages - count, bounds[source], jnp.inf)
        if attended is not None:
            attended = attended[source]
        new_pages = Pages(pages_.pool[source], free, count, pages_.dtype, bounds, attended)
        return new_pages, dataclasses.replace(layers, page_table=table)

    specs = jax.tree.map(lambda leaf: jax.typeof(leaf).sharding.spec, (cache.pages, cache.layers))
    new_pages, new_layers = jax.shard_map(less, out_specs=specs)(cache.pages, cache.layers)
    return dataclasses.replace(cache, pages=new_pages, layers=new_layers)


# --- the ring and the global region, on one shard and in one layer --------------------------------------------------


def ring_entries(
    pages: Pages, layer: LayerCache, seen: Int[Array, " b"], count: int, window: int
) -> tuple[Float[Array, "b k r kv"], Bool[Array, "b r"]]:
    """The oldest `count` of the `window − 1` ring tokens in order of position, and which of them exist."""
    slots, page_size = window - 1, pages.pool.shape[1]
    index = jnp.arange(count)
    slot = (seen[:, None] + index) % max(slots, 1)
    page = jnp.take_along_axis(layer.page_table, (slot // page_size)[:, None], 2)
    kv = pages.entries(page, (slot % page_size)[:, None])
    return kv, index >= slots - seen[:, None]


def ring_priority(
    layer: LayerCache,
    seen: Int[Array, " b"],
    priority: Float[Array, "b k t"],
    valid: Int[Array, " b"],
    delay: int,
) -> Float[Array, "b k rt"]:
    """The priorities of the ring's tokens in order and, behind them, of the `t` tokens of this call."""
    slots = layer.priority.shape[-1]
    order = (seen[:, None] + jnp.arange(slots)) % max(slots, 1)
    ring = jnp.take_along_axis(layer.priority, order[:, None], 2)
    both = jnp.concatenate([ring, jnp.full_like(priority, jnp.nan)], -1)
    tokens = priority.shape[-1]
    before = both[..., slots - delay : slots - delay + tokens]
    known = (jnp.arange(tokens) < valid[:, None, None]) & ~jnp.isnan(priority)
    return both.at[..., slots - delay : slots - delay + tokens].set(jnp.where(known, priority, before))


def push(
    pages: Pages,
    layer: LayerCache,
    kv: Float[Array, "b k t kv"],
    priority: Float[Array, "b k rt"],
    kept: Bool[Array, "b k rt"],
    seen: Int[Array, " b"],
    valid: Int[Array, " b"],
    window: int,
) -> tuple[Pages, LayerCache]:
    """Write this call's first `valid` tokens of each sequence: they enter the ring, as many leave it, and those of
    them that are `kept` enter the global region. `priority` and `kept` are as from `ring_priority`."""
    batch, heads, tokens, _ = kv.shape
    slots, page_size, capacity = window - 1, pages.pool.shape[1], pages.pool.shape[0]
    leaving_from_ring = min(tokens, slots)
    old, _ = ring_entries(pages, layer, seen, leaving_from_ring, window)
    leaving = jnp.concatenate([old, kv[:, :, : tokens - leaving_from_ring]], 2)
    index = jnp.arange(tokens)
    left = (index < valid[:, None]) & (index >= slots - seen[:, None])
    stays = kept[..., :tokens] & left[:, None]
    pages, layer, slot = _allocate(pages, layer, stays, ring_pages(window, page_size))

    # newest tokens into the ring: the last min(t, slots) valid ones, each in the slot of its position
    entering = jnp.arange(leaving_from_ring) + valid[:, None] - leaving_from_ring
    ring_slot = (seen[:, None] + entering) % max(slots, 1)
    ring_page = jnp.take_along_axis(layer.page_table, (ring_slot // page_size)[:, None], 2)
    ring_page = jnp.where(entering[:, None] >= 0, ring_page, capacity)
    ring_kv = jnp.take_along_axis(kv, jnp.maximum(entering, 0)[:, None, :, None], 2)

    shape = (batch, heads, leaving_from_ring)
    page = jnp.concatenate([slot[0], jnp.broadcast_to(ring_page, shape)], -1)
    offset = jnp.concatenate([slot[1], jnp.broadcast_to((ring_slot % page_size)[:, None], shape)], -1)
    pages = pages.with_entries(page, offset, jnp.concatenate([leaving, ring_kv], 2))
    pages = dataclasses.replace(pages, bounds=with_keys(pages.bounds, slot[0], leaving.astype(pages.dtype)))

    now = seen + valid
    newest = now[:, None] - 1 - (now[:, None] - 1 - jnp.arange(slots)) % max(slots, 1)
    place = jnp.clip(newest - (seen[:, None] - slots), 0, slots + tokens - 1)
    ring = jnp.take_along_axis(priority, place[:, None], 2)
    return pages, dataclasses.replace(layer, priority=ring)


def with_keys(
    bounds: Float[Array, "p kv"] | None, page: Int[Array, "b k s"], kv: Float[Array, "b k s kv"]
) -> Float[Array, "p kv"] | None:
    """The bounds of pages once these entries are in them; an entry whose page is past the pool's end is in none."""
    if bounds is None:
        return None
    k = kv[..., : kv.shape[-1] // 2].astype(bounds.dtype)
    return bounds.at[page].min(jnp.concatenate([k, -k], -1), mode="drop")


def _allocate(pages, layer, stays, ring):
    """Extend the rows of the tokens that stay; (page, offset) of each, past the pool's end for those that go."""
    page_size, capacity = pages.pool.shape[1], pages.pool.shape[0]
    tokens = stays.shape[-1]
    rank = layer.length[..., None] + jnp.cumsum(stays, -1, dtype=jnp.int32) - 1
    length = layer.length + stays.sum(-1, dtype=jnp.int32)
    had, have = -(-layer.length // page_size), -(-length // page_size)
    need = have - had
    ends = jnp.cumsum(need.reshape(-1)).reshape(need.shape)
    column = jnp.arange(-(-tokens // page_size))
    source = pages.free_count[0] - 1 - ((ends - need)[..., None] + column)
    fresh = jnp.where(source >= 0, pages.free[jnp.maximum(source, 0)], capacity)
    columns = layer.page_table.shape[-1]
    target = jnp.where(column < need[..., None], ring + had[..., None] + column, columns)
    b, k = jnp.ogrid[: stays.shape[0], : stays.shape[1]]
    table = layer.page_table.at[b[..., None], k[..., None], target].set(fresh, mode="drop")
    page = jnp.take_along_axis(table, jnp.clip(ring + rank // page_size, 0, columns - 1), 2)
    page = jnp.where(stays, page, capacity)
    layer = dataclasses.replace(layer, page_table=table, length=length)
    pages = dataclasses.replace(pages, free_count=pages.free_count - ends.reshape(-1)[-1])
    return pages, layer, (page, rank % page_size)


# --- what a person asks of a cache -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Stats:
    """What a cache holds. Entries count keys with their values, ring and global region together.

    entries: by layer, sequence and kv head. tokens: seen, by sequence. pages: in use by these sequences. bytes: of the
    allocated pool with what stands beside it, on all devices. full_bytes: of a full cache of them.
    """

    entries: Int[np.ndarray, "l b k"]
    tokens: Int[np.ndarray, " b"]
    pages: int
    pool_pages: int
    page_size: int
    bytes: int
    full_bytes: int

    @property
    def kv_ratio(self) -> float:
        """Entries over those of a full cache."""
        layers, _, heads = self.entries.shape
        return float(self.entries.sum() / max(1, layers * heads * self.tokens.sum()))


def stats(cache: Cache, sequences: int | None = None) -> Stats:
    """Sizes of a cache; of its first `sequences` sequences where the batch was padded with empty ones."""
    seen = np.asarray(cache.seen)[:sequences]
    length = np.asarray(cache.layers.length)[:, :sequences]
    ring = np.minimum(seen, cache.window - 1)[None, :, None]
    pool = cache.pages.pool
    layers, _, heads = length.shape
    entry_bytes = pool.shape[-1] * pool.dtype.itemsize
    pages = -(-length // cache.page_size) + ring_pages(cache.window, cache.page_size)
    return Stats(
        entries=length + ring,
        tokens=seen,
        pages=int(pages.sum()),
        pool_pages=pool.shape[0],
        page_size=cache.page_size,
        bytes=cache.pages.nbytes,
        full_bytes=int(seen.sum()) * layers * heads * entry_bytes,
    )


def check(cache: Cache, policy: Policy, room: int = 0) -> None:
    """Raise CapacityError if the pool ever ran out. Waits for the device.

    room: tokens that are still to come in each sequence. The capacity that the error names is enough for them, too.
    """
    count = np.asarray(cache.pages.free_count)
    if (count >= 0).all():
        return
    pool = cache.pages.pool
    have = pool.shape[0] // len(count)
    need = have - int(count.min())
    layers, batch, heads = cache.layers.length.shape
    rows = layers * batch * heads // len(count)
    # tokens that found no page were read without, and the next layers then admit others
    wanted = math.ceil(need * SLACK) + rows * -(-room // cache.page_size)
    raise CapacityError(
        f"policy {policy.name} needs at least {need} pages of {cache.page_size} tokens on a device for what was read, "
        f"the pool has {have} ({pool.nbytes / 2**20:.1f} MiB in all): give a capacity of "
        f"{-(-wanted * cache.page_size // rows)} entries per kv head, which is enough for {room} more tokens, too"
    )
