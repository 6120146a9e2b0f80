"""The scorer, which predicts from a recurrent memory of keys and values how much attention a key will get."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float

from kvjax.errors import UserError, one_of, whole_number
from kvjax.mesh import HEADS
from kvjax.policies.numbers import EXACT, uniform_parameter
from pallas_kernels.mlstm import Memory, Normaliser, mlstm

FEATURES = "hedgehog", "none"
NORMALISERS = "plain", "xlstm"
GAMMA = 0.999, 0.999999
"""The range of a head's decay per position, γ, which is learned (paper, table 2)."""
FORGET = 3.0, 6.0
"""The initial bias of the forget gate, for a layer's first kv head and for its last."""
CAP = 15.0
"""The bound of a gate's logit, which a soft cap enforces."""
SMALLEST = 1e-12
"""The smallest value of a Hedgehog feature."""


class Streams(NamedTuple):
    """The mLSTM's view of a call's tokens, in float32."""

    q: Float[Array, "b k t d"]
    """The queries with which tokens read the memory."""
    k: Float[Array, "b k t d"]
    """The keys under which tokens are written."""
    v: Float[Array, "b k t e"]
    """The values that are written and read."""
    log_i: Float[Array, "b k t"]
    """The logarithm of the input gate, a token's weight."""
    log_f: Float[Array, "b k t"]
    """The logarithm of the forget gate, which scales the memory before a token."""

    def without_padding(self, real: Bool[Array, "b t"]) -> "Streams":
        """Return the streams with the gates of padding closed, so that padding leaves no trace. `real` is False for
        padding."""
        real = real[:, None]
        log_i, log_f = jnp.where(real, self.log_i, -jnp.inf), jnp.where(real, self.log_f, 0)
        return self._replace(log_i=log_i, log_f=log_f)


class Sizes(NamedTuple):
    """The sizes and forms of scorers."""

    layers: int
    kv_heads: int
    """The number of kv heads in each layer."""
    head_dim: int
    """The width of keys and values."""
    features: str = "hedgehog"
    """One of `FEATURES`."""
    normaliser: str = "plain"
    """One of `NORMALISERS`."""
    capped: bool = True
    """True if the gates' logits are capped at ±`CAP`."""

    def make(self, seed: int = 0) -> "Scorer":
        """Return new scorers of these sizes."""
        forms = {"features": self.features, "normaliser": self.normaliser, "capped": self.capped}
        return Scorer(*self[:3], **forms, rngs=nnx.Rngs(seed))


class Scorer(nnx.Module):
    """One mLSTM per layer and kv head over [key after RoPE; value], and a head that scores what a token reads (KVPOP,
    Sec. 3).

    The input x = [k; v] passes no gradient on. Queries φ(W_q x) and keys φ(W_k x) have width d, with the Hedgehog map
    φ(y) = [softmax(y); softmax(-y)] over d/2 numbers. Values W_v x have width d/2. The gates are
    log i = cap(w_i·x + b_i) and log f = logsigmoid(cap(w_f·x + b_f)) with cap(y) = 15 tanh(y / 15). A token's score is
    a·SiLU(h) + c, where h is what its query reads from the memory (`score`).

    `theta` is the learned parameter of a head's decay (`log_gamma`). Arrays are float32, with layers as the first axis,
    and are sharded by kv head. New gates are equal for all tokens: W is uniform in ±1/√(2d), w_i, w_f and b_i are 0,
    b_f is from 3 to 6 over the heads of a layer, a is normal with standard deviation 1/√d_v, c and theta are 0.

    Args:
        features: "hedgehog"; or "none", for comparison: φ is the identity, with matrices twice as wide. The normaliser
            must then be "xlstm", since products may be negative.
        normaliser: "plain", a weighted mean of values; or "xlstm", whose divisor is at least 1.
        capped: True if the gates' logits are capped.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        *,
        features: str = "hedgehog",
        normaliser: str = "plain",
        capped: bool = True,
        rngs: nnx.Rngs,
    ):
        one_of("kvpop", "features", features, FEATURES)
        one_of("kvpop", "normaliser", normaliser, NORMALISERS)
        if features == "none" and normaliser == "plain":
            raise UserError("kvpop: features 'none' may be negative, so normaliser must be 'xlstm'")
        self.head_dim = whole_number("kvpop", "head_dim", head_dim)
        self.normaliser: Normaliser = "xlstm" if normaliser == "xlstm" else "plain"
        self.features, self.capped = features, capped
        half, fan_in = head_dim // 2, 2 * head_dim
        width = half if features == "hedgehog" else head_dim

        def uniform(*shape: int) -> nnx.Param:
            return uniform_parameter(rngs, heads + shape, fan_in, split(*shape))

        def split(*shape: int) -> P:
            return P(None, HEADS, *(None for _ in shape))

        def zeros(*shape: int) -> nnx.Param:
            return nnx.Param(jnp.zeros(heads + shape, jnp.float32, out_sharding=split(*shape)))

        heads = layers, kv_heads
        forget = np.broadcast_to(np.linspace(*FORGET, kv_heads, dtype=np.float32), heads)
        self.w_q, self.w_k, self.w_v = uniform(fan_in, width), uniform(fan_in, width), uniform(fan_in, half)
        self.w_i, self.w_f, self.b_i = zeros(fan_in), zeros(fan_in), zeros()
        self.b_f = nnx.Param(jnp.array(forget, out_sharding=split()))
        drawn = jax.random.normal(rngs.params(), (*heads, half), out_sharding=split(half))
        self.a, self.c, self.theta = nnx.Param(drawn / math.sqrt(half)), zeros(), zeros()

    @property
    def sizes(self) -> Sizes:
        """The sizes and forms of the whole module."""
        layers, kv_heads = self.c.shape
        return Sizes(layers, kv_heads, self.head_dim, self.features, self.normaliser, self.capped)

    @property
    def widths(self) -> tuple[int, int]:
        """The widths of the memory's keys and of its values."""
        return self.head_dim if self.features == "none" else 2 * self.w_k.shape[-1], self.w_v.shape[-1]

    def streams(self, k: Float[Array, "b k t h"], v: Float[Array, "b k t h"]) -> Streams:
        """Return the streams of one layer's tokens (this module sliced to that layer). No gradient reaches k and v."""
        x = self._input(k, v)
        log_i = self._capped(_project(x, self.w_i[...][..., None])[..., 0] + self.b_i[...][:, None])
        log_f = self._capped(_project(x, self.w_f[...][..., None])[..., 0] + self.b_f[...][:, None])
        keys = self._features(_project(x, self.w_k[...]))
        queries = self._features(_project(x, self.w_q[...]))
        return Streams(queries, keys, _project(x, self.w_v[...]), log_i, jax.nn.log_sigmoid(log_f))

    def queries(self, k: Float[Array, "b k t h"], v: Float[Array, "b k t h"]) -> Float[Array, "b k t d"]:
        """Return the tokens' queries alone."""
        return self._features(_project(self._input(k, v), self.w_q[...]))

    def score(
        self, queries: Float[Array, "b k t d"], streams: Streams, memory: Memory | None = None
    ) -> tuple[Float[Array, "b k t"], Memory]:
        """Return the scores of `queries`, and the memory after the call's tokens. Query t reads the memory of the
        tokens up to t.

        Query t belongs to token t − w + 1 in delayed scoring (paper, Sec. 3.2), and to token t in immediate scoring.
        """
        _, k, v, log_i, log_f = streams
        h, memory = mlstm(queries, k, v, log_i, log_f, memory, normaliser=self.normaliser)
        score = jnp.einsum("bkte,ke->bkt", jax.nn.silu(h), self.a[...], **EXACT) + self.c[...][:, None]
        return score, memory

    def log_gamma(self) -> Float[Array, " k"]:
        """Return log γ of one layer's kv heads. A score changes by log γ with each position. It lies between the
        logarithms of `GAMMA`."""
        low, high = (math.log(gamma) for gamma in GAMMA)
        return low + jax.nn.sigmoid(self.theta[...]) * (high - low)

    def _input(self, k: Float[Array, "b k t h"], v: Float[Array, "b k t h"]) -> Float[Array, "b k t x"]:
        return jax.lax.stop_gradient(jnp.concatenate([k, v], -1)).astype(jnp.float32)

    def _features(self, y: Float[Array, "b k t m"]) -> Float[Array, "b k t d"]:
        if self.features == "none":
            return y
        features = jnp.concatenate([jax.nn.softmax(y, -1), jax.nn.softmax(-y, -1)], -1)
        return jnp.maximum(features, SMALLEST)

    def _capped(self, y: Float[Array, "b k t"]) -> Float[Array, "b k t"]:
        return CAP * jnp.tanh(y / CAP) if self.capped else y


def _project(x: Float[Array, "b k t x"], w: Float[Array, "k x m"]) -> Float[Array, "b k t m"]:
    return jnp.einsum("bktx,kxm->bktm", x, w, **EXACT)
