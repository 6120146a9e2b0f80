"""`running_topk` in XLA by descending a wavelet tree: log2(s) steps, of s and t operations each.

A level holds the ranks sorted by their leading bits and, where those are equal, in the order in which the keys begin to
compete. So a query's keys with given leading bits are the first ones of that stretch, and counting the zeros among them
tells if the k-th has a zero or a one there. Ranks are a permutation, so a stretch begins at its smallest rank and every
complete stretch is half zeros. Neither needs a table.

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

    def one(args):
        rank, competes, k = args
        # The keys that never compete come after all others.
        count = jnp.cumsum(competes, dtype=jnp.int32)
        place = jnp.where(competes, count - 1, count[-1] + index - count)
        ranks = jnp.zeros_like(rank).at[place].set(rank, unique_indices=True)
        keys = jnp.pad(count, (window, 0))[s - t : s]
        value, stop, left = jnp.zeros_like(keys), keys, jnp.broadcast_to(k, keys.shape)
        for level in reversed(range(levels)):
            zero = 1 - (ranks >> level & 1)
            zeros = jnp.pad(jnp.cumsum(zero, dtype=jnp.int32), (1, 0))
            found = zeros.at[stop].get(mode="clip") - value // 2
            right = found < left
            stop = jnp.where(right, stop + (1 << level) - found, value + found)
            left = jnp.where(right, left - found, left)
            value = jnp.where(right, value + (1 << level), value)
            if level:
                start = ranks >> level + 1 << level + 1
                before = zeros[:-1] - start // 2
                place = jnp.where(zero == 1, start + before, index + (1 << level) - before)
                ranks = jnp.zeros_like(ranks).at[place].set(ranks, unique_indices=True)
        tau = jnp.where(keys >= k, value, s)
        return jnp.where(k > 0, tau, -1)

    together = max(1, min(b * heads, logits_at_once() // s))
    rows = rank.reshape(-1, s), competes.reshape(-1, s), k.reshape(-1)
    tau = lax.map(one, rows, batch_size=together)
    return tau.reshape(b, heads, t)
