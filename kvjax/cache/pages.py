"""The cache's storage: pages of entries, and what each row knows of its own.

One pool of fixed-size pages per device shard serves all layers and heads; a row is one (layer, sequence, kv head) and
has its page table and its length. The first columns of a row's table are its ring's pages, the others those of its
global region (`kvjax.cache.ring`).

`Pages` and `LayerCache` are local to one shard of batch and kv heads.
"""

import dataclasses
import math
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped, UInt16

from kvjax.struct import short, static, struct
from pallas_kernels.bits import as_bits, as_floats
from pallas_kernels.choose import target

Number = TypeVar("Number", int, np.ndarray, jax.Array)

SMALL_PAGE, TPU_PAGE = 16, 64
"""Tokens per page by default: the papers' choice, and what a TPU decodes faster from."""


def default_page_size(*, selects: bool) -> int:
    """Tokens per page on the current mesh, also one of devices that are not here: fewer, larger copies keep a TPU
    waiting for its memory alone. For a policy that selects pages they are what is selected, as large as published."""
    return TPU_PAGE if target().platform == "tpu" and not selects else SMALL_PAGE


def ring_pages(window: Number, page_size: int) -> Number:
    """Pages that a full ring of `window − 1` slots takes, or a larger one that has so many tokens."""
    return -(-(window - 1) // page_size)


@struct
class Pages:
    """The pool of one shard, its free list, and what stands beside its entries."""

    pool: Float[Array, "p page kv"] | UInt16[Array, "p page kv"]
    """Keys after RoPE and, behind them, values."""
    free: Int[Array, " p"]
    """A stack: `free[:free_count]` are free."""
    free_count: Int[Array, " shards"]
    """A negative count is a debt: that many pages were needed and not there; or `kvjax.cache.checks.NOT_FINITE`."""
    dtype: Any = static()
    """Dtype of the entries. If the pool holds integers they are these numbers' bits (`pallas_kernels.bits`)."""
    bounds: Float[Array, "p kv"] | None = None
    """For policies that select pages: of the keys k in each page of a global region, the smallest components of k and,
    beside them, of −k. Infinite where there are no keys; float32 where the pool holds integers."""
    planes: dict[str, Shaped[Array, "p page"]] = dataclasses.field(default_factory=dict)
    """The methods' own numbers of the global region's entries, by name (`kvjax.cache.planes`)."""
    others: Int[Array, " p"] | None = None
    """How many rows hold each page beside the first (`kvjax.cache.branches`). None: each page is one row's."""

    def entries(
        self, page: Int[Array, "b k s"], offset: Int[Array, "b k_or_1 s"]
    ) -> Float[Array, "b k s kv"]:
        """The entries at these places."""
        return as_floats(self.pool[page, offset], self.dtype)

    def rows(self, page_table: Int[Array, "b k c"]) -> Float[Array, "b k s kv"]:
        """The entries of these pages in order, unspecified where a column holds no page."""
        pages = self.pool.at[page_table].get(mode="clip")
        return as_floats(pages.reshape(*page_table.shape[:2], -1, pages.shape[-1]), self.dtype)

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
        return sum(x.nbytes for x in jax.tree.leaves((self.pool, self.bounds, self.planes)))


@struct
class LayerCache:
    """State of a layer's head caches. Stacked over layers in `Cache`."""

    page_table: Int[Array, "*l b k c"]
    """The first `ring_pages` columns are the ring's pages, the rest the global region's in order. A column that holds
    no page has an index past the pool's end."""
    length: Int[Array, "*l b k"]
    """Entries in the global region."""
    priority: Float[Array, "*l b k r"]
    """Priorities of the local window's tokens, by slot."""
    numbers: dict[str, Shaped[Array, "*l b k r"]]
    """Metadata of the local window's tokens, by slot: what `Pages.planes` has of retained entries."""
    state: Any
    """The methods' memories (`kvjax.policies.policy.States`)."""


@struct
class Cache:
    """Everything a model remembers of a batch of sequences. Made by `empty`, advanced by `kvjax.inference`."""

    pages: Pages
    """The storage, which all layers share."""
    layers: LayerCache
    """State of each layer's head caches, `[l …]`."""
    seen: Int[Array, " b"]
    """Tokens of each sequence so far."""
    trail: Any
    """Observation buffers of the eviction, in the pytree that it says (`kvjax.cache.trail`)."""
    window: int = static()
    """The last tokens that are always visible; the ring has one slot fewer."""
    limit: int | None = static(default=None)
    """Most pages that a shard's pool may ever have, by the stated capacity; None: none was stated."""

    @property
    def page_size(self) -> int:
        return self.pages.pool.shape[1]

    @property
    def entry_bytes(self) -> int:
        """Bytes of one token's key and value in all layers and kv heads."""
        layers, _, heads = self.layers.length.shape
        return layers * heads * self.pages.pool.shape[-1] * self.pages.pool.dtype.itemsize

    @property
    def columns(self) -> int:
        """Pages that the table of a head cache's retained entries has places for."""
        return self.layers.page_table.shape[-1] - ring_pages(self.window, self.page_size)

    def __repr__(self) -> str:
        """Its sizes, in a line."""
        shape, pool = np.shape(self.layers.length), self.pages.pool
        if len(shape) != 3 or not hasattr(pool, "dtype"):
            return short(self)  # JAX's own stand-ins for arrays
        layers, batch, heads = shape
        bytes_ = math.prod(pool.shape) * pool.dtype.itemsize
        return (
            f"Cache({batch} sequences, {layers} layers × {heads} kv heads, window {self.window}, "
            f"{pool.shape[0]:,} pages of {pool.shape[1]}: {bytes_ / 2**20:.2f} MiB)"
        )


def with_keys(
    bounds: Float[Array, "p kv"] | None, page: Int[Array, "b k s"], kv: Float[Array, "b k s kv"]
) -> Float[Array, "p kv"] | None:
    """The bounds of pages once these entries are in them; an entry whose page is past the pool's end is in none."""
    if bounds is None:
        return None
    k = kv[..., : kv.shape[-1] // 2].astype(bounds.dtype)
    return bounds.at[page].min(jnp.concatenate([k, -k], -1), mode="drop")
