"""The Fenwick tree that the kernels share: the ranks of one (sequence, kv head), inserted query by query.

Node `i = m · 2^l`, m odd, counts the ranks in `[i - 2^l, i)`. A key goes to at most log2(s) nodes, and the k-th rank is
found from the top level down. As the threshold never rises, a key above it never matters. It is left out, and the
threshold is computed again only after a key below it.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def entries(rank: Int[Array, "b k s"], competes: Bool[Array, "b k s"], window: int) -> Int[Array, "r s"]:
    """Return the rank of the key that leaves the window at each index, s if there is none or it does not compete."""
    s = rank.shape[2]
    ranks = jnp.where(competes, rank, s).reshape(-1, s)
    return jnp.pad(ranks, ((0, 0), (window, 0)), constant_values=s)[:, :s]


def levels(s: int) -> int:
    """The number of levels of a tree over s ranks."""
    return s.bit_length()
