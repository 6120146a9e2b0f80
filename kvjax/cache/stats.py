"""What a person asks of a cache: what it holds, and whether its pool ran out."""

import dataclasses
import math

import jax
import numpy as np
from jaxtyping import Int

from kvjax.cache.finite import free_counts
from kvjax.cache.pages import Cache
from kvjax.cache.sizes import CapacityError
from kvjax.errors import UserError, named_arguments, whole_number

SLACK = 1.05
"""How much more than what was missed the capacity is that an error names."""


@dataclasses.dataclass(frozen=True)
class Stats:
    """What a cache holds. Entries count keys with their values, ring and global region together."""

    entries: Int[np.ndarray, "l b k"]
    """Of each row."""
    tokens: Int[np.ndarray, " b"]
    """Seen so far."""
    pages: int
    """In use by these sequences; of branches by all of them, each page once."""
    pool_pages: int
    """Allocated, on all devices."""
    page_size: int
    """Entries of a page."""
    bytes: int
    """Of the allocated pool with what stands beside it, on all devices."""
    full_bytes: int
    """Of a full cache of these tokens."""
    planes: tuple[str, ...] = ()
    """The methods' own numbers of entries, whose bytes are counted."""

    def __repr__(self) -> str:
        """In a line."""
        held, own, full = self.entries.mean(), self.bytes / 2**20, self.full_bytes / 2**20
        return (
            f"Stats({len(self.tokens)} sequences, {held:.0f} of {self.tokens.mean():.0f} entries a kv head "
            f"({100 * self.kv_ratio:.0f}%), {own:.2f} MiB against {full:.2f} MiB full)"
        )

    @property
    def kv_ratio(self) -> float:
        """Entries over those of a full cache."""
        layers, _, heads = self.entries.shape
        return float(self.entries.sum() / max(1, layers * heads * self.tokens.sum()))


@named_arguments()
def stats(cache: Cache, sequences: int | None = None) -> Stats:
    """Sizes of a cache; of its first `sequences` sequences where the batch was padded with empty ones."""
    if not isinstance(cache, Cache):
        own = ": use its stats" if isinstance(getattr(cache, "stats", None), Stats) else ""
        raise UserError(f"stats: cache must come from prefill, got {type(cache).__name__}{own}")
    check_alive("stats", cache)
    if sequences is not None:
        sequences = whole_number("stats", "sequences", sequences, most=cache.seen.shape[0])
    seen = np.asarray(cache.seen)[:sequences]
    length = np.asarray(cache.layers.length)[:, :sequences]
    ring = np.minimum(seen, cache.window - 1)[None, :, None]
    pool = cache.pages.pool
    pages = (-(-length // cache.page_size) + -(-ring // cache.page_size)).sum()
    if cache.pages.others is not None:
        pages = pool.shape[0] - np.asarray(cache.pages.free_count).sum()
    return Stats(
        entries=length + ring,
        tokens=seen,
        pages=int(pages),
        pool_pages=pool.shape[0],
        page_size=cache.page_size,
        bytes=cache.pages.nbytes,
        full_bytes=int(seen.sum()) * cache.entry_bytes,
        planes=tuple(cache.pages.planes),
    )


def check_alive(where: str, cache: Cache) -> None:
    """Refuse a cache whose arrays were donated to a later call."""
    if any(getattr(leaf, "is_deleted", bool)() for leaf in jax.tree.leaves(cache)):
        raise UserError(
            f"{where}: the cache was donated to a later step and is gone: expected the last one that stream yielded"
        )


def check(cache: Cache, policy: str, room: int = 0) -> None:
    """Raise CapacityError if the pool ever ran out, UserError if something was not finite. Waits for the device.

    policy: its name, for the error. room: tokens that are still to come in each sequence. The capacity that the error
    names is enough for them, too.
    """
    count = free_counts(cache)
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
        f"policy {policy} needs at least {need} pages of {cache.page_size} tokens on a device for what was read, "
        f"the pool has {have} ({pool.nbytes / 2**20:.1f} MiB in all): give a capacity of "
        f"{-(-wanted * cache.page_size // rows)} entries per kv head, which is enough for {room} more tokens, too"
    )
