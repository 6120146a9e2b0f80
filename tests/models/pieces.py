"""The pieces that kvjax's decoder computes, under the names of `torch_twin.stages`."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.mesh import put, use_mesh
from kvjax.models.decoder import Decoder
from kvjax.models.rope import cos_sin


def dense_attention(q, k, v, window=None, sink=None):
    """Return causal attention over the last `window` tokens, by definition, [b n t h]. `sink` is an additional logit in
    each head's softmax."""
    group = q.shape[1] // k.shape[1]
    k, v = (jnp.repeat(x, group, 1, out_sharding=jax.typeof(q).sharding.spec) for x in (k, v))
    logits = jnp.einsum("bnth,bnsh->bnts", q, k) / np.sqrt(q.shape[-1])
    t = q.shape[2]
    sees = np.tril(np.ones((t, t), bool))
    sees = sees if window is None else np.triu(sees, 1 - window)
    logits = jnp.where(sees, logits, -1e30)
    if sink is not None:
        sinks = jnp.zeros_like(logits[..., :1]) + sink[:, None, None]
        logits = jnp.concatenate([logits, sinks], -1)
    weights = jax.nn.softmax(logits, -1)[..., :t]
    return jnp.einsum("bnts,bnsh->bnth", weights, v)


@partial(jax.jit, static_argnums=1)
def layer_pieces(model, index, x, mlp_in):
    """Return the pieces of layer `index` for its input x [1 t d]. Only the MLP gets `mlp_in`."""
    layer, config = jax.tree.map(lambda w: w[index], model.layers), model.config
    position, slides = jnp.arange(x.shape[1])[None], config.slides[index]
    rope = config.sliding_rope if slides and config.sliding_rope is not None else config.rope
    angles = cos_sin(rope, config.head_dim, position)
    projected = layer.project(x, angles)
    norm, q, k, k_pre, v = (projected[name] for name in ("hidden", "q", "k", "k_pre", "v"))
    o = dense_attention(q, k, v, config.sliding_window if slides else None, projected.get("sink"))
    found = {
        "norm": norm,
        "cos": angles[0],
        "sin": angles[1],
        "q": q / config.query_factor,
        "k": k,
        "k_pre": k_pre,
        "v": v,
    }
    return found | {"attention": layer.output(x, o), "mlp": layer.mlp(mlp_in), "layer": layer.finish(x, o)}


@jax.jit
def ends(model, tokens):
    hidden = model.hidden(tokens)
    return {"hidden": hidden, "logits": model.logits(hidden)}


def pieces(model: Decoder, tokens: np.ndarray, x: np.ndarray, mlp_in: np.ndarray, layer: int = 1):
    """Return each piece without its batch axis. x, mlp_in: the inputs of the layer and of its MLP, [t d]."""
    with use_mesh(model):
        found = layer_pieces(model, layer, put(x[None]), put(mlp_in[None])) | ends(model, put(tokens))
        return {name: np.asarray(value[0]) for name, value in found.items()}
