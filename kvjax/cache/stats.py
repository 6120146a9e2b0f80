"""Statistics of a cache: its entries, pages and bytes."""

import dataclasses

import numpy as np
from jaxtyping import Int

from kvjax.cache.checks import check_alive
from kvjax.cache.pages import Cache, entry_bytes
from kvjax.errors import UserError, named_arguments, whole_number
from kvjax.mesh import on_host


@dataclasses.dataclass(frozen=True)
class Stats:
    """Sizes of a cache, in the layers with full attention. An entry is a key with its value, in the local window or
    retained."""

    entries: Int[np.ndarray, "l b k"]
    tokens: Int[np.ndarray, " b"]
    """Tokens seen so far, including dropped ones."""
    pages: int
    """Pages in use by these sequences. If sequences are forks, pages in use by all sequences, each page counted
    once."""
    pool_pages: int
    """Pages allocated, on all devices."""
    page_size: int
    """Entries per page."""
    bytes: int
    """Bytes of the allocated pool with its entry metadata, on all devices."""
    full_bytes: int
    """Bytes of a full cache of these tokens, in the model's dtype."""
    metadata: tuple[str, ...] = ()
    """Names of the entry metadata, which `bytes` includes."""

    def __repr__(self) -> str:
        """Return its sizes in one line."""
        entries = self.entries.mean() if self.entries.size else 0
        size, full_size = self.bytes / 2**20, self.full_bytes / 2**20
        return (
            f"Stats({len(self.tokens)} sequences, {entries:.0f} of {self.tokens.mean():.0f} entries a kv head "
            f"({100 * self.kv_ratio:.0f}%), {size:.2f} MiB against {full_size:.2f} MiB full)"
        )

    @property
    def kv_ratio(self) -> float:
        """Entries as a share of a full cache's."""
        layers, _, heads = self.entries.shape
        return float(self.entries.sum() / max(1, layers * heads * self.tokens.sum()))


@named_arguments()
def stats(cache: Cache, sequences: int | None = None) -> Stats:
    """Return the sizes of a cache, or of its first `sequences` sequences if the batch was padded with empty ones."""
    if not isinstance(cache, Cache):
        hint = ": use its stats" if isinstance(getattr(cache, "stats", None), Stats) else ""
        raise UserError(f"stats: cache must come from prefill, got {type(cache).__name__}{hint}")
    check_alive("stats", cache)
    if sequences is not None:
        sequences = whole_number("stats", "sequences", sequences, most=cache.seen.shape[0])
    seen = on_host(cache.seen)[:sequences]
    length = on_host(cache.layers.length)[:, :sequences]
    if cache.head_order is not None:
        length = np.take_along_axis(length, np.argsort(cache.head_order)[:, None], 2)
    counted = seen - on_host(cache.origin)[:sequences]
    ring = np.minimum(counted, cache.window - 1)[None, :, None]
    pool, (layers, _, heads) = cache.pages.pool, length.shape
    full = layers * heads * entry_bytes(pool.shape[-1] // 2, cache.pages.dtype, int8=False)
    pages = (-(-length // cache.page_size) + -(-ring // cache.page_size)).sum()
    if cache.pages.others is not None:
        pages = pool.shape[0] - on_host(cache.pages.free_count).sum()
    return Stats(
        entries=length + ring,
        tokens=seen,
        pages=int(pages),
        pool_pages=pool.shape[0],
        page_size=cache.page_size,
        bytes=cache.pages.nbytes,
        full_bytes=int(seen.sum()) * full,
        metadata=tuple(cache.pages.metadata),
    )
