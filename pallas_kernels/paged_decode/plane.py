"""Biases and scales of pages. They are gathered from planes, arrays with one number for every entry of the pool."""

import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

LANES = 128


def gather_pages(plane: Shaped[Array, "p page"], ids: Int[Array, "*r"]) -> Shaped[Array, "*r page"]:
    """Return the numbers of the pages `ids`. An index outside the plane reads its nearest page."""
    return plane.at[_inside(plane, ids)].get(mode="promise_in_bounds")


def gather_pages_by_lanes(plane: Shaped[Array, "p page"], ids: Int[Array, "*r"]) -> Shaped[Array, "*r page"]:
    """Return the result of `gather_pages` without the copy of the whole plane that XLA makes on TPU to gather less than
    a row of lanes.

    The row of lanes that holds the page is gathered and rolled by powers of two until the page comes first.
    """
    page = plane.shape[1]
    if LANES % page:
        return gather_pages(plane, ids)
    ids = _inside(plane, ids)
    rows = in_lanes(plane).at[ids * page // LANES].get(mode="promise_in_bounds")
    for bit in range((LANES // page).bit_length() - 1):
        rolled = jnp.roll(rows, -page << bit, -1)
        rows = jnp.where((ids >> bit & 1 > 0)[..., None], rolled, rows)
    return rows[..., :page]


def in_lanes(plane: Shaped[Array, "p page"]) -> Shaped[Array, "rows 128"]:
    """Return the plane as rows of lanes. Nothing is copied if it is stored in this form or flat, or if pages have 128
    entries."""
    return jnp.pad(plane.reshape(-1), (0, -plane.size % LANES)).reshape(-1, LANES)


def _inside(plane, ids):
    return jnp.clip(ids, 0, plane.shape[0] - 1)
