"""Planes: one number of a method's own beside every entry of the global region, named.

A number is written when its token is stored, is moved and freed with the entry, and may be changed later. Those of
the ring's tokens stand in `LayerCache.numbers` until they leave it.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped


def in_front(x: Shaped[Array, "b k t"], chosen: Bool[Array, "b k t"]) -> Shaped[Array, "b k t"]:
    """The chosen numbers of each row in order, at its front; zeros behind them."""
    b, k = jnp.ogrid[: x.shape[0], : x.shape[1]]
    place = jnp.where(chosen, jnp.cumsum(chosen, -1, dtype=jnp.int32) - 1, x.shape[-1])
    return jnp.zeros_like(x).at[b[..., None], k[..., None], place].set(x, mode="drop")


def appended(
    plane: Shaped[Array, "p page"],
    page_table: Int[Array, "b k c"],
    length: Int[Array, "b k"],
    new: Shaped[Array, "b k t"],
    count: Int[Array, "b k"],
) -> Shaped[Array, "p page"]:
    """The plane with the first `count` new numbers of each row, at its places from `length` on.

    By whole pages: for single numbers XLA has the plane in another layout on a TPU, and copies all of it there and back
    in every layer and step.
    """
    capacity, page_size = plane.shape
    columns, t = page_table.shape[-1], new.shape[-1]
    if columns == 0:
        return plane
    column = length[..., None] // page_size + jnp.arange((t + page_size - 2) // page_size + 1)
    token = column[..., None] * page_size + jnp.arange(page_size) - length[..., None, None]
    written = (token >= 0) & (token < count[..., None, None])
    place = jnp.clip(token, 0, t - 1).reshape(*length.shape, -1)
    numbers = jnp.take_along_axis(new, place, 2).reshape(token.shape)
    page = jnp.take_along_axis(page_table, jnp.minimum(column, columns - 1), 2)
    page = jnp.where(written.any(-1) & (column < columns), page, capacity)
    rows = jnp.where(written, numbers, plane.at[page].get(mode="clip"))
    return plane.at[page].set(rows, mode="drop")


def placed(
    plane: Shaped[Array, "p page"],
    page_table: Int[Array, "b k c"],
    place: Int[Array, "b k t"],
    new: Shaped[Array, "b k t"],
) -> Shaped[Array, "p page"]:
    """The plane with each row's new numbers at these places, different ones, in any order; a place past the row's end
    is dropped. By whole pages, as `appended`: the one that a single token touches, or all of the row's."""
    capacity, page_size = plane.shape
    b, k, columns = page_table.shape
    if columns == 0:
        return plane
    if place.shape[-1] == 1:
        column = jnp.minimum(place // page_size, columns - 1)
        page = jnp.where(place < columns * page_size, jnp.take_along_axis(page_table, column, 2), capacity)
        at = jnp.arange(page_size) == (place % page_size)[..., None]
        rows = jnp.where(at, new[..., None], plane.at[page].get(mode="clip"))
        return plane.at[page].set(rows, mode="drop")
    rows = plane.at[page_table].get(mode="clip").reshape(b, k, -1)
    row, head = jnp.ogrid[:b, :k]
    rows = rows.at[row[..., None], head[..., None], place].set(new, mode="drop")
    return plane.at[page_table].set(rows.reshape(b, k, columns, page_size), mode="drop")
