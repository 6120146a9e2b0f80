"""The hard-concrete distribution (Louizos et al., arXiv:1712.01312): masks that are mostly 0 or 1 and still have a
gradient. This is PruLong's (arXiv:2506.17121, App. B) in the form of its published code, which divides both noise and
log α by the temperature.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

TEMPERATURE = 2 / 3
"""The temperature of the sigmoid."""
LOW, HIGH = -0.1, 1.1
"""The range that the sigmoid is stretched to before it is clipped to [0, 1]."""
NOISE = 1e-6
"""The minimum distance of the noise from 0 and 1, in float32."""


def sample(key: PRNGKeyArray, log_alpha: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return masks z in [0, 1], one sample for each log α. The gradient is 0 where they are clipped."""
    u = jax.random.uniform(key, log_alpha.shape, minval=NOISE, maxval=1 - NOISE)
    y = jax.nn.sigmoid((jnp.log(u) - jnp.log1p(-u) + log_alpha) / TEMPERATURE)
    return jnp.clip(LOW + (HIGH - LOW) * y, 0, 1)


def probability_of_zero(log_alpha: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return P(z = 0) = σ(T · log(−LOW / HIGH) − log α)."""
    return jax.nn.sigmoid(TEMPERATURE * jnp.log(-LOW / HIGH) - log_alpha)
