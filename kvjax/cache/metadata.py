"""Entry metadata: named fields in which a method keeps one number for every retained entry.

A number is written when its token is stored, is moved and freed with the entry, and may be changed later. The numbers
of the local window's tokens are in `LayerCache.numbers` until the tokens leave the window.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped


def in_front(x: Shaped[Array, "b k t"], chosen: Bool[Array, "b k t"]) -> Shaped[Array, "b k t"]:
    """Return the chosen numbers of each head cache in order, followed by zeros."""
    b, k = jnp.ogrid[: x.shape[0], : x.shape[1]]
    place = jnp.where(chosen, jnp.cumsum(chosen, -1, dtype=jnp.int32) - 1, x.shape[-1])
    return jnp.zeros_like(x).at[b[..., None], k[..., None], place].set(x, mode="drop")


def appended(
    field: Shaped[Array, "p page"],
    page_table: Int[Array, "b k c"],
    length: Int[Array, "b k"],
    new: Shaped[Array, "b k t"],
    count: Int[Array, "b k"],
) -> Shaped[Array, "p page"]:
    """Return the field after the first `count` new numbers of each head cache were written to its places from `length`
    on.

    Whole pages are written. For single numbers XLA would use another layout of the field on a TPU, and copy the whole
    field to it and back in every layer and step.
    """
    capacity, page_size = field.shape
    columns, t = page_table.shape[-1], new.shape[-1]
    if columns == 0:
        return field
    column = length[..., None] // page_size + jnp.arange((t + page_size - 2) // page_size + 1)
    token = column[..., None] * page_size + jnp.arange(page_size) - length[..., None, None]
    written = (token >= 0) & (token < count[..., None, None])
    place = jnp.clip(token, 0, t - 1).reshape(*length.shape, -1)
    numbers = jnp.take_along_axis(new, place, 2).reshape(token.shape)
    page = jnp.take_along_axis(page_table, jnp.minimum(column, columns - 1), 2)
    page = jnp.where(written.any(-1) & (column < columns), page, capacity)
    rows = jnp.where(written, numbers, field.at[page].get(mode="clip"))
    return field.at[page].set(rows, mode="drop")


def placed(
    field: Shaped[Array, "p page"],
    page_table: Int[Array, "b k c"],
    place: Int[Array, "b k t"],
    new: Shaped[Array, "b k t"],
) -> Shaped[Array, "p page"]:
    """Return the field after the new numbers of each head cache were written to these places, which are distinct and in
    any order. A number whose place is past the head cache's end is dropped. Like `appended` this writes whole pages:
    the page that a single token touches, or all pages of the head cache."""
    capacity, page_size = field.shape
    b, k, columns = page_table.shape
    if columns == 0:
        return field
    if place.shape[-1] == 1:
        column = jnp.minimum(place // page_size, columns - 1)
        page = jnp.where(place < columns * page_size, jnp.take_along_axis(page_table, column, 2), capacity)
        is_written = jnp.arange(page_size) == (place % page_size)[..., None]
        rows = jnp.where(is_written, new[..., None], field.at[page].get(mode="clip"))
        return field.at[page].set(rows, mode="drop")
    rows = field.at[page_table].get(mode="clip").reshape(b, k, -1)
    row, head = jnp.ogrid[:b, :k]
    rows = rows.at[row[..., None], head[..., None], place].set(new, mode="drop")
    return field.at[page_table].set(rows.reshape(b, k, columns, page_size), mode="drop")
