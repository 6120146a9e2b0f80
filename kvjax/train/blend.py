"""Training's attention of heads that may turn out to be retrieval heads or streaming heads: both, weighted."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.policies.base import Mask
from kvjax.policies.views import Step
from kvjax.struct import static, struct
from pallas_kernels.vertical_slash import FOREVER


@struct
class Blend:
    """z · full attention + (1 − z) · sinks and window, by layer and kv head (DuoAttention, arXiv:2410.10819, Eq. 1;
    PruLong, arXiv:2506.17121, Eq. 3).

    A streaming head sees blocks: those of its first `sink` tokens, its own and those before it that make up `window`
    tokens, as block-sparse kernels have it. Blocks of one token are exact: the first `sink` tokens and the last
    `window`, its own among them. Both are counted in each document.
    """

    z: Float[Array, "*l k"]
    """How much of each kv head is full attention."""
    sink: int = static()
    """First tokens of a streaming head."""
    window: int = static()
    """Last tokens of a streaming head."""
    block: int = static()
    """Tokens of a block."""

    @property
    def band(self) -> int:
        """How many of the last tokens every query of a streaming head sees at least."""
        return (-(-self.window // self.block) - 1) * self.block + 1

    def masks(self, step: Step) -> tuple[None, list[Mask]]:
        end = jnp.broadcast_to(self.ends(step.position)[:, None], step.k.shape[:3])
        return None, [Mask(self.z), Mask(1 - self.z, end)]

    def ends(self, position: Int[Array, "b t"]) -> Int[Array, "b t"]:
        """The index from which on no query of a streaming head sees each key, given its position in its document."""
        local, block = -(-self.window // self.block), self.block
        first = jnp.arange(position.shape[1]) - position
        last = first + (position // block + local) * block
        return jnp.where(position < -(-self.sink // block) * block, FOREVER, last)

    def figures(self, state: None, step: Step, outputs: Any) -> dict[str, Float[Array, "b k"]]:
        return {}
