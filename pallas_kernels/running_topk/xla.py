"""`running_topk` in XLA by descending a wavelet tree: log2(s) steps, of s and t operations each.

At each level the ranks are sorted by their leading bits and, if these are equal, by the order in which the keys begin
to compete. A query's keys with given leading bits are therefore the first ones of a run, and the number of zeros among
their next bits tells whether the k-th key has a zero or a one there. Ranks are a permutation, so a run begins at its
smallest rank and a complete run is half zeros, which makes tables unnecessary.

Grossi, Gupta and Vitter, "High-order entropy-compressed text indexes" (2003); Claude and Navarro, "The wavelet matrix"
(2012).
"""

import jax.numpy as jnp
from jax import lax

from pallas_kernels.blocks import logits_at_once


def xla(rank, k, competes, window, t):
    b, heads, s = rank.shape
    levels = (s - 1).bit_length()
    index = jnp.arange(s, dtype=jnp.int32)

    def row(args):
        rank, competes, k = args
        # The keys that never compete come after all others.
        count = jnp.cumsum(competes, dtype=jnp.int32)
        position = jnp.where(competes, count - 1, count[-1] + index - count)
        ranks = jnp.zeros_like(rank).at[position].set(rank, unique_indices=True)
        keys = jnp.pad(count, (window, 0))[s - t : s]
        value, stop, remaining = jnp.zeros_like(keys), keys, jnp.broadcast_to(k, keys.shape)
        for level in reversed(range(levels)):
            zero = 1 - (ranks >> level & 1)
            zeros = jnp.pad(jnp.cumsum(zero, dtype=jnp.int32), (1, 0))
            zeros_before = zeros.at[stop].get(mode="clip") - value // 2
            right = zeros_before < remaining
            stop = jnp.where(right, stop + (1 << level) - zeros_before, value + zeros_before)
            remaining = jnp.where(right, remaining - zeros_before, remaining)
            value = jnp.where(right, value + (1 << level), value)
            if level:
                start = ranks >> level + 1 << level + 1
                before = zeros[:-1] - start // 2
                position = jnp.where(zero == 1, start + before, index + (1 << level) - before)
                ranks = jnp.zeros_like(ranks).at[position].set(ranks, unique_indices=True)
        tau = jnp.where(keys >= k, value, s)
        return jnp.where(k > 0, tau, -1)

    batch_size = max(1, min(b * heads, logits_at_once() // s))
    rows = rank.reshape(-1, s), competes.reshape(-1, s), k.reshape(-1)
    tau = lax.map(row, rows, batch_size=batch_size)
    return tau.reshape(b, heads, t)
