"""The engine's pool of pages and its slots, on the devices. The host counts the free pages without waiting for the
block that is on its way."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.cache import POSITION, Cache, Layout, Span, drop, not_finite, ring_pages
from kvjax.cache.pages import Contents
from kvjax.engine.rows import (
    Row,
    allocated,
    copied_in,
    copied_out,
    forked,
    freed,
    new_row,
    put_in,
    row_of,
    taken_out,
)
from kvjax.inference.allocation import laid_out
from kvjax.inference.forward import drop_observation_state
from kvjax.mesh import SHARDS, P, axis_size, on_host, put, specs_of
from kvjax.policies.compiled import CompiledPolicy

PIECE = 4096
"""Pages of a sequence that are copied out of the pool, or into it, at once."""


def _on_devices(x: np.ndarray, spec: P) -> jax.Array:
    return put(x, *spec)


class HostSequence(NamedTuple):
    """A sequence in host memory."""

    row: Row
    """The sequence without its pages. Its page table only shows which columns hold a page, not which page."""
    pieces: list[Contents]
    """The contents of its pages, in pieces of up to `PIECE`, in the order of its table."""
    specs: Any
    """The shardings of the arrays of `row` and of a piece."""

    @property
    def sizes(self) -> tuple[Int[np.ndarray, "l 1 k"], Int[np.ndarray, " 1"]]:
        """The retained entries of its heads, and the tokens that its window counts."""
        return np.asarray(self.row.layers.length), np.asarray(self.row.counted)


class SlotSizes(NamedTuple):
    """Sizes of the slots after a block. They are copies, since the cache is donated to the next block."""

    length: Int[Array, "l b k"]
    seen: Int[Array, " b"]
    free_count: Int[Array, " shards"]
    changes: int
    """The number of times that anything but a block had changed the pool before this block."""


class Pool:
    """The pages, and the sequences that hold or share them: those in slots, and rows that the engine keeps."""

    def __init__(
        self, policy: CompiledPolicy, layout: Layout, group: int, key_scale: Float[Array, "l k h"] | None
    ):
        self.layout = layout
        self._policy, self._group, self._key_scale = policy, group, key_scale
        cache = laid_out(policy.read, layout, group, key_scale)
        others = put(np.zeros(cache.pages.free.shape, np.int32), SHARDS)
        cache = dataclasses.replace(cache, pages=dataclasses.replace(cache.pages, others=others))
        self._pages, self._form = cache.pages, dataclasses.replace(cache, limit=layout.pages)
        decoding = drop_observation_state(cache, policy.decode)
        self._slots, self._lasting = row_of(decoding), set(decoding.pages.metadata)
        table = layout.layers * layout.kv_heads * decoding.layers.page_table.shape[-1]
        self._piece = max(1, min(PIECE, table // axis_size("tensor")))
        self._free: int | None = None
        self._changes = 0

    @property
    def free(self) -> int:
        """Free pages on the device with the fewest, after the last block that was looked at. If anything else has
        changed the pool since, this waits for all programs that were sent to the devices and counts then."""
        if self._free is None:
            self._free = self._count(self._pages.free_count)
        return self._free

    @property
    def knows_positions(self) -> bool:
        """True if the positions of entries are known, so that spans can be dropped."""
        return POSITION in self._pages.metadata

    @property
    def is_counted(self) -> bool:
        """True if the free pages are known without waiting for the devices."""
        return self._free is not None

    def _count(self, free_count: Array) -> int:
        counts = on_host(free_count)
        if (counts < 0).any():
            # pages are never short here: a number was not finite
            raise not_finite(self.layout.dtype)
        return int(counts.min())

    def _changed(self) -> None:
        self._free, self._changes = None, self._changes + 1

    # ---- slots

    def slots(self) -> Cache:
        """Return all slots as a cache, to decode with. The cache is donated; pass the new one to `decoded`."""
        return self._cache(self._slots, self._lasting)

    def decoded(self, cache: Cache) -> SlotSizes:
        """Take the slots back after a block."""
        self._slots = self._keep(cache)
        length, seen, free_count = map(jnp.copy, (cache.layers.length, cache.seen, cache.pages.free_count))
        return SlotSizes(length, seen, free_count, self._changes)

    def looked_at(self, sizes: SlotSizes) -> None:
        """Record the free pages after a block, once it is done."""
        self._free = self._count(sizes.free_count) if sizes.changes == self._changes else None

    def put(self, slot: int, row: Row) -> None:
        """Put a sequence into a slot."""
        self._slots = put_in(self._slots, row, np.int32(slot))

    def clear(self, slot: int) -> None:
        """Free the pages of a slot."""
        empty = self.release(taken_out(self._slots, np.int32(slot)))
        self._slots = put_in(self._slots, empty, np.int32(slot))

    def copy_out(self, slot: int) -> HostSequence:
        """Return a copy of a slot's sequence in host memory."""
        row, pieces = taken_out(self._slots, np.int32(slot)), []
        specs = specs_of((row, self._pages.contents))
        used = (on_host(row.layers.page_table) < self.layout.pages).sum((0, 1, 3))
        for start in range(0, int(used.reshape(axis_size("tensor"), -1).sum(1).max()), self._piece):
            pieces.append(jax.tree.map(on_host, copied_out(self._pages, row, np.int32(start), self._piece)))
        return HostSequence(jax.tree.map(on_host, row), pieces, specs)

    # ---- sequences outside the slots

    def begin(self) -> Row:
        """Return a sequence that has seen nothing."""
        return new_row(self._policy.read, self.layout, self._group, self._key_scale)

    def alone(self, row: Row, *, continues: bool) -> Cache:
        """Return a sequence as a cache of its own over the pool, to read with. The cache is donated; pass the new one
        to `keep`.

        continues: True for a fork, which may share pages with others.
        """
        if continues:
            return self._cache(row, self._lasting)
        cache = self._cache(row)
        return dataclasses.replace(cache, pages=dataclasses.replace(cache.pages, others=None))

    def keep(self, cache: Cache) -> Row:
        """Take the pages back from the cache of a sequence. Returns the sequence."""
        self._changed()
        return self._keep(cache)

    def decoding(self, cache: Cache) -> Row:
        """Return the sequence of a cache after reading, in the form that slots hold."""
        return row_of(drop_observation_state(cache, self._policy.decode))

    def copy_in(self, sequence: HostSequence) -> Row:
        """Return a sequence that was in host memory. Enough pages must be free."""
        row_specs, piece_specs = sequence.specs
        self._pages, row = allocated(self._pages, jax.tree.map(_on_devices, sequence.row, row_specs))
        for index, piece in enumerate(sequence.pieces):
            contents = jax.tree.map(_on_devices, piece, piece_specs)
            self._pages = copied_in(self._pages, row, np.int32(index * self._piece), contents)
        self._changed()
        return row

    def fork(self, row: Row) -> Row:
        """Return a fork of a sequence. Enough pages must be free."""
        ring = ring_pages(self.layout.window, self.layout.page_size)
        self._pages, new = forked(self._pages, row, ring, self._policy.host.rewrites_entries)
        self._changed()
        return new

    def without(self, row: Row, start: int, end: int) -> Row:
        """Return a sequence without the tokens from `start` to `end`. As many pages as `shared` returns must be free.
        Raises UserError, as `Cache.without` does, for tokens that cannot be dropped yet; the sequence then stays as it
        is."""
        return self.keep(drop(self.alone(row, continues=True), Span(0, start, end)))

    def shared(self, row: Row, start: int) -> int:
        """Return the most pages of a sequence, on one device, that hold entries from position `start` on and are shared
        with other sequences."""
        assert self._pages.others is not None
        others = on_host(self._pages.others).reshape(axis_size(*SHARDS), -1)
        window, page_size = self.layout.window, self.layout.page_size
        length, seen, counted = map(on_host, (row.layers.length, row.seen, row.counted))
        # the tokens that are not retained may all come before that position
        gone = (seen - np.minimum(counted, window - 1))[:, None] - length
        first = ring_pages(window, page_size) + np.clip(start - gone, 0, length) // page_size
        table = on_host(row.layers.page_table)
        table = np.where(np.arange(table.shape[-1]) < first[..., None], self.layout.pages, table)
        by_shard = np.split(table, len(others), 2)
        return max(int((np.append(x, 0)[pages] > 0).sum()) for x, pages in zip(others, by_shard, strict=True))

    def release(self, row: Row) -> Row:
        """Free the pages of a sequence. Returns an empty one."""
        self._pages, empty = freed(self._pages, row)
        self._changed()
        return empty

    def _cache(self, row: Row, metadata: set[str] | None = None) -> Cache:
        """Return sequences as a cache with the named metadata fields; None: with all of them."""
        fields = {name: x for name, x in self._pages.metadata.items() if metadata is None or name in metadata}
        rest: dict[str, Any] = row._asdict()
        return dataclasses.replace(
            self._form, pages=dataclasses.replace(self._pages, metadata=fields), **rest
        )

    def _keep(self, cache: Cache) -> Row:
        metadata, others = self._pages.metadata | cache.pages.metadata, cache.pages.others
        others = self._pages.others if others is None else others
        self._pages = dataclasses.replace(cache.pages, metadata=metadata, others=others)
        return row_of(cache)
