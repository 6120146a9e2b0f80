"""Biases of pages, gathered from the bias plane, which has one number for every entry of the pool."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

LANES = 128


def of_pages(bias: Float[Array, "p page"], ids: Int[Array, "*r"]) -> Float[Array, "*r page"]:
    """Return the biases of the pages `ids`. An index outside the plane reads its nearest page."""
    return bias.at[_inside(bias, ids)].get(mode="promise_in_bounds")


def of_pages_by_lanes(bias: Float[Array, "p page"], ids: Int[Array, "*r"]) -> Float[Array, "*r page"]:
    """Return what `of_pages` does. On a TPU XLA would copy the whole plane to gather less than a row of lanes.

    The row of lanes that holds the page is gathered, and rolled by powers of two until the page comes first.
    """
    page = bias.shape[1]
    if LANES % page:
        return of_pages(bias, ids)
    ids = _inside(bias, ids)
    rows = in_lanes(bias).at[ids * page // LANES].get(mode="promise_in_bounds")
    for bit in range((LANES // page).bit_length() - 1):
        turned = jnp.roll(rows, -page << bit, -1)
        rows = jnp.where((ids >> bit & 1 > 0)[..., None], turned, rows)
    return rows[..., :page]


def in_lanes(bias: Float[Array, "p page"]) -> Float[Array, "rows 128"]:
    """Return the plane as rows of lanes. No copy is made if it is stored as such or flat, or if pages have 128."""
    return jnp.pad(bias.reshape(-1), (0, -bias.size % LANES)).reshape(-1, LANES)


def _inside(bias, ids):
    return jnp.clip(ids, 0, bias.shape[0] - 1)
