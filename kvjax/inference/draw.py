"""How the next token is drawn from its logits."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int

from kvjax.errors import UserError, real_number, shown, whole_number
from kvjax.mesh import BATCH, P
from kvjax.struct import assign, static, struct

COLDEST = 1e-6
"""Logits divided by a smaller temperature may not be finite."""


@struct
class Draw:
    """How the next token is drawn, and which tokens end a sequence.

    Raises UserError for a number that means nothing.
    """

    temperature: Any = 0.0
    """What logits are divided by; 0: the most likely token is taken."""
    top_k: Any = 0
    """The most likely tokens that are drawn from; 0: all."""
    top_p: Any = 1.0
    """Of these the fewest whose probability reaches it."""
    min_p: Any = 0.0
    """Of these those that are at least so many times as likely as the most likely one."""
    eos: Any = ()
    """Tokens that end a sequence."""
    logprobs: bool = static(default=False)
    """Whether the tokens' log-probabilities are wanted."""

    def __post_init__(self):
        temperature = real_number("sample", "temperature", self.temperature, 0.0)
        if temperature > 0:
            real_number("sample", "temperature above 0", temperature, COLDEST)
        assign(
            self,
            temperature=np.float32(temperature),
            top_k=np.int32(whole_number("sample", "top_k", self.top_k, 0)),
            top_p=np.float32(real_number("sample", "top_p", self.top_p, above=0.0, most=1.0)),
            min_p=np.float32(real_number("sample", "min_p", self.min_p, 0.0, 1.0)),
            eos=np.asarray(tuple(self.eos) or (-1,), np.int32),
        )

    @property
    def greedy(self) -> bool:
        """Whether nothing is left to chance. Outside jit."""
        return float(self.temperature) == 0

    def ends(self, token: Int[Array, " b"]) -> Bool[Array, " b"]:
        """Which tokens end their sequence."""
        return (token[:, None] == jnp.asarray(self.eos)).any(-1)

    def logprob(self, logits: Float[Array, "b v"], token: Int[Array, " b"]) -> Float32[Array, " b"] | None:
        """The tokens' log-probabilities by the model's own distribution, whatever they are drawn from; None: they are
        not wanted."""
        if not self.logprobs:
            return None
        logits = jax.sharding.reshard(logits.astype(jnp.float32), P(BATCH, None))
        own = jnp.where(jnp.arange(logits.shape[-1]) == token[:, None], logits, 0)
        return own.sum(-1) - jax.nn.logsumexp(logits, -1)


def nth_key(key: jax.Array, index: Int[Array, ""] | int) -> jax.Array:
    """The key of a sequence's token by its number, of one key or of each sequence's own."""
    return jax.vmap(jax.random.fold_in, (0, None))(key, index) if key.ndim else jax.random.fold_in(key, index)


def draw_token(logits: Float[Array, "b v"], draw: Draw, key: jax.Array, greedy: bool) -> Int[Array, " b"]:
    """The next token of each sequence. key: one, or one for each sequence, whose noise is then the same in any
    batch."""
    logits = jax.sharding.reshard(logits.astype(jnp.float32), P(BATCH, None))
    if greedy:
        return jnp.argmax(logits, -1).astype(jnp.int32)
    logits = logits / draw.temperature
    ranked = -jnp.sort(-logits, axis=-1)
    vocabulary = logits.shape[-1]
    kth = jnp.where(draw.top_k > 0, jnp.minimum(draw.top_k, vocabulary), vocabulary) - 1
    floor_k = ranked[:, kth]
    p = jax.nn.softmax(jnp.where(ranked >= floor_k[:, None], ranked, -jnp.inf), -1)
    # the smallest set of the most likely tokens whose probability reaches top_p: those with less than top_p above them,
    # and always the first one, since devices flush a tiny top_p to zero
    inside = (jnp.cumsum(p, -1) - p < draw.top_p) | (jnp.arange(vocabulary) == 0)
    floor_p = jnp.where(inside, ranked, jnp.inf).min(-1)
    floor = jnp.maximum(jnp.maximum(floor_k, floor_p), ranked[:, 0] + jnp.log(draw.min_p))
    logits = jnp.where(logits >= floor[:, None], logits, -jnp.inf)
    if key.ndim:
        noise = jax.vmap(lambda own: jax.random.gumbel(own, (vocabulary,)))(key)
    else:
        noise = jax.random.gumbel(key, logits.shape, out_sharding=P(BATCH, None))
    return jnp.argmax(logits + noise, -1).astype(jnp.int32)


def checked_key(key: Any, greedy: bool, answers: int) -> jax.Array:
    """One random key, or one for each of the answers; any where nothing is drawn by it. Raises UserError for what is
    neither."""
    if key is None and greedy:
        return jax.random.key(0)
    if key is None:
        raise UserError("sampling at a temperature above 0 needs key=jax.random.key(seed)")
    if isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.ndim:
        if key.shape != (answers,):
            raise UserError(
                f"sample: key must be one key or one for each answer, of which there are {answers}, got keys of "
                f"shape {key.shape}"
            )
        return key
    try:
        jax.eval_shape(jax.random.fold_in, key, 0)
    except (TypeError, ValueError):
        raise UserError(f"sample: key must be one jax.random.key(seed), got {shown(key)}") from None
    return key if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(key)
