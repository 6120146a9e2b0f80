"""Fast KVzip as its authors' code computes it: dense attention under masks of the entries that each layer and head
kept."""

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.mesh import AXES, BATCH, HEADS, P, gather, use_mesh
from kvjax.models.decoder import scan_layers


@jax.jit
def _forward(model, gates, tokens, visible):
    def attend(step, _, xs):
        gate, seen = xs
        q, k, v = gather((step.q, step.k, step.v), *AXES)
        group = q.shape[1] // k.shape[1]
        k_, v_, seen = (jnp.repeat(x, group, 1) for x in (k, v, seen[None]))
        s = jnp.einsum("bnth,bnsh->bnts", q, k_) / np.sqrt(k.shape[-1])
        p = jax.nn.softmax(jnp.where(seen, s, -jnp.inf), -1)
        o = jax.sharding.reshard(jnp.einsum("bnts,bnsh->bnth", p, v_), jax.typeof(step.q).sharding.spec)
        score = jax.shard_map(lambda gate, x: gate(x), out_specs=P(BATCH, HEADS))(gate, step.hidden)
        return o, None, (k[0], gather(score, *AXES)[0])

    position = jnp.arange(len(tokens))[None]
    x, _, found, _ = scan_layers(
        model, model.embed_tokens(tokens[None]), position, attend, xs=(gates, visible)
    )
    return *found, model.logits(model.norm(x))[0]


LONGEST = 72
"""Number of tokens of the longest sequence: all are padded to it, and share a program."""


def forward(model, gates, tokens, visible):
    """Return the keys and gates' scores [l k t …] of one sequence, and its logits [t v], where query q of a layer and
    kv head sees the keys of `visible` [l k q j]."""
    count = len(tokens)
    seen = causal(visible.shape[:2], LONGEST)
    seen[..., :count, :count] = visible
    with use_mesh(model):
        found = _forward(model, gates, np.pad(tokens, (0, LONGEST - count)).astype(np.int32), seen)
        keys, scores, logits = map(np.asarray, found)
        return keys[:, :, :count], scores[..., :count], logits[:count]


def causal(shape, count):
    """Return a causal mask of `count` tokens for each layer and kv head [l k t t]."""
    return np.broadcast_to(np.tri(count, dtype=bool), (*shape, count, count)).copy()


def above(scores, ratio):
    """Return the mask of the scores above the int(M r)-th best of all M scores (the authors' `threshold`)."""
    if ratio >= 1:
        return np.ones(scores.shape, bool)
    best = np.sort(scores.reshape(-1))[::-1]
    return scores > best[max(int(scores.size * ratio) - 1, 0)]


def read(model, gates, tokens, *, ratio, chunk, window, prefix):
    """Return the kept entries of a prompt [l k t], the keys of all its tokens, and the logits after it (the authors'
    `prefill`)."""
    layers, heads, n = *gates.shape[:2], len(tokens) - prefix
    if ratio * n < window:
        window, ratio = int(ratio * n), 0.0
    else:
        ratio = (ratio * n - window) / (n - window)
    visible = causal((layers, heads), len(tokens))
    kept, start = np.ones((layers, heads, len(tokens)), bool), prefix
    for begin in range(0, len(tokens), chunk):
        read = min(begin + chunk, len(tokens))
        visible[:, :, begin:read] &= kept[:, :, None] | (np.arange(len(tokens)) >= begin)
        # no query has seen any later token yet
        keys, scores, logits = forward(model, gates, tokens, visible)
        if read - window > start:
            kept[..., start : read - window] = above(scores[..., start : read - window], ratio)
            start = read - window
    return kept, keys, logits[-1]


def decode(model, gates, tokens, prompt, *, entries, every, first, last):
    """Return the kept entries of a prompt with an answer [l k t], the keys, and the logits after every token. At every
    multiple of `every` tokens, the entries beyond the budget of all layers and heads are dropped."""
    layers, heads = gates.shape[:2]
    visible = causal((layers, heads), len(tokens))
    kept = np.ones((layers, heads, len(tokens)), bool)
    for read in [x for x in range(prompt, len(tokens) + 1) if x == prompt or x % every == 0]:
        scores, held = forward(model, gates, tokens, visible)[1], kept[..., :read]
        excess = int(held.sum()) - entries * layers * heads
        if excess > 0:
            scores = scores[..., :read].copy()
            scores[..., :first] = scores[..., read - last :] = 1.0
            lowest = np.sort(scores[held])[excess]
            held &= scores >= lowest
        visible[:, :, read:] &= kept[:, :, None]
    keys, _, logits = forward(model, gates, tokens, visible)
    return kept, keys, logits
