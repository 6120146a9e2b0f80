"""The Fenwick tree of the kernels: the ranks of one (sequence, kv head), inserted query by query.

Node `i = m · 2^l`, m odd, counts the ranks in `[i - 2^l, i)`. A key is counted by at most log2(s) nodes, and the k-th
rank is found from the top level down. Since the threshold never rises, keys above it never matter and are left out. The
threshold is computed again only after a key below it.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def entries(rank: Int[Array, "b k s"], competes: Bool[Array, "b k s"], window: int) -> Int[Array, "r s"]:
    """Return the rank of the key that leaves the window at each index. It is s if no competing key leaves there."""
    s = rank.shape[2]
    ranks = jnp.where(competes, rank, s).reshape(-1, s)
    return jnp.pad(ranks, ((0, 0), (window, 0)), constant_values=s)[:, :s]


def levels(s: int) -> int:
    """Return the number of levels of a tree over s ranks."""
    return s.bit_length()
