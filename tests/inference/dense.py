"""What a policy's rule means, spelled out: dense attention under the mask of what each query sees."""

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.mesh import AXES, gather, use_mesh
from kvjax.models.decoder import scan_layers
from kvjax.policies.interfaces import BIAS
from tests.policies.steps import shape_of


def stored(priority, keep, window):
    """Which tokens are in the global region for each query, and after the last: [b k t + 1 t], of `priority` [b k t] by
    token. By comparing every token with every other."""
    t = priority.shape[-1]
    wanted = priority >= keep.threshold
    left = jnp.arange(t + 1)[:, None] - jnp.arange(t) >= window
    competing = left & wanted[:, :, None]
    if keep.capacity is None:
        return competing
    mine, other = priority[..., :, None], priority[..., None, :]
    better = (other > mine) | ((other == mine) & (jnp.arange(t) < jnp.arange(t)[:, None]))
    ahead = jnp.einsum("bkqo,bkjo->bkqj", competing.astype(jnp.int32), better.astype(jnp.int32))
    return competing & (ahead < jnp.broadcast_to(keep.capacity, priority.shape[1])[:, None, None])


def dense_logits(model, policy, tokens):
    """Every token's logits with the mask {i − j < window} ∪ {j stored}, the latter with biases, and what is stored
    at the end [l b k t]."""

    def attend(step, _, admission):
        b, t = step.position.shape
        state = admission.init(shape_of(step))
        _, priority, delay = admission.score(state, step, jnp.zeros(b, jnp.int32), jnp.full(b, t))
        q, k, v, priority, keep = gather((step.q, step.k, step.v, priority, admission.keep()), *AXES)
        # none of the last tokens, whose priorities are not known yet, has left the window
        priority = jnp.roll(priority, -delay, -1).at[..., t - delay :].set(-jnp.inf)
        held = stored(priority, keep, policy.window)
        age = jnp.arange(t)[:, None] - jnp.arange(t)
        seen = (age >= 0) & ((age < policy.window) | held[:, :, :t])
        k, v, seen = (jnp.repeat(x, q.shape[1] // k.shape[1], 1) for x in (k, v, seen))
        s = jnp.einsum("bnth,bnsh->bnts", q, k) / np.sqrt(k.shape[-1])
        if BIAS in admission.planes:
            bias = jnp.repeat(gather(admission.bias(state, step), *AXES), q.shape[1] // step.k.shape[1], 1)
            s += jnp.where(age >= policy.window, bias[:, :, None], 0)
        p = jax.nn.softmax(jnp.where(seen, s, -1e30), -1)
        o = jnp.einsum("bnts,bnsh->bnth", p, v)
        return jax.sharding.reshard(o, jax.typeof(step.q).sharding.spec), None, held[:, :, t]

    with use_mesh(model):
        tokens = jnp.asarray(tokens, jnp.int32)
        position = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        x = model.embed_tokens(tokens)
        admission = gather(policy.admission, "data", "fsdp")
        x, _, kept = scan_layers(model, x, position, attend, xs=admission, token=tokens)
        return np.asarray(model.logits(model.norm(x))), np.asarray(kept)
