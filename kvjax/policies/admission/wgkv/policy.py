"""The policy: what leaves the window stays iff its gate is at least τ."""

from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.errors import UserError, real_number, shown, whole_number
from kvjax.policies.admission.wgkv.files import check_made_for, load_gates
from kvjax.policies.admission.wgkv.gate import WriteGate
from kvjax.policies.interfaces import Admission, Keep, Number
from kvjax.policies.policy import Policy, head_table
from kvjax.step import Step
from kvjax.struct import struct


@struct
class WGKV(Admission):
    """Admission by the gate: a token that leaves the window is written iff g ≥ τ.

    `rate` is the largest share of a sequence's tokens that is expected to be admitted (1 where unknown); it sizes the
    pool.
    """

    gates: WriteGate
    tau: Float[Number, "..."]
    rate: Float[Number, "... k"]

    def score(
        self, state: tuple[()], step: Step, seen: Int[Array, " b"], valid: Int[Array, " b"]
    ) -> tuple[tuple[()], Float[Array, "b k t"], int]:
        return state, self.gates(step.k_pre, step.k), 0

    def keep(self) -> Keep:
        return Keep(self.tau)

    def admitted(self, tokens: int) -> Float[np.ndarray, "#l #k"]:
        return np.asarray(self.rate, np.float64) * tokens


def wgkv(
    *,
    gates: str | Path | WriteGate,
    tau: float | None = None,
    window: int | None = None,
    rate: Float[np.ndarray, "l k"] | None = None,
    model: Any = None,
) -> Policy:
    """Write-gated admission.

    Args:
        gates: a folder that training exported, `builtin` for those of the built-in model, or the gates themselves.
        tau: the threshold; a higher one keeps less. By default the folder's, else 0.1.
        window: the local window. By default the folder's, that is the one the gates were trained with.
        rate: the largest share of a sequence's tokens that is expected to be admitted, by layer and kv head, which
            sizes the pool; by default the folder's, if it was exported with this τ or a lower one; else 1.
        model: refuses gates whose layers, kv heads or head_dim are not this model's.
    """
    description: dict[str, Any] = {}
    if isinstance(gates, (str, Path)):
        gates, description = load_gates(gates, model)
    if not isinstance(gates, WriteGate):
        raise UserError(f"wgkv: gates must be a folder of gates or a WriteGate, got {shown(gates)}")
    layers, kv_heads, fan_in, _ = gates.w1.shape
    check_made_for((layers, kv_heads, fan_in // 2), model)
    tau = real_number("wgkv", "tau", description.get("tau", 0.1) if tau is None else tau, 0.0, 1.0)
    window = whole_number("wgkv", "window", description.get("window") if window is None else window)
    if rate is None and tau >= description.get("tau", tau):
        rate = description.get("peak_rate", description.get("rate"))
    known = np.ones((layers, kv_heads)) if rate is None else rate
    table = head_table("wgkv", "rate", known, layers, kv_heads).astype(np.float32)
    return Policy(WGKV(gates, np.array(tau, np.float32), table), name="wgkv", window=window)
