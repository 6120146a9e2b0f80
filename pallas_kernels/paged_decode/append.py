"""Writing a decoded token into the pages that its attention has read, in XLA."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.bits import as_bits
from pallas_kernels.int8_entries import quantised_entries
from pallas_kernels.ordering import after


class Append(NamedTuple):
    """The place where each row's token is written, and the place to which the replaced entry moves.

    Both are indices of entries, counted through the pool page by page. Nothing is written at an index past the last
    entry. All other indices of a call are in different pages.
    """

    slot: Int[Array, "b k"]
    """The entry that is overwritten with the token."""
    moved: Int[Array, "b k"]
    """The new index of the entry that was in the slot."""


def as_stored(new, pool):
    """Return tokens, given as keys and values `[b k 1 h]`, in the form `[b k 2h]` and dtype of the pool."""
    token = jnp.concatenate(new, -1)[:, :, 0]
    return quantised_entries(token)[0] if pool.dtype == jnp.int8 else token.astype(pool.dtype)


def append_tokens(pool, append: Append | None, new, lse):
    """Return the pool with the tokens written to it, if there is an `append`. The write follows their attention.

    pool: `[p page 2h]`, floats, their bits or int8 numbers. new: keys and values, `[b k 1 h]` each. lse: the
    attention's log-sum-exp, `[b n 1]`.
    """
    if append is None:
        return pool
    page = pool.shape[1]
    token = as_bits(jnp.concatenate(new, -1)[:, :, 0]) if pool.dtype == jnp.uint16 else as_stored(new, pool)
    slot = after(append.slot, lse)
    old = pool.at[slot // page, slot % page].get(mode="clip")
    index = jnp.stack([append.moved, slot], -1)
    return pool.at[index // page, index % page].set(jnp.stack([old, token], 2), mode="drop")
