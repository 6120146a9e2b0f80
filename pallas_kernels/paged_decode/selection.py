"""Selection of the pages that are read."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from pallas_kernels.choose import target


def compact(
    pages: Bool[Array, "b k global"], page_table: Int[Array, "b k c"], length: Int[Array, "b k"], page: int
) -> tuple[Int[Array, "b k c"], Int[Array, "b k"]]:
    """Return the table and lengths of a cache that holds only the selected global pages.

    The pages keep their order, so that a partly filled page stays the last. The ring's columns do not change.
    """
    columns = pages.shape[2]
    ring, table = jnp.split(page_table, [page_table.shape[2] - columns], 2)
    stored = jnp.clip(length[..., None] - page * jnp.arange(columns), 0, page)
    chosen = pages & (stored > 0)
    front = sorted_to_front if target().platform == "tpu" else scattered_to_front
    return jnp.concatenate([ring, front(chosen, table)], 2), jnp.where(chosen, stored, 0).sum(-1)


def scattered_to_front(chosen: Bool[Array, "b k c"], table: Int[Array, "b k c"]) -> Int[Array, "b k c"]:
    """Move the chosen columns to the front, in order. On a CPU this is 5 to 12 times as fast as sorting."""
    place = jnp.where(chosen, jnp.cumsum(chosen, -1) - 1, table.shape[2])
    b, k = jnp.ogrid[: table.shape[0], : table.shape[1]]
    return table.at[b[..., None], k[..., None], place].set(table, mode="drop")


def sorted_to_front(chosen: Bool[Array, "b k c"], table: Int[Array, "b k c"]) -> Int[Array, "b k c"]:
    """Move the chosen columns to the front by sorting. TPUs sort faster than they scatter."""
    return lax.sort((~chosen, table), dimension=2, num_keys=1, is_stable=True)[1]
