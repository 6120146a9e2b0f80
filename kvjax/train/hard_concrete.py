"""The hard-concrete distribution (Louizos et al., arXiv:1712.01312), of masks that are mostly 0 or 1 and still have a
gradient: PruLong's (arXiv:2506.17121, App. B), in the form of its published code, which divides noise and log α alike.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

TEMPERATURE = 2 / 3
"""Of the sigmoid."""
LOW, HIGH = -0.1, 1.1
"""What the sigmoid is stretched to before it is clipped to [0, 1]."""
NOISE = 1e-6
"""How near to 0 and 1 the noise may come, in float32."""


def sample(key: PRNGKeyArray, log_alpha: Float[Array, "..."]) -> Float[Array, "..."]:
    """Masks z in [0, 1], one draw for each log α: the gradient is 0 where they are clipped."""
    u = jax.random.uniform(key, log_alpha.shape, minval=NOISE, maxval=1 - NOISE)
    y = jax.nn.sigmoid((jnp.log(u) - jnp.log1p(-u) + log_alpha) / TEMPERATURE)
    return jnp.clip(LOW + (HIGH - LOW) * y, 0, 1)


def probability_of_zero(log_alpha: Float[Array, "..."]) -> Float[Array, "..."]:
    """P(z = 0) = σ(T · log(−LOW / HIGH) − log α)."""
    return jax.nn.sigmoid(TEMPERATURE * jnp.log(-LOW / HIGH) - log_alpha)
