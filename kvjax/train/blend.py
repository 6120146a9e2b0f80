"""Attention of training for heads that may become retrieval or streaming heads: a weighted sum of both."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.policies.base import Mask
from kvjax.policies.views import Step
from kvjax.struct import static, struct
from pallas_kernels.vertical_slash import FOREVER


@struct
class Blend:
    """The sum z · full attention + (1 − z) · streaming attention, by layer and kv head (DuoAttention, arXiv:2410.10819,
    Eq. 1; PruLong, arXiv:2506.17121, Eq. 3).

    A query of a streaming head sees whole blocks, as in block-sparse kernels: the blocks of the first `sink` tokens,
    its own block, and as many blocks before it as `window` tokens, rounded up to whole blocks, need. With blocks of one
    token it sees exactly the first `sink` tokens and the last `window`, its own included. Sinks and window are counted
    within each document.
    """

    z: Float[Array, "*l k"]
    """The weight of full attention in each kv head."""
    sink: int = static()
    """The number of first tokens that a streaming head sees."""
    window: int = static()
    """The number of last tokens that a streaming head sees."""
    block: int = static()
    """The number of tokens of a block."""

    @property
    def band(self) -> int:
        """The minimum number of last tokens that a query of a streaming head sees."""
        return (-(-self.window // self.block) - 1) * self.block + 1

    def masks(self, step: Step) -> tuple[None, list[Mask]]:
        end = jnp.broadcast_to(self.ends(step.position)[:, None], step.k.shape[:3])
        return None, [Mask(self.z), Mask(1 - self.z, end)]

    def ends(self, position: Int[Array, "b t"]) -> Int[Array, "b t"]:
        """Return the index from which on no query of a streaming head sees each key. `position`: the position of each
        token in its document."""
        local, block = -(-self.window // self.block), self.block
        first = jnp.arange(position.shape[1]) - position
        last = first + (position // block + local) * block
        return jnp.where(position < -(-self.sink // block) * block, FOREVER, last)

    def figures(self, state: None, step: Step, outputs: Any) -> dict[str, Float[Array, "b k"]]:
        return {}
