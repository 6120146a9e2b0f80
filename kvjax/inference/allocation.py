"""The size of a cache: a new one for prompts, and pools that grow for questions and answers."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import cache as caches
from kvjax.cache import Cache, CapacityError, Layout
from kvjax.errors import UserError, whole_number
from kvjax.inference.page_counts import (
    by_own_heads,
    copied_pages,
    free_pages,
    more_pages,
    pool_pages,
    rings_pages,
    shared_pages,
)
from kvjax.inference.quota import entry_bytes
from kvjax.mesh import BATCH, HEADS, P, axis_size, batch_shards, gather, on_cpu
from kvjax.models.decoder import Decoder
from kvjax.policies.compiled import CompiledPolicy, States, View
from kvjax.policies.interfaces import Trail
from kvjax.policies.policy import Policy
from kvjax.policies.views import Shape
from pallas_kernels.bits import as_bits

grown = jax.jit(caches.grown, static_argnums=(1, 2))
trimmed = jax.jit(caches.trimmed, static_argnums=1)
owned = jax.jit(caches.owned, static_argnums=1, donate_argnums=0)

QUESTION = 64
"""Tokens of a question with its answer that there is room for at least."""


def empty_cache(policy: CompiledPolicy, *, group: int = 1, **sizes: Any) -> Cache:
    """A cache that has seen nothing, on the current mesh.

    Args:
        group: query heads of a kv head, for methods that remember queries.
        sizes: as of `layout_for`, but for `free`, which is what the devices have.
    """
    layout = layout_for(policy.host, free=caches.device_bytes(free=True), **sizes)
    return laid_out(policy.read, layout, group)


def layout_for(
    policy: Policy,
    *,
    batch: int,
    layers: int,
    kv_heads: int,
    head_dim: int,
    tokens: int | Sequence[int],
    dtype: Any,
    page_size: int | None = None,
    capacity: int | str | None = None,
    free: int | None = None,
) -> Layout:
    """The shape of a cache, for the current mesh.

    Args:
        batch: sequences, a multiple of the mesh's batch shards.
        tokens: at most, of each sequence or of all.
        page_size: as in `kvjax.inference.prefill.prefill`.
        capacity: as in `kvjax.cache.pages_for`.
        free: bytes that a device has for its pool; None: not looked at.

    Raises:
        UserError: a plane that has the name of one of the cache's own, or more memory than a device has free.
        CapacityError: a capacity below what the windows take.
    """
    page_size = page_size_of(policy, page_size)
    most = policy.most_stored
    each = [tokens] * batch if isinstance(tokens, int) else [*tokens, *[0] * (batch - len(tokens))]
    table = caches.table_tokens(max(each))
    if most is not None:
        table = min(table, most + policy.window - 1)
    each = [min(count, table) for count in each]
    dtype = jnp.dtype(dtype)
    stored, bounds = stored_as(dtype)
    own = {} if most is None else caches.CAPACITY_PLANES
    if taken := sorted(set(caches.CAPACITY_PLANES) & set(policy.planes)):
        raise UserError(f"policy {policy.name}: a plane called {taken[0]!r} is the cache's own")
    planes = tuple((name, jnp.dtype(own)) for name, own in (policy.planes | own).items())
    page_bytes = page_size * (2 * head_dim * dtype.itemsize + sum(own.itemsize for _, own in planes))
    page_bytes += 2 * head_dim * bounds.itemsize * (policy.selection is not None)
    entry_bytes = layers * kv_heads * page_bytes // page_size

    def shard_pages(each: Sequence[int]) -> int:
        """Of a pool for sequences of so many tokens."""
        pages = caches.pages_for(
            capacity, expected=lambda count: policy.expected_entries(count, entry_bytes), window=policy.window,
            tokens=each, layers=layers, kv_heads=kv_heads, page_size=page_size, page_bytes=page_bytes,
        )  # fmt: skip
        return caches.pool_size(pages, page_bytes) if capacity is None else pages

    pages = shard_pages(each)
    if free is not None and pages * page_bytes > free:
        if capacity is not None:
            raise CapacityError(
                f"capacity {capacity}: {pages * page_bytes / 2**30:.2f} GiB on a device that has "
                f"{free / 2**30:.2f} GiB free"
            )
        _refuse(policy.name, shard_pages, each, pages * page_bytes, page_bytes, free)
    return Layout(
        batch=batch, layers=layers, kv_heads=kv_heads, head_dim=head_dim, window=policy.window, tokens=table,
        page_size=page_size, pages=pages, dtype=dtype, stored=stored,
        bounds=None if policy.selection is None else bounds, planes=planes,
        bounded=capacity is not None,
    )  # fmt: skip


def page_size_of(policy: Policy, stated: int | None) -> int:
    """Tokens per page of a policy's cache on the current mesh: what is stated, else the default."""
    if stated is None:
        return caches.default_page_size(selects=policy.selection is not None)
    return whole_number("cache", "page_size", stated)


def stored_as(dtype: Any) -> tuple[np.dtype, np.dtype]:
    """The dtypes of a pool for entries of `dtype`, and of its pages' bounds, on the current mesh."""
    dtype = jnp.dtype(dtype)
    if dtype.itemsize == 2 and on_cpu():
        return jnp.dtype(jnp.uint16), jnp.dtype(jnp.float32)
    return dtype, dtype


def _refuse(
    name: str,
    shard_pages: Callable[[Sequence[int]], int],
    each: Sequence[int],
    need: int,
    page_bytes: int,
    free: int,
) -> None:
    """Raise the UserError for a pool that no device has the memory for, with what would fit."""
    low, high = 0, max(each)
    while low < high:
        fewer = -(-(low + high) // 2)
        fits = shard_pages([min(count, fewer) for count in each]) * page_bytes <= free
        low, high = (fewer, high) if fits else (low, fewer - 1)
    raise UserError(
        f"policy {name}: sequences of up to {max(each)} tokens, prompt and answer, take {need / 2**30:.2f} GiB of "
        f"cache on a device that has {free / 2**30:.2f} GiB free; {low} tokens would fit"
    )


@functools.partial(jax.jit, static_argnums=(1, 2))
def laid_out(view: View, layout: Layout, group: int) -> Cache:
    """Return an empty cache of this shape, with the methods' memories, for `group` query heads of a KV head."""

    def shape(batch: int, heads: int) -> Shape:
        return Shape(batch, heads, group, layout.head_dim, layout.dtype)

    def begun(view: View) -> tuple[States, Trail]:
        states, trail = view.memories(local, layout.layers)
        return states, jax.tree.map(as_bits, trail) if layout.stored != layout.dtype else trail

    local = shape(layout.batch // batch_shards(), layout.kv_heads // axis_size(*HEADS))
    shapes = zip(*(view.memory_shapes(shape(1, heads), layout.layers) for heads in (1, 2)), strict=True)
    specs = tuple(
        jax.tree.map(functools.partial(_split_like_heads, first), *both)
        for first, both in zip(((None, BATCH), (BATCH,)), shapes, strict=True)
    )
    whole = gather(view, "data", "fsdp")
    return caches.empty(layout, *jax.shard_map(begun, out_specs=specs)(whole))


def _split_like_heads(first: tuple[Any, ...], one: jax.ShapeDtypeStruct, two: jax.ShapeDtypeStruct) -> P:
    """The split of a memory, its first axes' given, of one kv head and of two: axes that grow with the heads go with
    them."""
    axes = zip(one.shape[len(first) :], two.shape[len(first) :], strict=True)
    return P(*first, *(HEADS if small != large else None for small, large in axes))


def new_cache(
    model: Decoder,
    policy: CompiledPolicy,
    rows: Sequence[np.ndarray],
    room: int,
    page_size: int | None,
    capacity: int | str | None,
) -> Cache:
    """An empty cache for prompts and `room` more tokens."""
    shards, config, plan = batch_shards(), model.config, policy.host.plan
    if plan is not None and plan.moment.while_decoding and capacity is None:
        room = 0  # which is made when the prompt was compacted
    more = room + (0 if plan is None else plan.read_behind)
    return empty_cache(
        policy,
        batch=-(-len(rows) // shards) * shards,
        layers=config.num_layers,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        tokens=[row.size + more for row in rows],
        dtype=model.embed.dtype,
        group=config.num_heads // config.num_kv_heads,
        page_size=page_size,
        capacity=capacity,
    )


def begin(
    model: Decoder,
    policy: CompiledPolicy,
    rows: list[np.ndarray],
    room: int,
    page_size: int | None,
    capacity: int | str | None,
) -> Cache:
    """Return an empty cache for prompts and `room` more tokens.

    Raises UserError as `empty_cache`, and for a budget below what always stays.
    """
    host = policy.host
    if host.plan is not None:
        # at once, and not when a prompt or an answer has grown to it
        shape = model.config
        entry_bytes = shape.num_layers * shape.num_kv_heads * 2 * shape.head_dim * model.embed.dtype.itemsize
        host.plan.check_bound(host.name, host.window - 1, entry_bytes)
    return new_cache(model, policy, rows, room, page_size, capacity)


def with_more_pages(policy: Policy, cache: Cache, used: int, read: int, to_come: int) -> Cache:
    """A copy with a larger pool.

    Args:
        used: pages of a shard that will be in use once `read` tokens of the longest sequence are stored.
        to_come: tokens that follow them.

    Raises:
        CapacityError: the devices have no memory for `used` pages.
    """
    have, page_bytes = pool_pages(cache), cache.pages.nbytes // cache.pages.pool.shape[0]
    # what follows as what was read, or all of it
    likely = int(used * (1 + to_come / max(read, 1)) * caches.MARGIN)
    need = min(likely, used + more_pages(cache, to_come, policy.most_stored))
    # while they are copied both pools are held
    most = caches.device_bytes(free=True) // page_bytes
    size = min(max(caches.pool_size(need, page_bytes), used), most)
    if size < used:
        raise CapacityError(
            f"policy {policy.name}: {read} tokens take {used} pages of {cache.page_size} tokens on a device, "
            f"{used * page_bytes / 2**20:.1f} MiB, and it has memory for {most}: give shorter prompts, a smaller batch "
            "or more devices"
        )
    return grown(cache, size - have, 0)


def _wanted(policy: Policy, cache: Cache, question: int, answer: int) -> int:
    """Pages of a shard for what is stored and, in each sequence, a question and an answer of so many tokens."""
    used, tokens, plan = pool_pages(cache) - free_pages(cache), question + answer, policy.plan
    used += copied_pages(policy, cache)
    if tokens == 0:
        return max(used, 1)
    # questions and answers of about one length run the same programs; where there are many, each has less to spare
    tokens = max(QUESTION if cache.pages.others is None else 1, 1 << (tokens - 1).bit_length())
    layers, batch, heads = cache.layers.length.shape
    # every row may start a page, and then takes what the policy admits of the new tokens
    expected = np.broadcast_to(
        policy.admission.admitted(tokens + cache.window) * caches.MARGIN, (layers, heads)
    )
    each = np.ceil(np.minimum(expected, tokens) / cache.page_size).astype(np.int64) + 1
    parts = len(np.asarray(cache.pages.free_count)) // batch_shards()
    rings = int(by_own_heads(cache, rings_pages(cache, tokens) - rings_pages(cache)).max())
    need = used + rings + batch // batch_shards() * caches.largest_shard(each, parts)
    need = min(need, used + more_pages(cache, tokens, policy.most_stored))
    if plan is None or not plan.moment.while_decoding:
        return need
    # or what the budget lets stand, and what comes between two compactions
    between = question + max(plan.moment.every, 1)
    share = plan.allowance([int(np.asarray(cache.seen).max()) + tokens], entry_bytes(cache))[0]
    budget = np.full(cache.layers.length.shape, -(-int(share + between) // cache.page_size) + 1)
    planned = by_own_heads(cache, budget + rings_pages(cache, tokens))
    if cache.pages.others is not None:
        # what a branch keeps it may have to copy, and its siblings hold the rest: heads that share a budget may keep
        # all of it on one device, but no more than is theirs
        if plan.shares.over != "head":
            planned = planned.sum(1, keepdims=True)
        longest = -(-(np.asarray(cache.layers.length) + tokens) // cache.page_size)
        theirs = by_own_heads(cache, longest + rings_pages(cache, tokens))
        return used + int(np.minimum(planned, theirs).max())
    return min(need, max(int(planned.max()), used + more_pages(cache, between)))


def _lacking(policy: Policy, cache: Cache, question: int, answer: int) -> int:
    """Pages that the pool lacks of what is wanted, rounded up; below 0 if it has more. 0 if its size was stated."""
    if cache.bounded:
        return 0
    need, have = _wanted(policy, cache, question, answer), pool_pages(cache)
    rounded = caches.pool_size(need, cache.pages.nbytes // cache.pages.pool.shape[0])
    return 0 if need <= have <= rounded else rounded - have


def _columns(policy: Policy, cache: Cache, tokens: int) -> int:
    """Columns that the page table lacks for `tokens` more tokens; where it lacks any, of a number rounded up."""
    seen, longest = int(np.asarray(cache.seen).max()), int(np.asarray(cache.layers.length).max())
    have = cache.columns

    def columns(tokens: int) -> int:
        most = min(max(seen + tokens - cache.window + 1, 0), longest + tokens)
        if policy.most_stored is not None:
            most = min(most, max(policy.most_stored, longest))
        return -(-most // cache.page_size)

    if columns(tokens) <= have:
        return 0
    return columns(caches.table_tokens(seen + tokens) - seen) - have


def fitted(policy: Policy, cache: Cache, tokens: int) -> Cache:
    """The cache with a pool as large as what is stored takes and so many decoded tokens, unless its size was stated."""
    lacking, columns = _lacking(policy, cache, 0, tokens), _columns(policy, cache, tokens)
    if lacking < 0:
        cache = trimmed(cache, pool_pages(cache) + lacking)
    if columns or lacking > 0:
        cache = grown(cache, max(0, lacking), columns)
    return cache


def halved(policy: Policy, cache: Cache, tokens: int) -> Cache:
    """The cache with a half, a quarter or an eighth of its pool where that takes what is stored and so many decoded
    tokens, since less was admitted than was expected; unless its size was stated, or devices cannot hold both pools."""
    if cache.bounded:
        return cache
    have, page_bytes = pool_pages(cache), cache.pages.nbytes // cache.pages.pool.shape[0]
    size = caches.halved_size(have, _wanted(policy, cache, 0, tokens), page_bytes)
    fits = size * page_bytes <= caches.device_bytes(free=True)
    return trimmed(cache, size) if size < have and fits else cache


def with_room(cache: Cache, policy: Policy, question: int, answer: int) -> Cache:
    """Return a copy of `cache` that can take a question and an answer of so many tokens a sequence. Its pool grows
    unless its size was stated. Forks then own what they write to (`kvjax.cache.branches`).

    Raises CapacityError where the devices have no memory for a copy, or not for what forks own of it.
    """
    lacking, have = max(0, _lacking(policy, cache, question, answer)), pool_pages(cache)
    copied = min(copied_pages(policy, cache), shared_pages(cache))
    least = have + min(lacking, max(0, copied - free_pages(cache)))
    page_bytes, free = cache.pages.nbytes // cache.pages.pool.shape[0], caches.device_bytes(free=True)
    most = free // page_bytes
    if least > most:
        raise CapacityError(
            f"policy {policy.name}: a cache that is continued is copied, {least * page_bytes / 2**20:.1f} MiB on a "
            f"device that has {free / 2**20:.1f} MiB free beside it: give shorter prompts, a smaller batch or more "
            "devices"
        )
    copy = grown(cache, min(lacking, most - have), _columns(policy, cache, question + answer))
    return copy if copy.pages.others is None else owned(copy, policy.rewritten)
