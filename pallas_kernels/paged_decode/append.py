"""The writing of a decoded token into the pages that its attention has read, and its form in XLA."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.bits import as_bits
from pallas_kernels.int8_entries import quantised_entries
from pallas_kernels.ordering import after


class Append(NamedTuple):
    """The places of each row's token and of the entry that it replaces.

    A place is the index of an entry, counted through the pool page by page. At an index past the last entry nothing is
    written. All other places of a call are in different pages.
    """

    slot: Int[Array, "b k"]
    """The entry that is overwritten with the token."""
    moved: Int[Array, "b k"]
    """The new place of the entry that was there."""


def as_stored(new, pool):
    """Return tokens, keys and values `[b k 1 h]` each, as the pool `[p page 2h]` holds them: `[b k 2h]`."""
    token = jnp.concatenate(new, -1)[:, :, 0]
    return quantised_entries(token)[0] if pool.dtype == jnp.int8 else token.astype(pool.dtype)


def written(pool, append: Append | None, new, lse):
    """Return the pool with the tokens in it, if there is an `append`, once the log-sum-exp of their attention is known.

    pool: `[p page 2h]`, floats, their bits or int8 numbers; new: keys and values, `[b k 1 h]` each; lse: `[b n 1]`.
    """
    if append is None:
        return pool
    page = pool.shape[1]
    token = as_bits(jnp.concatenate(new, -1)[:, :, 0]) if pool.dtype == jnp.uint16 else as_stored(new, pool)
    slot = after(append.slot, lse)
    old = pool.at[slot // page, slot % page].get(mode="clip")
    index = jnp.stack([append.moved, slot], -1)
    return pool.at[index // page, index % page].set(jnp.stack([old, token], 2), mode="drop")
