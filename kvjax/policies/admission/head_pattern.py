"""Retrieval heads keep everything, streaming heads keep sinks and the window (DuoAttention, arXiv:2410.10819).

With no retrieval head at all this is StreamingLLM (arXiv:2309.17453); without sinks as well, plain local attention.
"""

import math
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.checkpoints.fingerprint import MadeFor
from kvjax.errors import UserError, real_number
from kvjax.mesh import on_host
from kvjax.policies.admission.pattern_folder import read_pattern
from kvjax.policies.base import Admission, Keep
from kvjax.policies.numbers import head_table, is_placed, whole_array
from kvjax.policies.views import Step
from kvjax.struct import assign, host, remembered, struct


@struct
class HeadPattern(Admission):
    """Admission by kv head: a retrieval head admits every token, a streaming head only the first `sink` positions.

    `pattern` is a pattern folder, or a table with a weight for each layer and kv head. `sparsity`, `sink` and `window`
    come from the folder by default. The window counts the query's own token, and a folder's `recent_size` is the
    window.

    Raises:
        UserError: if `pattern` is neither a pattern folder nor a table of finite numbers, if a table comes without
            `sink`, if weights are outside 0 … 1 and there is no sparsity, or if a table of 0 and 1 gets a sparsity
            that differs from its own.
    """

    pattern: Any
    """The mask of the heads that keep everything, bool [… k]."""
    sparsity: float | None = host(default=None)
    """The share of all layers' kv heads that stream, the lowest weights first. None: the folder's; if it has none, the
    heads with weights below 0.5 stream."""
    sink: Any = None
    """The number of first positions that every head keeps."""
    window: int | None = host(default=None, repr=False)
    """The window of policies that name none."""
    made_for: MadeFor | None = remembered()
    """The model that the folder was made for; None: it does not say."""
    name = "head_pattern"
    trained = "pattern"

    def __post_init__(self):
        if is_placed(self.pattern):
            return
        weights, sparsity, sink, window = self.pattern, self.sparsity, self.sink, self.window
        if isinstance(weights, str | Path):
            weights, folder_sink, recent, folder_sparsity, made_for = read_pattern(weights)
            assign(self, made_for=made_for)
            sparsity = folder_sparsity if sparsity is None else sparsity
            sink = folder_sink if sink is None else sink
            window = recent if window is None else window
        elif sink is None:
            raise UserError(
                "head_pattern: a table of weights needs sink and window as well; a pattern folder has them"
            )
        weights = head_table(self.name, "pattern", weights, shares=False)
        sparsity = None if sparsity is None else real_number(self.name, "sparsity", sparsity, 0.0, 1.0)
        assign(self, pattern=heads_for(weights, sparsity), sparsity=sparsity, window=window)
        assign(self, sink=whole_array(self.name, "sink", sink, 0))

    def score(
        self, state: tuple[()], step: Step, seen: Int[Array, " b"], valid: Int[Array, " b"]
    ) -> tuple[tuple[()], Float[Array, "b k t"], int]:
        admitted = self.pattern[:, None] | (step.position < self.sink)[:, None, :]
        return state, admitted.astype(jnp.float32), 0

    def keep(self) -> Keep:
        return Keep(0.5)

    def admitted(self, tokens: int) -> Float[np.ndarray, "#l #k"]:
        sink = np.minimum(on_host(self.sink), tokens)[..., None]
        return np.where(on_host(self.pattern), tokens, sink).astype(np.float64)


def heads_for(weights: Float[np.ndarray, "l k"], sparsity: float | None) -> Bool[np.ndarray, "l k"]:
    """Return the mask of the heads that keep everything: the `int(l · k · (1 − sparsity))` heads of highest weight, or
    without a sparsity the heads of weight 0.5 or more. Raises UserError if the weights do not determine them."""
    if sparsity is None:
        if weights.min() < 0 or weights.max() > 1:
            raise UserError(
                f"head_pattern: without a sparsity weights must be from 0 to 1, got {weights.min():g} to "
                f"{weights.max():g}: give the share of heads that stream, sparsity=…"
            )
        return weights >= 0.5
    count = whole_count(weights.size, sparsity)
    if np.isin(weights, (0, 1)).all() and weights.sum() != count:
        raise UserError(
            f"head_pattern: a pattern of 0 and 1 has a fixed sparsity, here {1 - weights.mean():g} "
            f"({weights.sum():g} of {weights.size} heads keep everything), got sparsity={sparsity:g}"
        )
    return choose_heads(weights, count)


def whole_count(heads: int, sparsity: float) -> int:
    """Return `int(heads · (1 − sparsity))` (PruLong, arXiv:2506.17121) without binary rounding errors: 10 · (1 − 0.9)
    is 0.999… in binary and means 1."""
    return math.floor(heads * (1 - sparsity) + 1e-6)


def choose_heads(weights: Float[np.ndarray, "l k"], count: int) -> Bool[np.ndarray, "l k"]:
    """Return the mask of the `count` heads of highest weight; of equal weights the earlier layer and head goes
    first."""
    chosen = np.zeros(weights.size, bool)
    chosen[np.argsort(-weights.reshape(-1), kind="stable")[:count]] = True
    return chosen.reshape(weights.shape)
