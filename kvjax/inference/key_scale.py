"""The scales by which a model's keys are divided before they are rounded to int8.

Some components of keys are much larger than the others in every token: a hundred times in Qwen2, whose keys have
biases. Since a key has only one int8 scale, the other components would use few of the 256 numbers. Dividing a component
of the keys by c and multiplying the same component of the queries by c changes no logit. With c = √(RMS of the keys /
RMS of the queries), the component is equally large in both (as in SmoothQuant: Xiao et al., 2023, Eq. 4). The c are
powers of two, so that multiplication is exact.
"""

import weakref

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jaxtyping import Array, Float

from kvjax.mesh import BATCH, HEADS, P, batch_shards, use_mesh
from kvjax.models.decoder import Decoder, causal_attention, scan_layers

TOKENS, STRIDE = 128, 251
"""The number of tokens that are measured, and the distance between their positions. The tokens are drawn from the
vocabulary with a fixed seed, so a model has the same scales in every run."""

_scales: "weakref.WeakKeyDictionary[Decoder, Array]" = weakref.WeakKeyDictionary()


def key_scale(model: Decoder) -> Float[Array, "l k h"] | None:
    """Return c for every layer with full attention and KV head; None for a model whose entries are not int8."""
    if not model.config.int8_entries:
        return None
    if model not in _scales:
        with use_mesh(model):
            _scales[model] = _measured(model)
    return _scales[model]


@jax.jit
def _measured(model: Decoder) -> Float[Array, "l k h"]:
    shape = batch_shards(), TOKENS
    tokens = jax.random.randint(jax.random.key(0), (1, TOKENS), 0, model.config.vocab_size)
    position = jnp.arange(TOKENS) * STRIDE
    tokens, position = (jnp.broadcast_to(x, shape, out_sharding=P(BATCH, None)) for x in (tokens, position))

    def local(q, k):
        groups = (
            rearrange(q, "b (k g) t h -> k (b g t) h", k=k.shape[1]),
            rearrange(k, "b k t h -> k (b t) h"),
        )
        of_query, of_key = (lax.pmean(jnp.square(x.astype(jnp.float32)).mean(1), BATCH) for x in groups)
        tiny = jnp.finfo(jnp.float32).tiny
        return jnp.exp2(jnp.round(jnp.log2((of_key + tiny) / (of_query + tiny)) / 4))

    def attend(step, carry, _):
        c = jax.shard_map(local, out_specs=P(HEADS))(step.q, step.k)
        return causal_attention(step), carry, c

    embedded = model.embed_tokens(tokens, frozen=True)
    return scan_layers(model, embedded, position, attend, frozen=True)[2]
