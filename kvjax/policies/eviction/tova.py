"""TOVA (Oren et al., 2024, arXiv:2401.06104): the entries that a layer's last query looked at, over all its heads."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from kvjax.mesh import HEADS
from kvjax.policies.eviction import queries
from kvjax.policies.views import Stored
from kvjax.struct import struct


@struct
class TOVA(queries.LastQueries):
    """The last query's attention, averaged over all heads of the layer (Sec. 3.2). The last entry stays. Under an
    admission, where heads may hold different tokens, each kv head takes the average of its own query heads."""

    observed = 1
    name = "tova"

    def score(self, state: tuple[()], stored: Stored) -> Float[Array, "b k s"]:
        mass = queries.attention(stored)
        if not stored.causal:
            return mass
        mean = lax.pmean(mass.mean(1, keepdims=True), HEADS)
        return jnp.broadcast_to(mean, mass.shape)
