"""KVPOP's scorers as they are trained: under the mask of use, by the attention that tokens then get."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.policies.admission.kvpop import KVPOP
from kvjax.policies.base import Mask
from kvjax.policies.views import Step
from kvjax.struct import static, struct
from kvjax.train.boundary import boundary_loss
from kvjax.train.objective import deployed_mask
from pallas_kernels.attention_mass import attention_mass
from pallas_kernels.vertical_slash import vertical_slash

FLOOR = -30.0
"""The logarithm of the least attention that is told from none."""


@struct
class KVPOPTraining:
    """What training asks of scorers: the mask that a cache of their size would have, which has no gradient, and of
    each layer the score loss (KVPOP, Sec. 3.3 and 3.4; App. D).

    The target of a token is the logarithm of the attention that queries pay it once it has left the window, the largest
    of its group's query heads, as this very model under this very mask would pay it.
    """

    admission: KVPOP
    """Placed: its numbers have a leading layer axis."""
    over: Literal["kept", "all"] = static(default="kept")
    """Whose attention is 1 together: that of the keys a query sees, so that what was evicted may be worth more than 1;
    or all before it."""
    falls: bool = static(default=True)
    """Whether targets fall with positions as scores do."""
    temperature: float = static(default=1.0)
    """Of the loss."""

    def masks(self, step: Step) -> tuple[Float[Array, "b k t"], list[Mask]]:
        assert self.admission.window is not None
        priority, mask = deployed_mask(self.admission, step, self.admission.window)
        return priority, [mask]

    def figures(
        self, state: Float[Array, "b k t"], step: Step, outputs: Any
    ) -> dict[str, Float[Array, "b k"]]:
        admission, lse = self.admission, outputs[0][1]
        assert admission.window is not None
        target = self.target(step, lse)
        competes = jnp.broadcast_to(step.position[:, None] >= admission.sink, target.shape)
        chosen = admission.max_retained - admission.sink
        told = {"window": admission.window, "temperature": self.temperature}
        return boundary_loss(state, target, competes, chosen, **told)

    def target(self, step: Step, lse: Float[Array, "b n t"]) -> Float[Array, "b k t"]:
        """Of each token, as if it fell from position 0 on, like `KVPOP.priority`; `FLOOR` where nothing looks."""
        admission = self.admission
        q, k, v, lse = jax.lax.stop_gradient((step.q, step.k, step.v, lse))
        if self.over == "all":
            lse = vertical_slash(q, k, v, window=1)[1]
        counted = {"over": "logsumexp", "group": "max", "offset": admission.window, "lse": lse}
        mass = jnp.maximum(attention_mass(q, k, **counted), FLOOR)
        return jax.lax.stop_gradient(admission.fallen(mass, step.position)) if self.falls else mass
