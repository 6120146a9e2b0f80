"""Allocation of pages: a new cache for prompts, and a copy of a cache that a question and its answer fit into.

A pool is made for the entries that the policy is expected to store, with a margin. It grows if it is too small, and may
shrink once, after the prompts were read and compacted. A stated capacity limits it.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvjax import cache as caches
from kvjax.cache import Cache, CapacityError, Layout, longest_lengths, shard_pages
from kvjax.cache.sliding import slots_for
from kvjax.errors import UserError, whole_number
from kvjax.inference.key_scale import key_scale
from kvjax.mesh import BATCH, HEADS, SHARDS, P, axis_size, batch_shards, gather, on_cpu, on_host
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Decoder
from kvjax.policies.base import Observations
from kvjax.policies.compiled import CompiledPolicy, States, View
from kvjax.policies.policy import Policy
from kvjax.policies.views import Shape
from pallas_kernels.bits import as_bits
from pallas_kernels.choose import target

resize = jax.jit(caches.resize, static_argnums=(1, 2, 3))
copy_shared_pages = jax.jit(caches.copy_shared_pages, static_argnums=1, donate_argnums=0)


def new_cache(
    model: Decoder,
    policy: CompiledPolicy,
    rows: Sequence[np.ndarray],
    new_tokens: int = 0,
    page_size: int | None = None,
    capacity: int | str | None = None,
) -> Cache:
    """Return an empty cache for prompts and `new_tokens` more tokens.

    Raises UserError, CapacityError: as in `layout_for`, and for a budget below the entries that always stay.
    """
    config, schedule, shards = model.config, policy.host.schedule, batch_shards()
    if schedule is not None:
        # refuse the budget now, not once a prompt or an answer is that long
        schedule.check_bound(policy.host.name, policy.host.window - 1, token_bytes(config, model.dtype))
    read_behind = 0 if schedule is None else schedule.temporary_tokens
    # if answers are compacted as they grow, their pages are allocated after the prompt's compaction
    further = read_behind if policy.host.compacts_answers else read_behind + new_tokens
    return empty_cache(
        policy,
        key_scale=key_scale(model),
        **sizes_of(config),
        batch=-(-len(rows) // shards) * shards,
        tokens=[row.size + further for row in rows],
        longest=max(row.size for row in rows) + read_behind + new_tokens,
        dtype=model.dtype,
        group=config.num_heads // config.num_kv_heads,
        page_size=page_size,
        capacity=capacity,
    )


def sizes_of(config: ModelConfig) -> dict[str, Any]:
    """Return the arguments of `layout_for` that a model determines."""
    return {
        "layers": config.num_full_layers,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "sliding_layers": len(config.sliding_layers),
        "sliding_window": config.sliding_window,
        "int8": config.int8_entries,
        "head_order": config.head_order,
    }


def token_bytes(config: ModelConfig, dtype: Any) -> int:
    """Return the bytes of one token's key and value in all KV heads of the layers with full attention. `dtype`: the
    model's."""
    each = caches.entry_bytes(config.head_dim, dtype, int8=config.int8_entries)
    return config.num_full_layers * config.num_kv_heads * each


def empty_cache(
    policy: CompiledPolicy,
    *,
    group: int = 1,
    key_scale: Float[Array, "l k h"] | None = None,
    **sizes: Any,
) -> Cache:
    """Return a cache that has seen nothing, on the current mesh.

    Args:
        group: query heads of a KV head, for methods that remember queries.
        key_scale: as in `kvjax.cache.empty`.
        sizes: the other arguments of `layout_for`, except `free`.
    """
    layout = layout_for(policy.host, free=caches.device_bytes(free=True), **sizes)
    return laid_out(policy.read, layout, group, key_scale)


def layout_for(
    host: Policy,
    *,
    batch: int,
    layers: int,
    kv_heads: int,
    head_dim: int,
    tokens: int | Sequence[int],
    dtype: Any,
    longest: int = 0,
    page_size: int | None = None,
    capacity: int | str | None = None,
    free: int | None = None,
    sliding_layers: int = 0,
    sliding_window: int = 0,
    windows: int = 0,
    int8: bool = False,
    head_order: tuple[tuple[int, ...], ...] | None = None,
) -> Layout:
    """Return the shape of a cache, for the current mesh.

    Args:
        batch: sequences, a multiple of the mesh's batch shards.
        layers: layers with full attention.
        tokens: tokens of each sequence that the pool is made for; one number applies to all.
        longest: tokens of one sequence that the page tables are made for, if that is more.
        page_size: as in `kvjax.inference.prefill.prefill`.
        capacity: as in `kvjax.cache.capacity_pages`.
        free: bytes that a device has for its part of the cache; None: no limit.
        sliding_layers, sliding_window: the number of layers with a sliding window, and the number of tokens they see.
        windows: sequences whose windows are kept at a time, if these are more than `batch`.
        int8: True for int8 entries.
        head_order: as in `ModelConfig`.

    Raises:
        UserError: metadata has the name of one of the cache's own fields, or the cache needs more memory than a device
            has free.
        CapacityError: the capacity is too small for the windows, or needs more memory than a device has free.
    """
    page_size = page_size_of(host, page_size, int8=int8)
    lengths = [tokens] * batch if isinstance(tokens, int) else [*tokens, *[0] * (batch - len(tokens))]
    table_length, max_entries = caches.table_tokens(max(longest, *lengths)), host.max_entries
    slots = slots_for(sliding_window, table_length) if sliding_layers else 0
    if max_entries is not None:
        table_length = min(table_length, max_entries + host.window - 1)
    dtype = jnp.dtype(dtype)
    stored, bounds = stored_as(dtype)
    cache_fields = {} if max_entries is None else caches.MAX_ENTRIES_METADATA
    if taken := {caches.PRIORITY, caches.SCALE} & {*host.metadata}:
        raise UserError(f"policy {host.name}: metadata called {min(taken)!r} is the cache's own")
    metadata = tuple((name, jnp.dtype(x)) for name, x in (host.metadata | cache_fields).items())
    stored_bytes = caches.entry_bytes(head_dim, dtype, int8=int8) + sum(x.itemsize for _, x in metadata)
    if free is not None:
        rows = sliding_layers * max(batch, windows) // batch_shards() * kv_heads // axis_size(*HEADS)
        free = max(0, free - rows * slots * 2 * head_dim * dtype.itemsize)
    page_bytes = page_size * stored_bytes + 2 * head_dim * bounds.itemsize * (host.selection is not None)

    def pages(tokens: Sequence[int], entries: Float[np.ndarray, "l b k"]) -> int:
        """Return the pages of the fullest shard, for windows and retained entries. A head retains at most its
        tokens."""
        seen = np.array(tokens)
        possible = np.maximum(seen - host.window + 1, 0)[:, None]
        possible = possible if max_entries is None else np.minimum(possible, max_entries)
        retained = np.ceil(np.clip(entries, 0, possible)).astype(np.int64)
        return max(1, int(shard_pages(retained, seen, host.window, page_size).max()))

    def expected(tokens: Sequence[int]) -> int:
        entry_bytes = layers * kv_heads * caches.entry_bytes(head_dim, dtype, int8=int8)
        slots = host.window - 1
        entries_of = {
            n: host.expected_entries(n, entry_bytes) * caches.MARGIN - min(n, slots) for n in {*tokens}
        }
        retained = np.stack([np.broadcast_to(entries_of[n], (layers, kv_heads)) for n in tokens], 1)
        # a mean does not bound a single head: each may have one page more
        return pages(tokens, retained + page_size * (retained > 0))

    limit = None
    if capacity is None:
        need = expected(lengths)
        if free is not None and need * page_bytes > free:
            fitting = _largest(
                max(lengths), lambda n: expected([min(x, n) for x in lengths]) * page_bytes <= free
            )
            raise UserError(
                f"policy {host.name}: sequences of up to {max(lengths)} tokens, prompt and answer, take "
                f"{need * page_bytes / 2**30:.2f} GiB of cache on a device that has {free / 2**30:.2f} GiB free; "
                f"{fitting} tokens would fit"
            )
        size = caches.pool_size(need, page_bytes)
        size = size if free is None else min(size, free // page_bytes)
    else:
        rows = layers * batch // batch_shards() * kv_heads // axis_size(*HEADS)
        limit = caches.capacity_pages(capacity, rows, page_size, page_bytes) if layers else 1
        nothing = np.zeros((layers, batch, kv_heads))
        if limit < (fewest := pages(lengths, nothing)):
            enough = pages(lengths, nothing + max(lengths))
            enough = caches.capacity_like(capacity, enough, rows, page_size, page_bytes)
            raise CapacityError(
                f"capacity {capacity}: {limit} pages of {page_size} tokens a device are fewer than the {fewest} that "
                f"the windows of {rows} head caches (layer, sequence, kv head) take; {enough} holds every token"
            )
        size = min(limit, caches.pool_size(pages([table_length] * batch, nothing + table_length), page_bytes))
        if free is not None and size * page_bytes > free:
            raise CapacityError(
                f"capacity {capacity}: {size * page_bytes / 2**30:.2f} GiB on a device that has "
                f"{free / 2**30:.2f} GiB free"
            )
    return Layout(
        batch=batch, layers=layers, kv_heads=kv_heads, head_dim=head_dim, window=host.window, tokens=table_length,
        page_size=page_size, pages=size, dtype=dtype, stored=stored, int8=int8,
        bounds=None if host.selection is None else bounds, metadata=metadata, limit=limit,
        sliding_layers=sliding_layers, sliding_window=sliding_window, sliding_slots=slots, head_order=head_order,
        masks_windows=host.positions,
    )  # fmt: skip


def _largest(high: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number up to `high` that fits. All smaller numbers must fit too."""
    low = 0
    while low < high:
        middle = -(-(low + high) // 2)
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def page_size_of(host: Policy, stated: int | None, *, int8: bool = False) -> int:
    """Return the tokens per page of a policy's cache on the current mesh: the stated number or the default."""
    if stated is None:
        return caches.default_page_size(selects=host.selection is not None, int8=int8)
    size = whole_number("cache", "page_size", stated)
    if (
        int8
        and target().platform == "tpu"
        and size % (least := caches.default_page_size(selects=True, int8=True))
    ):
        raise UserError(f"page_size must be a multiple of {least} for int8 entries on a TPU, got {size}")
    return size


def stored_as(dtype: Any) -> tuple[np.dtype, np.dtype]:
    """Return the dtype of a pool for entries of `dtype` and the dtype of its pages' bounds, on the current mesh."""
    dtype = jnp.dtype(dtype)
    if dtype.itemsize == 2 and on_cpu():
        return jnp.dtype(jnp.uint16), jnp.dtype(jnp.float32)
    return dtype, dtype


@functools.partial(jax.jit, static_argnums=(1, 2))
def laid_out(view: View, layout: Layout, group: int, key_scale: Float[Array, "l k h"] | None = None) -> Cache:
    """Return an empty cache of this shape, including the methods' memories. group: query heads per KV head. key_scale:
    as in `kvjax.cache.empty`."""

    def shape(batch: int, heads: int) -> Shape:
        return Shape(batch, heads, group, layout.head_dim, layout.dtype)

    def first_memories(view: View) -> tuple[States, Observations]:
        states, observations = view.memories(local, layout.layers)
        return states, jax.tree.map(as_bits, observations) if layout.stored != layout.dtype else observations

    local = shape(layout.batch // batch_shards(), layout.kv_heads // axis_size(*HEADS))
    shapes = zip(*(view.memory_shapes(shape(1, heads), layout.layers) for heads in (1, 2)), strict=True)
    specs = tuple(
        jax.tree.map(functools.partial(_split_like_heads, first), *pair)
        for first, pair in zip(((None, BATCH), (BATCH,)), shapes, strict=True)
    )
    gathered_view = gather(view, "data", "fsdp")
    return caches.empty(layout, *jax.shard_map(first_memories, out_specs=specs)(gathered_view), key_scale)


def _split_like_heads(
    first: tuple[Any, ...], one_head: jax.ShapeDtypeStruct, two_heads: jax.ShapeDtypeStruct
) -> P:
    """Return the sharding of a memory, given the sharding of its first axes and its shapes for one and for two KV
    heads. Axes that grow with the number of heads are split like heads."""
    axes = zip(one_head.shape[len(first) :], two_heads.shape[len(first) :], strict=True)
    return P(*first, *(HEADS if size != doubled else None for size, doubled in axes))


def pool_pages(cache: Cache) -> int:
    """Return the pages of a shard's pool."""
    return cache.pages.pool.shape[0] // cache.pages.free_count.shape[0]


def free_pages(cache: Cache) -> int:
    """Return the free pages of the shard with the fewest. A negative number counts pages that were needed and missing.
    Raises UserError if a computed number was not finite."""
    return int(caches.free_counts(cache).min())


def may_grow(cache: Cache) -> bool:
    """Return True unless the pool has as many pages as the stated capacity allows."""
    return cache.limit is None or pool_pages(cache) < cache.limit


def more_pages(
    host: Policy, cache: Cache, tokens: int, expected: Float[np.ndarray, "l b k"] | None = None
) -> int:
    """Return the pages that `tokens` more tokens of each sequence take, on the shard where they take most.

    expected: retained entries that each head cache is expected to have afterwards; None: the most that it may have.
    """
    length, counted = on_host(cache.layers.length), on_host(cache.counted)
    longer = longest_lengths(length, counted, tokens, cache.window, host.max_entries)
    if expected is not None:
        longer = np.minimum(longer, np.ceil(expected).astype(np.int64))
    sizes = cache.window, cache.page_size
    return int((shard_pages(longer, counted + tokens, *sizes) - shard_pages(length, counted, *sizes)).max())


def _expected_pages(host: Policy, cache: Cache, question: int, new_tokens: int) -> int:
    """Return the pages that a question and `new_tokens` more tokens of each sequence are expected to take."""
    length, schedule, tokens = on_host(cache.layers.length), host.schedule, question + new_tokens
    admitted = host.admission.admitted(tokens + cache.window) * caches.MARGIN + cache.page_size
    expected = length + np.broadcast_to(admitted, length.shape[::2])[:, None]
    if schedule is not None and schedule.trigger.while_decoding:
        # at most the budget and the tokens between two compactions
        budget = schedule.allowance([int(on_host(cache.seen).max()) + tokens], cache.entry_bytes)[0]
        longest = np.maximum(length + question, budget) + max(schedule.trigger.every, 1) + cache.page_size
        expected = np.minimum(expected, longest)
    return more_pages(host, cache, tokens, expected)


def copied_pages(host: Policy, cache: Cache) -> int:
    """Return the most pages, on one shard, that forks of a context copy before they run."""
    if cache.pages.others is None:
        return 0
    shared = on_host(cache.pages.others).reshape(cache.pages.free_count.shape[0], -1).sum(1)
    written = on_host(cache.layers.length)
    if not host.rewrites_entries:  # full pages are only read
        written = written % cache.page_size
    copied = shard_pages(written, on_host(cache.counted), cache.window, cache.page_size)
    return int(np.minimum(copied, shared).max())


def grow(host: Policy, cache: Cache, need: int, now: int, new_tokens: int) -> Cache:
    """Return a copy with a larger pool: twice as many pages, or the pages that are needed now if these are more. The
    pool gets no more pages than its tokens may take, the stated capacity allows and the devices have memory for.

    Args:
        need: pages of a shard that are needed for `now` more tokens of each sequence.
        new_tokens: further tokens that follow these.

    Raises CapacityError if the devices have too little memory for the pages that are needed.
    """
    pool = pool_pages(cache)
    largest = pool - free_pages(cache) + more_pages(host, cache, now + new_tokens)
    size = _size(cache, max(need, min(2 * pool, largest)))
    if size < need and size != cache.limit:
        read, needed = int(on_host(cache.seen).max()) + now, need * _page_bytes(cache) / 2**20
        raise CapacityError(
            f"policy {host.name}: {read} tokens take {need} pages of {cache.page_size} tokens on a device, "
            f"{needed:.1f} MiB, and it has memory for {size}: give shorter prompts, a smaller batch or more devices"
        )
    return resize(cache, size, 0)


def resize_after_prompt(host: Policy, cache: Cache, new_tokens: int) -> Cache:
    """Return the cache with a pool for its entries and `new_tokens` more tokens. The pool grows if it has too few
    pages, and shrinks if half of it is enough. A small pool and one of stated capacity never shrink."""
    have = pool_pages(cache)
    need = have - free_pages(cache) + _expected_pages(host, cache, 0, new_tokens)
    size = _size(cache, need)
    shrinks = cache.limit is None and need <= size and caches.worth_shrinking(have, size, _page_bytes(cache))
    return resize(cache, size, 0) if size > have or shrinks else cache


def copy_for_question(host: Policy, cache: Cache, question: int, new_tokens: int) -> Cache:
    """Return a copy of `cache` that a question and an answer are expected to fit into. Forks get their own copies of
    the pages that they write to (`kvjax.cache.forks`).

    Args:
        question: tokens of each sequence's question.
        new_tokens: tokens that will follow.

    Raises CapacityError if the devices have too little memory for the copy, or the stated capacity has too few pages
    for the copies of forks.
    """
    pool, forked = pool_pages(cache), cache.pages.others is not None
    # page tables are rounded up so that questions of similar lengths run the same programs; many forks get no extra
    rounded = new_tokens if forked else caches.table_tokens(question + new_tokens) - question
    needed_pages = pool - free_pages(cache) + copied_pages(host, cache)
    tokens = _missing_slots(cache, question + new_tokens)
    size = _size(cache, max(pool, needed_pages + _expected_pages(host, cache, question, rounded)), tokens)
    if size < needed_pages and size != cache.limit:
        needed, free = needed_pages * _page_bytes(cache) / 2**20, caches.device_bytes(free=True) / 2**20
        raise CapacityError(
            f"policy {host.name}: a cache that is continued is copied, {needed:.1f} MiB on a device that has "
            f"{free:.1f} MiB free: give shorter prompts, a smaller batch or more devices"
        )
    copy = resize(cache, size, _missing_columns(host, cache, question + new_tokens), tokens)
    if not forked:
        return copy
    copy = copy_shared_pages(copy, host.rewrites_entries)
    caches.check(copy, host.name, question + new_tokens)
    return copy


def _size(cache: Cache, pages: int, tokens: int = 0) -> int:
    """Return the size of a new pool that has to hold `pages` pages, limited by the stated capacity and by the memory
    that the devices have in addition to the current pool. `tokens`: as in `kvjax.cache.resize`."""
    page_bytes, window_bytes = _page_bytes(cache), 0
    if cache.sliding is not None:
        # windows are copied too
        slots = max(slots_for(cache.sliding_window, tokens), cache.sliding.shape[3])
        window_bytes = cache.sliding.nbytes // cache.sliding.shape[3] * slots // axis_size(*SHARDS)
    free = max(0, caches.device_bytes(free=True) - window_bytes)
    size = min(caches.pool_size(pages, page_bytes), free // page_bytes)
    return size if cache.limit is None else min(size, cache.limit)


def _missing_columns(host: Policy, cache: Cache, tokens: int) -> int:
    """Return the number of columns that the page tables lack for `tokens` more tokens of each sequence."""
    seen, longest = int(on_host(cache.seen).max()), int(on_host(cache.layers.length).max(initial=0))

    def columns(tokens: int) -> int:
        most = min(max(seen + tokens - cache.window + 1, 0), longest + tokens)
        if host.max_entries is not None:
            most = min(most, max(host.max_entries, longest))
        return -(-most // cache.page_size)

    if columns(tokens) <= cache.columns:
        return 0
    return columns(caches.table_tokens(seen + tokens) - seen) - cache.columns


def _missing_slots(cache: Cache, tokens: int) -> int:
    """Return the tokens of a sequence that windows of sliding-window layers need slots for; 0: they have enough."""
    if cache.sliding is None:
        return 0
    longest = int(on_host(cache.seen).max()) + tokens
    enough = slots_for(cache.sliding_window, longest) <= cache.sliding.shape[3]
    return 0 if enough else caches.table_tokens(longest)


def _page_bytes(cache: Cache) -> int:
    return cache.pages.nbytes // cache.pages.pool.shape[0]
