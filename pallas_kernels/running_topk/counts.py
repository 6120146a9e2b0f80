"""`running_topk` in XLA by counting in two levels of about sqrt(s) counts, without steps for single keys.

The ranks are cut into buckets. For each bucket, a query counts its keys in all buckets up to it. The counts of earlier
chunks of queries are carried. Those of earlier blocks and of the query's own block are added, the latter by a product
with a triangle of ones. The first bucket at which the count reaches k contains the threshold. There the keys are
counted one by one, in order of rank.
"""

import jax.numpy as jnp
from jax import lax

from pallas_kernels.blocks import logits_at_once

BLOCK = 128
"""Queries whose keys are counted by one product: the lanes of a TPU. bfloat16 counts exactly up to 256."""
COUNTS = 1 << 18
"""The approximate least number of counts of a row that are in memory at once."""


def widths(s: int) -> tuple[int, int]:
    """Return the number of buckets and the ranks in each: a power of two, at most sqrt(s)."""
    width = 1 << (s.bit_length() - 1) // 2
    return -(-s // width), width


def counts(rank, k, competes, window, t):
    b, heads, s = rank.shape
    rows = b * heads
    buckets, width = widths(s)
    # Query i adds the key that leaves the window there; the first query also has those that left before.
    none = buckets * width
    entry = jnp.where(competes, rank, none).reshape(-1, s)
    entry = jnp.pad(entry, ((0, 0), (window, 0)), constant_values=none)
    before, entry = entry[:, : s - t], entry[:, s - t : s]
    # The index from which the key competes, in order of rank.
    start = jnp.where(competes, jnp.arange(s, dtype=jnp.int32) + window, s).reshape(-1, s)
    start = lax.sort((rank.reshape(-1, s), start), num_keys=1, is_stable=False)[1]
    start = jnp.pad(start, ((0, 0), (0, none - s)), constant_values=s)

    at_once = max(COUNTS, logits_at_once() // rows)
    chunks = -(-t // (BLOCK * max(1, at_once // (BLOCK * buckets))))
    blocks = -(-t // (BLOCK * chunks))
    entry = jnp.pad(entry, ((0, 0), (0, chunks * blocks * BLOCK - t)), constant_values=none)
    entry = entry.reshape(rows, chunks, blocks, BLOCK)
    triangle = jnp.tri(BLOCK, dtype=jnp.float32)
    ascending = jnp.triu(jnp.ones((width, width), jnp.float32))
    bucket = jnp.arange(buckets)

    def row(args):
        entry, before, start, k = args
        start = start.reshape(buckets, width)

        def chunk(carried, args):
            entries, first = args
            # Each block adds at most BLOCK to a bucket's count, so products are exact.
            added = (entries[..., None] // width <= bucket).sum(1, dtype=jnp.float32)
            upto = jnp.einsum("nm,mb->nb", jnp.tri(blocks), added).astype(jnp.int32) + carried
            # [query of the block, block, bucket]
            below = (entries.T[..., None] // width <= bucket).astype(jnp.float32)
            count = jnp.einsum("qc,cmb->qmb", triangle, below).astype(jnp.int32)
            count += upto - added.astype(jnp.int32)
            short = count < k
            threshold_bucket = short.sum(-1, dtype=jnp.int32)
            remaining = k - jnp.max(jnp.where(short, count, 0), -1)
            index = first + jnp.arange(blocks) * BLOCK + jnp.arange(BLOCK)[:, None]
            eligible = start.at[threshold_bucket].get(mode="clip") <= index[..., None]
            order = jnp.einsum("qmv,vw->qmw", eligible.astype(jnp.float32), ascending)
            offset = (order < remaining[..., None]).sum(-1, dtype=jnp.int32)
            tau = jnp.where(threshold_bucket < buckets, threshold_bucket * width + offset, s)
            return upto[-1], jnp.where(k > 0, tau, -1).T

        carried = (before[:, None] // width <= bucket).sum(0, dtype=jnp.int32)
        first = s - t + jnp.arange(chunks) * blocks * BLOCK
        return lax.scan(chunk, carried, (entry, first))[1].reshape(-1)[:t]

    batch_size = max(1, min(rows, logits_at_once() // (blocks * BLOCK * buckets)))
    tau = lax.map(row, (entry, before, start, k.reshape(-1)), batch_size=batch_size)
    return tau.reshape(b, heads, t)
