"""Quest (Tang et al., 2024, arXiv:2406.10774): a query reads the pages in which some key may matter to it.

A page's keys lie in a box, from the smallest to the largest value of each component. No key of the page can have a
larger product with the query than the box's best corner, so the pages with the best corners are read.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Float32, Int

from kvjax.errors import UserError, shown, whole_number
from kvjax.policies.base import Selection
from kvjax.policies.numbers import EXACT, is_placed, real_array, whole_array
from kvjax.struct import assign, changed, short, struct
from kvjax.topk import top

EVERYTHING = 2**30
"""A number above the tokens of any sequence."""


@struct
class Quest(Selection):
    """A choice of pages for each decoded token; prompts read everything. One of `tokens` and `ratio` is given, and the
    other is then 0."""

    tokens: Any = None
    """The number of entries of each kv head that a query reads. This includes the local window, which is always
    read."""
    ratio: Any = None
    """The share of the tokens so far that a query reads, given instead of `tokens`."""
    skip: Any = 0
    """The number of first layers that read everything (2 in the paper's code)."""
    name = "quest"

    def __post_init__(self):
        tokens, ratio = self.tokens, self.ratio
        if is_placed(tokens):
            return
        if (tokens is None) == (ratio is None):
            given = "got none" if tokens is None else f"got tokens={shown(tokens)} and ratio={shown(ratio)}"
            raise UserError(f"quest: expected one of tokens and ratio, {given}")
        assign(
            self,
            tokens=np.array(0, np.int32)
            if tokens is None
            else whole_array(self.name, "tokens", tokens, 1, EVERYTHING),
            ratio=np.array(0, np.float32)
            if ratio is None
            else real_array(self.name, "ratio", ratio, -np.inf, 1.0, above=0.0),
            skip=whole_array(self.name, "skip", self.skip, 0, EVERYTHING),
        )

    def __repr__(self) -> str:
        given = {"tokens": self.tokens, "ratio": self.ratio}
        unused = [x for x, n in given.items() if not isinstance(n, Tracer) and not np.any(n)]
        return short(changed(self, **dict.fromkeys(unused)))

    def check(self, model: Any) -> None:
        if not is_placed(self.skip):
            whole_number(
                f"quest on {model.num_full_layers} layers", "skip", int(self.skip), 0, model.num_full_layers
            )

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
        """Return the mask of the ⌈max(T − local, 0) / page_size⌉ pages with the best scores. T is the number of entries
        that a query reads. Of equal scores, the earlier page wins. A last page that is not full takes the first of
        these places whatever its score. Without places no page is read (WG-KV's code)."""
        budget = self.tokens + jnp.round(self.ratio * seen).astype(jnp.int32)
        budget = jnp.where(layer < self.skip, EVERYTHING, budget)
        places = -(-jnp.maximum(budget - local, 0) // page_size)
        stored = length[..., None] - page_size * jnp.arange(bounds.shape[2])
        filling = (stored > 0) & (stored < page_size)
        scores = jnp.where(filling, jnp.inf, page_scores(q, bounds))
        return top(scores[None], (stored > 0)[None], places[None, :, None], "head")[0]


def page_scores(q: Float[Array, "b n 1 h"], bounds: Float[Array, "b k p 2*h"]) -> Float32[Array, "b k p"]:
    """Return the scores of pages: max over the group's query heads of Σ_dims max(q · k_min, q · k_max), which is at
    least q · k for every key of the page (Algorithm 1). `bounds` is as in `kvjax.cache.Pages`."""
    # min(q, 0) · k_min + min(−q, 0) · (−k_max): one product over the page's row as it is stored
    corner = jnp.minimum(jnp.concatenate([q, -q], -1), 0)
    corner = rearrange(corner, "b (k g) 1 h -> b k g h", k=bounds.shape[1])
    return jnp.einsum("bkgh,bkph->bkgp", corner, bounds, **EXACT).max(2)
