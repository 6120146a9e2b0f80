"""KeyDiff (Park et al., 2025, arXiv:2504.15364): the keys that differ most from the others matter most."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.policies.base import Eviction
from kvjax.policies.views import Stored
from kvjax.struct import struct


@struct
class KeyDiff(Eviction):
    """The score −cos(k_i, mean over j of k_j / ‖k_j‖) (Sec. 3.2)."""

    name = "keydiff"

    def score(self, state: tuple[()], stored: Stored) -> Float[Array, "b k s"]:
        k = stored.k.astype(jnp.float32)
        length = jnp.maximum(jnp.linalg.norm(k, axis=-1, keepdims=True), 1e-12)
        direction = jnp.where(stored.scored[..., None], k / length, 0)
        # the mean's own length does not matter to a cosine
        anchor = direction.sum(2, keepdims=True)
        anchor /= jnp.maximum(jnp.linalg.norm(anchor, axis=-1, keepdims=True), 1e-12)
        return -(direction * anchor).sum(-1)
