"""The gates in training: soft, as a bias of the logits, with the sparsity term."""

from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.policies.admission.wgkv.gate import WriteGate
from kvjax.policies.base import Mask
from kvjax.policies.views import Step
from kvjax.struct import static, struct
from pallas_kernels.vertical_slash import ends

GATE_FLOOR = 1e-3
"""The smallest soft gate; below it the gradient stops (WG-KV's code, `g_epsilon`)."""


@struct
class WriteGateTraining:
    """The training form of write gates: the soft gate as a logit bias, and the sparsity term.

    With `sparsity` "lifetime" the term is mean[o_s + (1 − o_s)(1 − (1 − g)²)], as in WG-KV's code, where o_s =
    min(1, W/(N − s)) is the share of the remaining steps that token s spends in the local window. With "paper" the term
    is mean[g + g(1 − g)]. With `hard` the mask is the same as in inference: binarised at τ, and without gradient.
    """

    gates: WriteGate
    """The gates that are trained."""
    tau: Float[Array, "*l"]
    """The threshold of inference, by layer or one for all."""
    window: int = static()
    """The number of last tokens that are visible whatever their gates."""
    sparsity: Literal["lifetime", "paper"] = static(default="lifetime")
    hard: bool = static(default=False)

    def masks(self, step: Step) -> tuple[Any, list[Mask]]:
        gate = self.gates(step.k_pre, step.k)
        if self.hard:
            return gate, [Mask(end=ends(gate >= self.tau, self.window))]
        return gate, [Mask(log_gate=jnp.log(jnp.maximum(gate, GATE_FLOOR)))]

    def figures(
        self, state: Float[Array, "b k t"], step: Step, outputs: Any
    ) -> dict[str, Float[Array, "b k"]]:
        """Return the sparsity term, the mean gate, the share of tokens that the hard gate admits, and the share of the
        sequence's tokens that it leaves in the cache at the end, local window included."""
        admitted, tokens = state >= self.tau, state.shape[-1]
        # the floor counts in the loss, and gates below it get no gradient (WG-KV's code)
        gate = jnp.maximum(state, GATE_FLOOR)
        used = gate * (2 - gate)
        remaining = jnp.arange(tokens, 0, -1, dtype=jnp.float32)
        if self.sparsity == "lifetime":
            in_window = jnp.minimum(1.0, self.window / remaining)
            used = in_window + (1 - in_window) * used
        kept = admitted | (remaining <= self.window)
        return {
            "sparsity": used.mean(-1),
            "gate": gate.mean(-1),
            "admitted": admitted.astype(jnp.float32).mean(-1),
            "kv_size": kept.astype(jnp.float32).mean(-1),
        }
