"""The admission: a token that leaves the window is retained iff its prediction is at least the threshold."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.checkpoints.fingerprint import MadeFor
from kvjax.errors import UserError, shown
from kvjax.mesh import on_host
from kvjax.policies.admission.kvzap.files import check_made_for, load_gates
from kvjax.policies.admission.kvzap.gate import Surrogate
from kvjax.policies.base import Admission, Keep
from kvjax.policies.numbers import head_table, is_placed, real_array
from kvjax.policies.views import Step
from kvjax.struct import assign, host, remembered, struct

WINDOW = 128
"""The number of last tokens that are always visible (kvpress/presses/dms_press.py)."""


def resolve_gates(name: str, gates: Any) -> tuple[Surrogate, dict[str, Any]]:
    """Return the surrogate of a policy's `gates`, which may be a folder, and its description; {}: it has none."""
    description: dict[str, Any] = {}
    if isinstance(gates, str | Path):
        gates, description = load_gates(gates)
    if not isinstance(gates, Surrogate):
        raise UserError(f"{name}: gates must be a folder of gates or a Surrogate, got {shown(gates)}")
    return gates, description


@struct
class KVzap(Admission):
    """Admission by a prediction of the logarithm of KVzip+'s score: a token that leaves the window is retained iff the
    prediction is at least `threshold`, in a prompt and in an answer (sparse prefill, as in DMS).

    `gates` is a `Surrogate`, a folder that training exported, or one that NVIDIA publishes.
    """

    gates: Any = dataclasses.field(repr=False)
    """The surrogate, or the folder to read it from."""
    threshold: Any = None
    """The least prediction of a token that is retained; a higher one keeps less. By default the folder's. NVIDIA's
    example uses −4."""
    rate: Any = dataclasses.field(default=None, repr=False)
    """The share of a sequence's tokens that is expected to be admitted, by layer and kv head. It sizes the pool. By
    default it is the folder's if that was exported with this threshold or a lower one, else 1."""
    window: int | None = host(default=WINDOW, repr=False)
    """The window of policies that name none."""
    made_for: MadeFor | None = remembered()
    """The model that the folder's gates were made for; None: it does not say."""
    name = "kvzap"

    def __post_init__(self):
        gates, description = resolve_gates(self.name, self.gates)
        trained_threshold = description.get("threshold")
        if trained_threshold is None and self.threshold is None:
            raise UserError(f"{self.name}: these gates have no threshold, and none is given, such as −4")
        trained_threshold = (
            None if trained_threshold is None else real_array(self.name, "threshold", trained_threshold)
        )
        threshold = (
            trained_threshold
            if self.threshold is None
            else real_array(self.name, "threshold", self.threshold)
        )
        layers, kv_heads, _ = gates.shape
        rate = self.rate
        if rate is None and trained_threshold is not None and threshold >= trained_threshold:
            rate = description.get("rate")
        rate = np.ones((layers, kv_heads)) if rate is None else rate
        if not is_placed(rate):
            rate = head_table(self.name, "rate", rate, layers, kv_heads).astype(np.float32)
        assign(self, gates=gates, threshold=threshold, rate=rate, made_for=MadeFor.described(description))

    def check(self, model: Any) -> None:
        check_made_for(self.gates, model)

    def score(
        self, state: tuple[()], step: Step, seen: Int[Array, " b"], valid: Int[Array, " b"]
    ) -> tuple[tuple[()], Float[Array, "b k t"], int]:
        return state, self.gates(step.hidden), 0

    def keep(self) -> Keep:
        return Keep(self.threshold)

    def admitted(self, tokens: int) -> Float[np.ndarray, "#l #k"]:
        return on_host(self.rate).astype(np.float64) * tokens
