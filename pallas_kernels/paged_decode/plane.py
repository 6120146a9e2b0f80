"""Biases of pages, taken out of the plane that has one for every entry of the pool."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

LANES = 128


def of_pages(bias: Float[Array, "p page"], ids: Int[Array, "*r"]) -> Float[Array, "*r page"]:
    """An index outside the plane is that of its nearest page."""
    return bias.at[_inside(bias, ids)].get(mode="promise_in_bounds")


def of_pages_by_lanes(bias: Float[Array, "p page"], ids: Int[Array, "*r"]) -> Float[Array, "*r page"]:
    """The same on a TPU, where XLA copies the whole plane to gather less than a row of lanes.

    The row comes that the page lies in, and is turned by powers of two until the page comes first.
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
    """The plane as rows of lanes, a view of it if it is held as such or flat, and of pages of 128."""
    return jnp.pad(bias.reshape(-1), (0, -bias.size % LANES)).reshape(-1, LANES)


def _inside(bias, ids):
    return jnp.clip(ids, 0, bias.shape[0] - 1)
