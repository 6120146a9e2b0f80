"""Training of KVPOP's scorers: under the mask of inference they learn the attention that tokens get later."""

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
"""The lower limit of the logarithm of a token's attention."""


@struct
class KVPOPTraining:
    """The mask and the score loss of scorers in training (KVPOP, Sec. 3.3 and 3.4; App. D).

    The mask is that of a cache of `max_entries` entries and has no gradient. The target of a token is the logarithm of
    the attention that it gets after it has left the window, in this model and under this mask. It is the maximum over
    the query heads of its group.
    """

    admission: KVPOP
    """The placed admission: its numbers have a leading layer axis."""
    over: Literal["kept", "all"] = static(default="kept")
    """The keys over which a query's attention sums to 1. kept: the keys that it sees, so that an evicted key may get
    more than 1; all: all keys before it."""
    falls: bool = static(default=True)
    """True if targets fall with position as scores do."""
    temperature: float = static(default=1.0)
    """The temperature of the loss."""

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
        max_chosen = admission.max_retained - admission.sink
        options = {"window": admission.window, "temperature": self.temperature}
        return boundary_loss(state, target, competes, max_chosen, **options)

    def target(self, step: Step, lse: Float[Array, "b n t"]) -> Float[Array, "b k t"]:
        """Return the target of each token: the logarithm of its attention, at least `FLOOR`. If `falls`, it falls with
        position from 0 on, as `KVPOP.priority` does."""
        admission = self.admission
        q, k, v, lse = jax.lax.stop_gradient((step.q, step.k, step.v, lse))
        if self.over == "all":
            lse = vertical_slash(q, k, v, window=1)[1]
        options = {"over": "logsumexp", "group": "max", "offset": admission.window, "lse": lse}
        mass = jnp.maximum(attention_mass(q, k, **options), FLOOR)
        return jax.lax.stop_gradient(admission.decayed(mass, step.position)) if self.falls else mass
