"""Knorm (Devoto et al., 2024, arXiv:2406.11430): keys with a small norm draw attention whatever the query."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.policies.base import Eviction
from kvjax.policies.views import Stored
from kvjax.struct import struct


@struct
class KNorm(Eviction):
    """The score −‖k‖₂."""

    name = "knorm"

    def score(self, state: tuple[()], stored: Stored) -> Float[Array, "b k s"]:
        return -jnp.linalg.norm(stored.k.astype(jnp.float32), axis=-1)
