"""A policy: the window and the methods that decide what is stored, as one pytree."""

import numpy as np
from jaxtyping import Float

from kvjax.errors import UserError
from kvjax.policies.interfaces import Admission
from kvjax.struct import static, struct


@struct
class Policy:
    """What a model keeps of its context: the last `window` tokens, and what `admission` lets into the global region.

    Every array in it has a leading layer axis. A query at position i sees exactly the tokens j ≤ i with i − j < window
    or j admitted.
    """

    admission: Admission
    name: str = static()
    window: int = static()

    def expected_entries(self, tokens: int) -> Float[np.ndarray, "#l #k"]:
        """Entries expected after `tokens` tokens, ring included, by layer and kv head."""
        ring = min(tokens, self.window - 1)
        return ring + np.minimum(self.admission.admitted(tokens - ring), tokens - ring)


def check_window(policy: str, window: int | None) -> int:
    """`window` if it is a whole number of at least 1."""
    if window is None or int(window) != window or window < 1:
        raise UserError(f"{policy}: window must be a whole number of at least 1, got {window}")
    return int(window)


def check_heads(policy: str, shape: tuple[int, ...], layers: int | None, kv_heads: int | None) -> None:
    """Refuse a table of heads that belongs to another model."""
    given = (layers or shape[0], kv_heads or shape[1])
    if tuple(shape) != given:
        raise UserError(
            f"{policy}: made for {shape[0]} layers × {shape[1]} kv heads, the model has {given[0]} × {given[1]}"
        )
