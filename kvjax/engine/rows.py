"""Rows of a running cache: one sequence as a cache of its own over the same pool, put into a slot and taken out of it.

These programs move little data, except for the pages of a sequence that is copied to or from host memory. The pool is
never copied.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache import Cache, LayerCache, Layout, Pages
from kvjax.cache.forks import with_columns, with_copies, written_columns
from kvjax.cache.pages import Contents
from kvjax.inference.allocation import laid_out
from kvjax.mesh import SHARDS, P, specs_of
from kvjax.policies.compiled import View


class Row(NamedTuple):
    """A sequence without its pages."""

    layers: LayerCache
    seen: Int[Array, " 1"]
    observations: Any
    sliding: Any
    origin: Int[Array, " 1"]
    dropped_slots: Bool[Array, "1 s"] | None

    @property
    def counted(self) -> Int[Array, " 1"] | Int[np.ndarray, " 1"]:
        """The number of tokens that the local window counts (`Cache.counted`)."""
        return self.seen - self.origin


AXES = 1, 0, 0, 1, 0, 0
"""The axis of the sequences in the arrays of each field of `Row`."""


def row_of(cache: Cache) -> Row:
    """Return the state of a cache's sequences without its pages."""
    return Row(cache.layers, cache.seen, cache.observations, cache.sliding, cache.origin, cache.dropped_slots)


@functools.partial(jax.jit, static_argnums=(1, 2))
def new_row(view: View, layout: Layout, group: int, key_scale: Float[Array, "l k h"] | None) -> Row:
    """Return a sequence that has seen nothing, for a pool of this layout. key_scale: as in `kvjax.cache.empty`."""
    return row_of(laid_out(view, dataclasses.replace(layout, batch=1), group, key_scale))


@functools.partial(jax.jit, donate_argnums=0)
def put_in(slots: Row, row: Row, slot: Int[Array, ""]) -> Row:
    """Return the state of all slots after a sequence was put into one of them."""

    def local(slots, row, slot):
        def changed(x, new, axis):
            return jax.lax.dynamic_update_slice_in_dim(x, new, slot, axis)

        parts = (
            jax.tree.map(lambda x, new, a=axis: changed(x, new, a), old, part)
            for old, part, axis in zip(slots, row, AXES, strict=True)
        )
        return Row(*parts)

    return jax.shard_map(local, out_specs=specs_of(slots))(slots, row, slot)


@jax.jit
def taken_out(slots: Row, slot: Int[Array, ""]) -> Row:
    """Return the sequence that is in a slot."""

    def local(slots, slot):
        def sliced(x, axis):
            return jax.lax.dynamic_slice_in_dim(x, slot, 1, axis)

        parts = (
            jax.tree.map(lambda x, a=axis: sliced(x, a), part) for part, axis in zip(slots, AXES, strict=True)
        )
        return Row(*parts)

    return jax.shard_map(local, out_specs=specs_of(slots))(slots, slot)


@functools.partial(jax.jit, static_argnums=(2, 3), donate_argnums=0)
def forked(pages: Pages, row: Row, ring: int, rewrites_entries: bool) -> tuple[Pages, Row]:
    """Return the pages, and a second sequence that continues the same tokens. The two share all pages that neither may
    write to. The fork has copies of the others: the pages of the local window, which are the first `ring` columns of a
    table, and the page of the next entry, or all pages if the policy `rewrites_entries`. Enough pages must be free."""

    def local(pages, row):
        table = row.layers.page_table
        column, page = written_columns(pages, row.layers, ring, rewrites_entries)
        # The fork holds every page of its table, until a copy takes the page's place.
        pages = dataclasses.replace(pages, others=pages.others.at[table].add(1, mode="drop"))
        pages, page = with_copies(pages, page, jnp.ones_like(page, bool))
        table = with_columns(table, column, page)
        return pages, row._replace(layers=dataclasses.replace(row.layers, page_table=table))

    return jax.shard_map(local, out_specs=specs_of((pages, row)))(pages, row)


@functools.partial(jax.jit, donate_argnums=0)
def freed(pages: Pages, row: Row) -> tuple[Pages, Row]:
    """Return the pages after those that only this sequence holds were freed, and an empty sequence."""

    def local(pages, row):
        none, table = pages.pool.shape[0], row.layers.page_table
        page = table.reshape(-1)
        back, others = page < none, pages.others
        if others is not None:
            shared = others.at[page].get(mode="clip") > 0
            others = others.at[jnp.where(shared, page, none)].add(-1, mode="drop")
            back &= ~shared
        page = jnp.where(back, page, none)
        place = pages.free_count[0] + jnp.cumsum(back, dtype=jnp.int32) - 1
        free = pages.free.at[jnp.where(back, place, none)].set(page, mode="drop")
        count = pages.free_count + back.sum(dtype=jnp.int32)
        bounds = pages.bounds
        bounds = None if bounds is None else bounds.at[page].set(jnp.inf, mode="drop")
        empty = dataclasses.replace(
            row.layers, page_table=jnp.full_like(table, none), length=jnp.zeros_like(row.layers.length)
        )
        row = row._replace(layers=empty, seen=jnp.zeros_like(row.seen), origin=jnp.zeros_like(row.origin))
        return dataclasses.replace(pages, free=free, free_count=count, bounds=bounds, others=others), row

    return jax.shard_map(local, out_specs=specs_of((pages, row)))(pages, row)


@functools.partial(jax.jit, static_argnums=3)
def copied_out(pages: Pages, row: Row, start: Int[Array, ""], count: int) -> Contents:
    """Return the contents of `count` pages of a sequence on each shard, starting with page `start` of its tables."""

    def local(pages, row, start):
        listed = _listed(row.layers.page_table, pages.pool.shape[0], start, count)
        return jax.tree.map(lambda x: x.at[listed].get(mode="clip"), pages.contents)

    specs = jax.tree.map(lambda x: P(SHARDS, *(None,) * (x.ndim - 1)), pages.contents)
    return jax.shard_map(local, out_specs=specs)(pages, row, start)


@functools.partial(jax.jit, donate_argnums=0)
def copied_in(pages: Pages, row: Row, start: Int[Array, ""], contents: Contents) -> Pages:
    """Return the pages after these contents were written to those of a sequence, starting with page `start` of its
    tables."""

    def local(pages, row, start, contents):
        count = jax.tree.leaves(contents)[0].shape[0]
        listed = _listed(row.layers.page_table, pages.pool.shape[0], start, count)
        new = jax.tree.map(lambda x, new: x.at[listed].set(new, mode="drop"), pages.contents, contents)
        return dataclasses.replace(pages, **new)

    return jax.shard_map(local, out_specs=specs_of(pages))(pages, row, start, contents)


@functools.partial(jax.jit, donate_argnums=0)
def allocated(pages: Pages, row: Row) -> tuple[Pages, Row]:
    """Take a free page for every page in a sequence's table. Returns the pages, and the sequence with the taken pages
    in its table. Enough pages must be free."""

    def local(pages, row):
        none, page = pages.pool.shape[0], row.layers.page_table.reshape(-1)
        used = page < none
        place = jnp.cumsum(used, dtype=jnp.int32) - 1
        taken_out = pages.free[jnp.maximum(pages.free_count[0] - 1 - place, 0)]
        table = jnp.where(used, taken_out, none).reshape(row.layers.page_table.shape)
        count = pages.free_count - used.sum(dtype=jnp.int32)
        layers = dataclasses.replace(row.layers, page_table=table)
        return dataclasses.replace(pages, free_count=count), row._replace(layers=layers)

    return jax.shard_map(local, out_specs=specs_of((pages, row)))(pages, row)


def _listed(
    table: Int[Array, "l 1 k columns"], none: int, start: Int[Array, ""], count: int
) -> Int[Array, " count"]:
    """Return `count` pages of a table in its order, starting with page `start`; `none` where it has fewer."""
    page = table.reshape(-1)
    used = page < none
    place = jnp.cumsum(used) - 1 - start
    place = jnp.where(used & (place >= 0), place, count)
    return jnp.full(count, none, jnp.int32).at[place].set(page, mode="drop")
