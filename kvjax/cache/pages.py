"""The cache's storage: the page pool, and the state of each head cache.

One pool of fixed-size pages per device shard serves all layers and heads. A head cache (layer, sequence, kv head) has a
page table and a length. The first columns of its table are the pages of its local window, the others those of its
retained entries (`kvjax.cache.ring`).

`Pages` and `LayerCache` are local to one shard of batch and kv heads.
"""

import dataclasses
import math
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Int8, Int32, Shaped, UInt16

from kvjax.errors import named_arguments
from kvjax.struct import short, static, struct
from pallas_kernels.bits import as_bits, as_floats
from pallas_kernels.choose import target
from pallas_kernels.int8_entries import dequantised_entries, quantised_entries, with_value_scales

Number = TypeVar("Number", int, np.ndarray, jax.Array)

SMALL_PAGE, TPU_PAGE = 16, 64
"""Default numbers of tokens per page: the papers' choice, and a larger one with which a TPU decodes faster."""
INT8_TPU_PAGES = 32, 128
"""Default numbers of tokens per page of int8 entries on a TPU. 32 is the smallest tile of int8 numbers. With 128 a
page's scales fill one row of lanes; XLA would copy smaller rows before they are read."""
SCALE = "scale"
"""The name of the metadata field with the scales of int8 entries (`pallas_kernels.int8_entries`), including those in
local windows."""


def default_page_size(*, selects: bool, int8: bool = False) -> int:
    """Return the default number of tokens per page on the current mesh, whose devices need not be present. A TPU gets
    larger pages, since its decoding speed is then limited by memory bandwidth and not by the number of copies. A policy
    that selects pages gets the published size, or the smallest possible size above it."""
    if target().platform != "tpu":
        return SMALL_PAGE
    small, large = INT8_TPU_PAGES if int8 else (SMALL_PAGE, TPU_PAGE)
    return small if selects else large


def entry_bytes(head_dim: int, dtype: Any, *, int8: bool) -> int:
    """Return the bytes of a token's key and value in one kv head, given the model's dtype. Int8 entries include their
    scales."""
    return 2 * head_dim + 4 if int8 else 2 * head_dim * np.dtype(dtype).itemsize


def ring_pages(window: Number, page_size: int) -> Number:
    """Return the pages that a local window of `window − 1` tokens takes."""
    return -(-(window - 1) // page_size)


Contents = dict[str, Shaped[Array, "p ..."] | dict[str, Shaped[Array, "p ..."]] | None]
"""The entries of pages, their bounds and their metadata, by the names of the fields of `Pages`."""

KeyScale = Float[Array, "b k h"] | None
"""`LayerCache.key_scale` of one layer."""


@struct
class Pages:
    """The pool of one shard, its free list, and the metadata of its pages and entries."""

    pool: Float[Array, "p page kv"] | UInt16[Array, "p page kv"] | Int8[Array, "p page kv"]
    """Keys after RoPE, followed by values. Int8 numbers have scales (`SCALE`), and `LayerCache.key_scale`."""
    free: Int[Array, " p"]
    """The stack of free pages: `free[:free_count]` are free."""
    free_count: Int[Array, " shards"]
    """The number of free pages. A negative number is a debt, the number of pages that were needed and missing. It may
    also be `kvjax.cache.checks.NOT_FINITE`."""
    dtype: Any = static()
    """Dtype of the entries. If the pool holds 16-bit integers, these are the bits of such numbers
    (`pallas_kernels.bits`)."""
    bounds: Float[Array, "p kv"] | None = None
    """Bounds of the keys k in each page of retained entries, for policies that select pages: the smallest components of
    k, followed by those of −k. They are infinite where there are no keys, and float32 where the pool holds bits."""
    metadata: dict[str, Shaped[Array, "p page"]] = dataclasses.field(default_factory=dict)
    """The methods' own metadata of the retained entries, by name (`kvjax.cache.metadata`)."""
    others: Int[Array, " p"] | None = None
    """The number of head caches that hold each page in addition to the first (`kvjax.cache.forks`). None if no page
    is shared."""

    def entries(
        self, page: Int[Array, "b k s"], offset: Int[Array, "b k_or_1 s"], key_scale: KeyScale
    ) -> Float[Array, "b k s kv"]:
        """Return the entries at these places. key_scale: `LayerCache.key_scale` of the layer."""
        scale = self.metadata[SCALE][page, offset] if self.int8 else None
        return self.as_entries(self.pool[page, offset], scale, key_scale)

    def rows(self, page_table: Int[Array, "b k c"], key_scale: KeyScale) -> Float[Array, "b k s kv"]:
        """Return the entries of these pages in order; unspecified where a column holds no page."""

        def gathered(x):
            pages = x.at[page_table].get(mode="clip")
            return pages.reshape(*page_table.shape[:2], -1, *x.shape[2:])

        scale = gathered(self.metadata[SCALE]) if self.int8 else None
        return self.as_entries(gathered(self.pool), scale, key_scale)

    def as_stored(
        self, kv: Float[Array, "b k s kv"], key_scale: KeyScale
    ) -> tuple[Shaped[Array, "b k s kv"], Int32[Array, "b k s"] | None]:
        """Return entries in the form that the pool holds, and their scales if the pool holds int8 numbers."""
        if key_scale is not None:
            return quantised_entries(kv / _of_entries(key_scale))
        kv = kv.astype(self.dtype)
        return (as_bits(kv) if self.pool.dtype != self.dtype else kv), None

    def as_entries(
        self, stored: Shaped[Array, "b k s kv"], scale: Int32[Array, "b k s"] | None, key_scale: KeyScale
    ) -> Float[Array, "b k s kv"]:
        """Return entries, given the form that the pool holds."""
        if scale is None or key_scale is None:
            return as_floats(stored, self.dtype)
        return (dequantised_entries(stored, scale, jnp.float32) * _of_entries(key_scale)).astype(self.dtype)

    def with_values(
        self,
        page: Int[Array, "b k s"],
        offset: Int[Array, "b k s"],
        v: Float[Array, "b k s h"],
        key_scale: KeyScale,
    ) -> "Pages":
        """Return the pages with new values at these places. Keys do not change. A place whose page is past the pool's
        end is dropped. key_scale: that of the layer."""
        stored, scale = self.as_stored(jnp.concatenate([jnp.zeros_like(v), v], -1), key_scale)
        width = v.shape[-1]
        pool = self.pool.at[page, offset, width:].set(stored[..., width:], mode="drop")
        if scale is None:
            return dataclasses.replace(self, pool=pool)
        scale = with_value_scales(self.metadata[SCALE].at[page, offset].get(mode="clip"), scale)
        scale = self.metadata[SCALE].at[page, offset].set(scale, mode="drop")
        return dataclasses.replace(self, pool=pool, metadata=self.metadata | {SCALE: scale})

    @property
    def contents(self) -> Contents:
        """The contents of all pages."""
        return {"pool": self.pool, "bounds": self.bounds, "metadata": self.metadata}

    @property
    def int8(self) -> bool:
        """True if the pool holds int8 numbers with scales."""
        return self.pool.dtype == jnp.int8

    @property
    def nbytes(self) -> int:
        """Bytes of the entries, their bounds and their metadata."""
        return sum(x.nbytes for x in jax.tree.leaves(self.contents))


@struct
class LayerCache:
    """State of a layer's head caches. Stacked over layers in `Cache`."""

    page_table: Int[Array, "*l b k c"]
    """Page indices. The first `ring_pages` columns are the pages of the local window, the others those of the retained
    entries in order. A column that holds no page has an index past the pool's end."""
    length: Int[Array, "*l b k"]
    """The number of retained entries."""
    priority: Float[Array, "*l b k r"]
    """Priorities of the local window's tokens, by slot."""
    numbers: dict[str, Shaped[Array, "*l b k r"]]
    """Metadata of the local window's tokens, by slot. `Pages.metadata` holds that of retained entries."""
    state: Any
    """The methods' memories (`kvjax.policies.compiled.States`)."""
    key_scale: Float[Array, "*l b k h"] | None = None
    """The factors by which keys are divided before they are rounded to int8, and queries multiplied
    (`kvjax.inference.key_scale`); None: entries are floats."""


@struct
class Cache:
    """The state of a model after a batch of sequences. Made by `empty`, advanced by `kvjax.inference`."""

    pages: Pages
    """The storage, which all layers share."""
    layers: LayerCache
    """State of the head caches of each layer with full attention, `[l …]`."""
    seen: Int[Array, " b"]
    """The number of tokens of each sequence so far, dropped ones included: the position of the next token."""
    origin: Int[Array, " b"]
    """The number of tokens of each sequence that the local window does not count. It is 0 until tokens of the window
    are dropped (`kvjax.cache.dropping`)."""
    observations: Any
    """Observation buffers, in the pytree that the eviction defines (`kvjax.cache.observations`)."""
    window: int = static()
    """The number of last tokens that are always visible, including the query's own. The local window has one slot
    fewer."""
    limit: int | None = static(default=None)
    """The most pages that a shard's pool may ever have, by the stated capacity; None if no capacity was stated."""
    sliding: Shaped[Array, "l b k s kv"] | None = None
    """The windows of sliding-window layers (`kvjax.cache.sliding`), which have no pages. None: there are no such
    layers."""
    dropped_slots: Bool[Array, "b s"] | None = None
    """True for slots of `sliding` whose tokens were dropped. None: no layer has a window, or no token was ever dropped
    from it."""
    sliding_window: int = static(default=0)
    """The number of last tokens that sliding-window layers see, including the query's own."""
    head_order: tuple[tuple[int, ...], ...] | None = static(default=None)
    """The model's kv head at each place of the head caches (`ModelConfig.head_order`); None: the model's order."""

    @property
    def counted(self) -> Int[Array, " b"]:
        """The number of tokens of each sequence that the local window counts. The last `window − 1` of them are in
        it."""
        return self.seen - self.origin

    @property
    def page_size(self) -> int:
        return self.pages.pool.shape[1]

    @property
    def entry_bytes(self) -> int:
        """Bytes of one token's key and value in all kv heads of the layers with full attention."""
        layers, _, heads = self.layers.length.shape
        return (
            layers
            * heads
            * entry_bytes(self.pages.pool.shape[-1] // 2, self.pages.dtype, int8=self.pages.int8)
        )

    @property
    def columns(self) -> int:
        """The number of a page table's columns for retained entries."""
        return self.layers.page_table.shape[-1] - ring_pages(self.window, self.page_size)

    @named_arguments(where="Cache.without")
    def without(self, sequence: int, start: int, end: int) -> "Cache":
        """Return a copy without a span of a sequence's tokens, whose pages are freed (`kvjax.cache.dropping`).

        Tokens that are read later do not see the span. Their positions are not changed. The cache itself stays as it
        is.

        Args:
            sequence: the index of the sequence.
            start: the position of the span's first token.
            end: the position after its last token. The span may have tokens that were dropped or evicted before.

        Raises:
            UserError: there is no such sequence or span, the positions of entries are not known, an eviction still
                observes some of the tokens, or an admission has not rated tokens of the local window yet.
            CapacityError: the sequences are forks, and the stated capacity has too few pages for copies of the pages
                that they share.
        """
        from kvjax.cache.dropping import without

        return without(self, sequence, start, end)

    def __repr__(self) -> str:
        """Return its sizes in one line."""
        shape, pool = np.shape(self.layers.length), self.pages.pool
        if len(shape) != 3 or not hasattr(pool, "dtype"):
            return short(self)  # JAX's own stand-ins for arrays
        layers, batch, heads = shape
        bytes_ = math.prod(pool.shape) * pool.dtype.itemsize
        return (
            f"Cache({batch} sequences, {layers} layers × {heads} kv heads, window {self.window}, "
            f"{pool.shape[0]:,} pages of {pool.shape[1]}: {bytes_ / 2**20:.2f} MiB)"
        )


def _of_entries(key_scale: Float[Array, "b k h"]) -> Float[Array, "b k 1 kv"]:
    return jnp.concatenate([key_scale, jnp.ones_like(key_scale)], -1)[:, :, None]


def with_keys(
    bounds: Float[Array, "p kv"] | None, page: Int[Array, "b k s"], kv: Float[Array, "b k s kv"]
) -> Float[Array, "p kv"] | None:
    """Return the bounds of the pages after these entries were added. Entries whose page is past the pool's end are
    ignored."""
    if bounds is None:
        return None
    k = kv[..., : kv.shape[-1] // 2].astype(bounds.dtype)
    return bounds.at[page].min(jnp.concatenate([k, -k], -1), mode="drop")
