"""The admission: a token that leaves the window is retained iff its gate is at least τ."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.checkpoints.fingerprint import MadeFor
from kvjax.errors import UserError, shown
from kvjax.mesh import on_host
from kvjax.policies.admission.wgkv.files import check_made_for, load_gates
from kvjax.policies.admission.wgkv.gate import WriteGate
from kvjax.policies.base import Admission, Keep
from kvjax.policies.numbers import head_table, is_placed, real_array
from kvjax.policies.views import Step
from kvjax.struct import assign, host, remembered, struct


@struct
class WGKV(Admission):
    """Admission by the gate: a token that leaves the window is retained iff g ≥ τ.

    `gates` is a `WriteGate`, a folder that training exported, a .pt file of the authors (window 256, τ 0.1), or
    `builtin` for those of the built-in model. Arguments that are not given come from the folder.
    """

    gates: Any = dataclasses.field(repr=False)
    """The gates, or the path to read them from."""
    tau: Any = None
    """The threshold; a higher one keeps less. By default the folder's, else 0.1."""
    rate: Any = dataclasses.field(default=None, repr=False)
    """The largest share of a sequence's tokens that is expected to be admitted, by layer and kv head. It sizes the
    pool. By default it is the folder's rate if that was exported with this τ or a lower one, else 1."""
    window: int | None = host(default=None, repr=False)
    """The window of policies that name none; by default the one that the gates were trained with."""
    made_for: MadeFor | None = remembered()
    """The model that the folder's gates were made for; None: it does not say."""
    name = "wgkv"

    def __post_init__(self):
        gates, description = self.gates, {}
        if isinstance(gates, str | Path):
            gates, description = load_gates(gates)
        if not isinstance(gates, WriteGate):
            raise UserError(
                f"wgkv: gates must be a folder or a file of gates or a WriteGate, got {shown(gates)}"
            )
        layers, kv_heads, _, _ = gates.w1.shape
        trained_tau = real_array(self.name, "tau", description.get("tau", 0.1), 0.0, 1.0)
        tau = trained_tau if self.tau is None else real_array(self.name, "tau", self.tau, 0.0, 1.0)
        rate = self.rate
        if rate is None and ("tau" not in description or tau >= trained_tau):
            rate = description.get("peak_rate", description.get("rate"))
        rate = np.ones((layers, kv_heads)) if rate is None else rate
        if not is_placed(rate):
            rate = head_table(self.name, "rate", rate, layers, kv_heads).astype(np.float32)
        window = description.get("window") if self.window is None else self.window
        assign(self, gates=gates, tau=tau, rate=rate, window=window, made_for=MadeFor.described(description))

    def check(self, model: Any) -> None:
        layers, kv_heads, fan_in, _ = self.gates.w1.shape
        check_made_for((layers, kv_heads, fan_in // 2), model)

    def score(
        self, state: tuple[()], step: Step, seen: Int[Array, " b"], valid: Int[Array, " b"]
    ) -> tuple[tuple[()], Float[Array, "b k t"], int]:
        return state, self.gates(step.k_pre, step.k), 0

    def keep(self) -> Keep:
        return Keep(self.tau)

    def admitted(self, tokens: int) -> Float[np.ndarray, "#l #k"]:
        return on_host(self.rate).astype(np.float64) * tokens
