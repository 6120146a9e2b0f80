"""Biases and scales of pages, gathered from planes, which have one number for every entry of the pool."""

import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

LANES = 128


def of_pages(plane: Shaped[Array, "p page"], ids: Int[Array, "*r"]) -> Shaped[Array, "*r page"]:
    """Return the numbers of the pages `ids`. An index outside the plane reads its nearest page."""
    return plane.at[_inside(plane, ids)].get(mode="promise_in_bounds")


def of_pages_by_lanes(plane: Shaped[Array, "p page"], ids: Int[Array, "*r"]) -> Shaped[Array, "*r page"]:
    """Return what `of_pages` does. On a TPU XLA would copy the whole plane to gather less than a row of lanes.

    The row of lanes that holds the page is gathered, and rolled by powers of two until the page comes first.
    """
    page = plane.shape[1]
    if LANES % page:
        return of_pages(plane, ids)
    ids = _inside(plane, ids)
    rows = in_lanes(plane).at[ids * page // LANES].get(mode="promise_in_bounds")
    for bit in range((LANES // page).bit_length() - 1):
        turned = jnp.roll(rows, -page << bit, -1)
        rows = jnp.where((ids >> bit & 1 > 0)[..., None], turned, rows)
    return rows[..., :page]


def in_lanes(plane: Shaped[Array, "p page"]) -> Shaped[Array, "rows 128"]:
    """Return the plane as rows of lanes. No copy is made if it is stored as such or flat, or if pages have 128."""
    return jnp.pad(plane.reshape(-1), (0, -plane.size % LANES)).reshape(-1, LANES)


def _inside(plane, ids):
    return jnp.clip(ids, 0, plane.shape[0] - 1)
