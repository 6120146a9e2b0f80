"""Paged caches with NaN wherever a kernel must not read."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_decode import paged_decode
from pallas_kernels.paged_decode.api import IMPLEMENTATIONS

OTHERS = [name for name in IMPLEMENTATIONS if name not in ("reference", "hopper")]
TPUS = [pytest.param(x, marks=() if x == "tpu" else pytest.mark.thorough) for x in OTHERS]
"""Implementations. All but the TPU's run only in thorough tests."""
SHAPES = {  # b, n, k, t, h, page, columns, ring pages
    "one": (3, 4, 2, 1, 32, 16, 9, 2),
    "several tiles": (2, 4, 2, 1, 256, 8, 80, 3),
    "many tiles": (1, 2, 1, 1, 256, 8, 230, 3),
    "no ring": (1, 4, 2, 8, 96, 24, 7, 0),
    "page of one": (2, 2, 1, 3, 64, 1, 40, 5),
    "chunk": (1, 2, 1, 130, 32, 16, 20, 1),
    "parts": (2, 8, 4, 1, 64, 64, 17, 1),
}


@functools.cache
def compiled(implementation, ring_pages, ring, new, chosen=False):
    """Return a function of q, pool, page_table, length, ring_length, new, pages, bias and scale. ring_length, new and
    pages are ignored unless `ring`, `new` and `chosen` are True."""

    def call(q, pool, page_table, length, ring_length, pair, pages, bias=None, scale=None):
        return paged_decode(
            q,
            pool,
            page_table,
            length,
            ring_length if ring else None,
            ring_pages=ring_pages,
            new=pair if new else None,
            pages=pages if chosen else None,
            bias=bias,
            scale=scale,
            implementation=implementation,
        )

    return jax.jit(call)


def cache(shape, ring_length, length, seed, dtype=jnp.float32):
    """Return arguments whose pages are in the pool in random order. Entries that are not stored are NaN, and unused
    columns point beyond the pool."""
    b, n, k, t, h, page, columns, ring_pages = shape
    rng = np.random.default_rng(seed)
    stored = np.zeros((b, k, columns * page), bool)
    stored[:, :, : ring_pages * page] = np.arange(ring_pages * page) < np.reshape(ring_length, (b, 1, 1))
    stored[:, :, ring_pages * page :] = np.arange((columns - ring_pages) * page) < np.reshape(
        length, (b, k, 1)
    )
    used = stored.reshape(b, k, columns, page).any(-1)
    pages = used.sum() + 5
    page_table = np.full((b, k, columns), pages + 3)
    page_table[used] = rng.permutation(pages)[: used.sum()]
    pool = np.full((pages, page, 2 * h), np.nan)
    pool[page_table[used]] = np.where(
        stored.reshape(b, k, columns, page)[used][..., None],
        rng.normal(size=(used.sum(), page, 2 * h)),
        np.nan,
    )
    # The pool has the same shape for all lengths, so that they share one program.
    spare = b * k * columns + 5 - pages
    pool = np.concatenate([pool, np.full((spare, page, 2 * h), np.nan)])
    page_table[~used] = len(pool) + 3
    q, *new = (rng.normal(size=x) for x in ((b, n, t, h), (b, k, t, h), (b, k, t, h)))
    pages = rng.random((b, k, columns - ring_pages)) < rng.choice([0, 0.3, 0.8])
    return (
        jnp.asarray(q, dtype),
        jnp.asarray(pool, dtype),
        jnp.asarray(page_table, jnp.int32),
        jnp.asarray(np.reshape(length, (b, k)), jnp.int32),
        jnp.asarray(ring_length, jnp.int32),
        tuple(jnp.asarray(x, dtype) for x in new),
        jnp.asarray(pages),
    )


def biased(ring_pages, pool, page_table, length, seed=0):
    """Return a bias of the retained entries. Most numbers are small, some so large or so low that they decide the
    softmax, and some -inf. All others, which a kernel must not read, are NaN."""
    rng = np.random.default_rng(seed)
    page_table, length = np.asarray(page_table)[:, :, ring_pages:], np.asarray(length)
    bias = np.full(pool.shape[:2], np.nan)
    for row in np.ndindex(length.shape):
        place = np.arange(length[row])
        values = rng.normal(size=len(place))
        kind = rng.random(len(place))
        values[kind < 0.2] = -np.inf
        values[(kind >= 0.2) & (kind < 0.3)] = -40
        values[kind > 0.98] = 20
        bias[page_table[row][place // pool.shape[1]], place % pool.shape[1]] = values
    return jnp.asarray(bias, jnp.float32)
