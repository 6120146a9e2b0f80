"""The write gate, which predicts how much a token will be needed once it has left the window."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from kvjax.mesh import HEADS, axis_size
from kvjax.policies.numbers import EXACT, uniform_parameter


class WriteGate(nnx.Module):
    """One two-layer gate per layer and kv head over (RMSNorm(key before RoPE), RMSNorm(key after RoPE)), in float32.

    The hidden width is `head_dim · expand`: 4 for Llama, 1.5 for Qwen3 in WG-KV's code. The heads of a
    layer share the norms' weights. Weights and biases are initialised as in a torch convolution, U(±1/√fan_in).
    """

    def __init__(self, layers: int, kv_heads: int, head_dim: int, *, expand: float = 4.0, rngs: nnx.Rngs):
        width = round(head_dim * expand)
        split = "fsdp" if width % axis_size("fsdp") == 0 else None

        def uniform(fan_in, shape, *spec):
            return uniform_parameter(rngs, (layers, kv_heads, *shape), fan_in, P(None, HEADS, *spec))

        fan_in = 2 * head_dim
        self.norm_pre = nnx.Param(jnp.ones((layers, head_dim), out_sharding=P(None, None)))
        self.norm_post = nnx.Param(jnp.ones((layers, head_dim), out_sharding=P(None, None)))
        self.w1 = uniform(fan_in, (fan_in, width), None, split)
        self.b1 = uniform(fan_in, (width,), split)
        self.w2 = uniform(width, (width,), split)
        self.b2 = uniform(width, ())

    def __call__(self, k_pre: Float[Array, "b k t h"], k: Float[Array, "b k t h"]) -> Float[Array, "b k t"]:
        """Return the gates of one layer's tokens (this module sliced to that layer), in (0, 1)."""
        features = jnp.concatenate([_rms(k_pre, self.norm_pre[...]), _rms(k, self.norm_post[...])], -1)
        hidden = jnp.einsum("bktc,kcm->bktm", features, self.w1[...], **EXACT) + self.b1[...][:, None]
        hidden = gelu(hidden)
        logit = jnp.einsum("bktm,km->bkt", hidden, self.w2[...], **EXACT) + self.b2[...][:, None]
        return jax.nn.sigmoid(logit)


@jax.custom_jvp
def gelu(x):
    return jax.nn.gelu(x, approximate=False)


@gelu.defjvp
def _gelu_jvp(primals, tangents):
    # by hand, because jax 0.12's derivative of erf does not trace inside shard_map
    (x,), (dx,) = primals, tangents
    below = 0.5 * (1 + jax.lax.erf(x * 0.5**0.5))
    return gelu(x), dx * (below + x * jnp.exp(-0.5 * x * x) / math.sqrt(2 * math.pi))


def _rms(x, scale):
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6) * scale
