"""Retrieval heads keep everything, streaming heads keep sinks and the window (DuoAttention, arXiv:2410.10819).

With no retrieval head at all this is StreamingLLM (arXiv:2309.17453); without sinks as well, plain local attention.
"""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.errors import UserError, real_number
from kvjax.exported.fingerprint import MadeFor
from kvjax.policies.admission.pattern_folder import pattern_made_for, read_pattern
from kvjax.policies.interfaces import Admission, Keep
from kvjax.policies.numbers import head_table, is_placed, whole_array
from kvjax.step import Step
from kvjax.struct import assign, host, remembered, struct


@struct
class HeadPattern(Admission):
    """A kv head admits everything where `pattern` says so, else only the first `sink` positions.

    `pattern` may be given as a pattern folder, or as its table, a weight for each layer and kv head; `sink` and
    `window`, the tokens that streaming heads keep at the start and at the end, are by default the folder's own.
    """

    pattern: Any
    """Which heads keep everything, bool [… k]."""
    ratio: float | None = host(default=None)
    """The share of heads that do, the highest weights first; None: those of weights ≥ 0.5."""
    sink: Any = None
    """First positions that every head keeps."""
    window: int | None = host(default=None, repr=False)
    """The policy's, where it names none."""
    made_for: MadeFor | None = remembered()
    """What the folder says."""
    name = "head_pattern"

    def __post_init__(self):
        if is_placed(self.pattern):
            return
        weights, sink, window = self.pattern, self.sink, self.window
        if isinstance(weights, str | Path):
            weights, own_sink, own_window = read_pattern(folder := weights)
            assign(self, made_for=pattern_made_for(folder))
            sink, window = (own_sink if sink is None else sink), (own_window if window is None else window)
        elif sink is None:
            raise UserError(
                "head_pattern: a table of weights needs sink and window as well; a pattern folder has them"
            )
        weights = head_table(self.name, "pattern", weights, shares=False)
        ratio = None if self.ratio is None else real_number(self.name, "ratio", self.ratio, 0.0, 1.0)
        whole = weights >= 0.5 if ratio is None else choose_heads(weights, ratio)
        assign(self, pattern=whole, ratio=ratio, sink=whole_array(self.name, "sink", sink, 0), window=window)

    def score(
        self, state: tuple[()], step: Step, seen: Int[Array, " b"], valid: Int[Array, " b"]
    ) -> tuple[tuple[()], Float[Array, "b k t"], int]:
        admitted = self.pattern[:, None] | (step.position < self.sink)[:, None, :]
        return state, admitted.astype(jnp.float32), 0

    def keep(self) -> Keep:
        return Keep(0.5)

    def admitted(self, tokens: int) -> Float[np.ndarray, "#l #k"]:
        sink = np.minimum(np.asarray(self.sink), tokens)[..., None]
        return np.where(np.asarray(self.pattern), tokens, sink).astype(np.float64)


def choose_heads(weights: Float[np.ndarray, "l k"], ratio: float) -> Bool[np.ndarray, "l k"]:
    """The `round(ratio · l · k)` heads of highest weight; of equal ones the earlier layer and head goes first."""
    count = round(ratio * weights.size)
    chosen = np.zeros(weights.size, bool)
    chosen[np.argsort(-weights.reshape(-1), kind="stable")[:count]] = True
    return chosen.reshape(weights.shape)
