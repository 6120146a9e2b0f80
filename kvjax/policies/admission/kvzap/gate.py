"""The surrogate, which predicts the logarithm of KVzip+'s score from the attention block's input."""

import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from kvjax.mesh import HEADS
from kvjax.policies.admission.wgkv.gate import gelu
from kvjax.policies.numbers import EXACT, uniform_parameter


class Surrogate(nnx.Module):
    """One network per layer with an output for each kv head: two layers with an exact GELU, or one linear layer
    (kvpress/presses/kvzap_press.py).

    Arrays are float32, with layers as the first axis. Outputs are sharded by kv head; the `hidden` units, which all
    heads share, are not. They are initialised as torch linear layers, U(±1/√fan_in).
    """

    def __init__(self, layers: int, kv_heads: int, width: int, hidden: int = 0, *, rngs: nnx.Rngs):
        """Make a surrogate for inputs of this width. hidden: the number of hidden units; 0: it is linear."""
        self.hidden = hidden

        def draw(fan_in: int, *shape: int, heads: bool = True) -> nnx.Param:
            spec = P(None, HEADS if heads else None, *(None,) * (len(shape) - 1))
            return uniform_parameter(rngs, (layers, *shape), fan_in, spec)

        if hidden:
            self.w1, self.b1 = draw(width, hidden, width, heads=False), draw(width, hidden, heads=False)
        fan_in = hidden or width
        self.w2, self.b2 = draw(fan_in, kv_heads, fan_in), draw(fan_in, kv_heads)

    @property
    def shape(self) -> tuple[int, int, int]:
        """The numbers of layers and kv heads, and the width of the input, of the whole module."""
        layers, kv_heads, width = self.w2.shape
        return layers, kv_heads, self.w1.shape[2] if self.hidden else width

    def __call__(self, x: Float[Array, "b t d"]) -> Float[Array, "b k t"]:
        """Return the predictions for one layer's tokens (this module sliced to that layer), float32. The first
        layer's weights are rounded to the dtype of x, as they are published, and sums are float32."""
        if self.hidden:
            x = gelu(jnp.einsum("btd,md->btm", x, self.w1[...].astype(x.dtype), **EXACT) + self.b1[...])
        return jnp.einsum("btd,kd->bkt", x, self.w2[...].astype(x.dtype), **EXACT) + self.b2[...][:, None]
