"""Retrieval heads keep everything, streaming heads keep sinks and the window (DuoAttention, arXiv:2410.10819).

With no retrieval head at all this is StreamingLLM (arXiv:2309.17453); without sinks as well, plain local attention.
"""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.errors import UserError, real_number, whole_number
from kvjax.policies.admission.pattern_folder import read_pattern
from kvjax.policies.interfaces import Admission, Keep, Number
from kvjax.policies.policy import Policy, head_table
from kvjax.step import Step
from kvjax.struct import struct


@struct
class HeadPattern(Admission):
    """A kv head admits everything where `retrieval` says so, else only the first `sink` positions."""

    retrieval: Bool[Number, "... k"]
    sink: Int[Number, "..."]

    def score(
        self, state: tuple[()], step: Step, seen: Int[Array, " b"], valid: Int[Array, " b"]
    ) -> tuple[tuple[()], Float[Array, "b k t"], int]:
        admitted = self.retrieval[:, None] | (step.position < self.sink)[:, None, :]
        return state, admitted.astype(jnp.float32), 0

    def keep(self) -> Keep:
        return Keep(jnp.float32(0.5))

    def admitted(self, tokens: int) -> Float[np.ndarray, "#l #k"]:
        sink = np.minimum(np.asarray(self.sink), tokens)[..., None]
        return np.where(np.asarray(self.retrieval), tokens, sink).astype(np.float64)


def choose_heads(weights: Float[np.ndarray, "l k"], ratio: float) -> Bool[np.ndarray, "l k"]:
    """The `round(ratio · l · k)` heads of highest weight; of equal ones the earlier layer and head goes first."""
    count = round(ratio * weights.size)
    chosen = np.zeros(weights.size, bool)
    chosen[np.argsort(-weights.reshape(-1), kind="stable")[:count]] = True
    return chosen.reshape(weights.shape)


def head_pattern(
    *,
    pattern: str | Path | Float[np.ndarray, "l k"],
    ratio: float | None = None,
    sink: int | None = None,
    window: int | None = None,
    layers: int | None = None,
    kv_heads: int | None = None,
) -> Policy:
    """Retrieval heads from a DuoAttention pattern.

    Args:
        pattern: a pattern folder, or its table: a weight for each layer and kv head.
        ratio: the share of heads that keep everything, the highest weights first. None: the weights ≥ 0.5.
        sink, window: tokens that streaming heads keep at the start and at the end; by default the folder's own.
        layers, kv_heads: the model's, checked against the table when given.
    """
    if isinstance(pattern, (str, Path)):
        weights, own_sink, own_window = read_pattern(pattern)
        sink, window = (own_sink if sink is None else sink), (own_window if window is None else window)
    else:
        weights = pattern
        if sink is None or window is None:
            raise UserError(
                "head_pattern: a table of weights needs sink and window as well; a pattern folder has them"
            )
    weights = head_table("head_pattern", "pattern", weights, layers, kv_heads, shares=False)
    if ratio is None:
        retrieval = weights >= 0.5
    else:
        retrieval = choose_heads(weights, real_number("head_pattern", "ratio", ratio, 0.0, 1.0))
    sink = whole_number("head_pattern", "sink", sink, 0)
    return Policy(
        HeadPattern(retrieval, np.array(sink, np.int32)),
        name="head_pattern",
        window=whole_number("head_pattern", "window", window),
    )
