"""Quest (Tang et al., 2024, arXiv:2406.10774): a query reads the pages in which some key may matter to it.

A page's keys lie in a box, from the smallest to the largest of each component. No key of it can have a larger product
with the query than the box's best corner, so the pages with the best corners are read.
"""

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jaxtyping import Array, Bool, Float, Float32, Int

from kvjax.errors import UserError, real_number, shown, whole_number
from kvjax.policies.interfaces import Number
from kvjax.struct import struct
from kvjax.top import top

EVERYTHING = 2**30
"""More tokens than any sequence has."""


@struct
class Quest:
    """`tokens` and a share `ratio` of the tokens so far are read, of which one of both is 0; everything in the first
    `skip` layers."""

    tokens: Int[Number, "..."]
    ratio: Float[Number, "..."]
    skip: Int[Number, "..."]

    def select(
        self,
        q: Float[Array, "b n 1 h"],
        bounds: Float[Array, "b k p 2*h"],
        length: Int[Array, "b k"],
        *,
        layer: Int[Array, ""],
        local: Int[Array, " b"],
        seen: Int[Array, " b"],
        page_size: int,
    ) -> Bool[Array, "b k p"]:
        """The ⌈max(T − local, 0) / page_size⌉ pages with the best scores (of equal ones the earlier). A last page that
        is not full takes the first of these places whatever its score; without places nothing is read (WG-KV's
        code)."""
        budget = self.tokens + jnp.round(self.ratio * seen).astype(jnp.int32)
        budget = jnp.where(layer < self.skip, EVERYTHING, budget)
        places = -(-jnp.maximum(budget - local, 0) // page_size)
        stored = length[..., None] - page_size * jnp.arange(bounds.shape[2])
        filling = (stored > 0) & (stored < page_size)
        scores = jnp.where(filling, jnp.inf, page_scores(q, bounds))
        return top(scores[None], (stored > 0)[None], places[None, :, None], "head")[0]


def page_scores(q: Float[Array, "b n 1 h"], bounds: Float[Array, "b k p 2*h"]) -> Float32[Array, "b k p"]:
    """max over the group's query heads of Σ_dims max(q · k_min, q · k_max), which is at least q · k for every key of
    the page (Algorithm 1). `bounds` as in `kvjax.cache.Pages`."""
    # min(q, 0) · k_min + min(−q, 0) · (−k_max): one product over the page's row as it is stored
    corner = jnp.minimum(jnp.concatenate([q, -q], -1), 0)
    corner = rearrange(corner, "b (k g) 1 h -> b k g h", k=bounds.shape[1])
    exact = {"precision": jax.lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}
    return jnp.einsum("bkgh,bkph->bkgp", corner, bounds, **exact).max(2)


def quest(
    *, layers: int | None = None, tokens: int | None = None, ratio: float | None = None, skip: int = 0
) -> Quest:
    """Selection of pages when a single token is decoded; prompts read everything.

    Args:
        layers: the model's, for a check of `skip`.
        tokens: how many entries of each kv head a query reads, those of the window included, which it always reads.
        ratio: instead, as a share of the tokens so far.
        skip: so many of the first layers read everything (2 in the paper's code).

    Raises:
        UserError: not exactly one of `tokens` and `ratio`, or values out of their range.
    """
    if (tokens is None) == (ratio is None):
        given = "got none" if tokens is None else f"got tokens={shown(tokens)} and ratio={shown(ratio)}"
        raise UserError(f"quest: what a query reads is one of tokens and ratio, {given}")
    tokens = 0 if tokens is None else whole_number("quest", "tokens", tokens, most=EVERYTHING)
    if ratio is not None:
        ratio = real_number("quest", "ratio", ratio, above=0.0, most=1.0)
    where = "quest" if layers is None else f"quest on {layers} layers"
    skip = whole_number(where, "skip", skip, 0, EVERYTHING if layers is None else layers)
    return Quest(np.array(tokens, np.int32), np.array(ratio or 0, np.float32), np.array(skip, np.int32))
