"""An admission for tests: a recurrent scorer that knows the priority of a token only `delay` tokens later."""

import jax.numpy as jnp
import numpy as np

from kvjax.policies.base import Admission, Keep, Number
from kvjax.policies.chance import uniform
from kvjax.policies.policy import Policy
from kvjax.struct import static, struct


@struct
class Delayed(Admission):
    """An admission whose priorities have a few levels, drawn from a token and the one `delay` tokens after it."""

    threshold: Number
    max_entries: Number | None
    delay: int = static()
    biased: bool = static(default=False)
    sinks: int = static(default=0)
    """Number of first tokens, whose priority is higher than that of all others."""

    @property
    def metadata(self):
        return {"bias": "float32"} if self.biased else {}

    def bias(self, state, step):
        """Return a bias of −inf for about a tenth of the tokens, and from −3.2 to 4 for the others."""
        drawn = uniform(step.head[:, None], 7 * step.layer, step.token[:, None])
        return jnp.where(drawn < 0.1, -jnp.inf, 8 * drawn - 4)

    def init(self, shape):
        return jnp.zeros((shape.batch, self.delay), jnp.int32)

    def score(self, state, step, seen, valid):
        line, t = jnp.concatenate([state, step.token], 1), step.token.shape[1]
        drawn = uniform(step.layer, step.head[:, None], line[:, None, :t], line[:, None, self.delay :])
        last = jnp.take_along_axis(line, valid[:, None] + jnp.arange(self.delay), 1)
        of = step.position[:, None] - self.delay  # position of the token that each priority belongs to
        return last, jnp.where(of < self.sinks, jnp.inf, jnp.floor(6 * drawn)), self.delay

    def keep(self):
        return Keep(self.threshold, self.max_entries)


def delayed(*, window, max_entries=None, delay=0, threshold=0.0, biased=False, sinks=0):
    """Return a policy with this admission. `max_entries` is a number, or a table by layer and kv head."""
    max_entries = None if max_entries is None else np.asarray(max_entries, np.int32)
    admission = Delayed(np.float32(threshold), max_entries, delay, biased, sinks)
    return Policy(admission, name="delayed", window=window)
