"""Full attention over plain contiguous caches, by the fastest paths there are: the rival of `benchmark.py`."""

import functools
import math
from collections.abc import Callable
from typing import Any


def dense_paths(model: Any, context: int, new_tokens: int) -> dict[str, tuple[Callable, Callable]]:
    """Return by name (prefill(tokens) → state, decode(state) → state): full attention over a contiguous cache, for
    prompts of `context` tokens that `new_tokens` greedy ones follow."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from einops import rearrange

    from kvjax.inference.attention import SPLIT, causal_attention
    from kvjax.models.decoder import scan_layers
    from kvjax.models.rope import cos_sin

    config = model.config
    total, scale = context + new_tokens, config.head_dim**-0.5

    local = functools.partial(jax.shard_map, out_specs=SPLIT)

    @local
    def xla_causal(step):
        """`jax.nn.dot_product_attention`, a block of queries at a time: the whole matrix would not fit."""
        q, k, v = (rearrange(x, "b n t h -> b t n h") for x in (step.q, step.k, step.v))
        rows = math.gcd(1024, context)

        def block(i):
            part = jax.lax.dynamic_slice_in_dim(q, i * rows, rows, 1)
            mask = i * rows + jnp.arange(rows)[:, None] >= jnp.arange(context)
            return jax.nn.dot_product_attention(part, k, v, mask=mask[None, None])

        o = jax.lax.map(block, jnp.arange(context // rows))
        return rearrange(o, "blocks b t n h -> b n (blocks t) h")

    def prefill(attention, layout, model, tokens):
        def attend(step, _, xs):
            room = ((0, 0), (0, 0), (0, new_tokens), (0, 0))
            kept = (rearrange(jnp.pad(x, room), f"b k s h -> {layout}") for x in (step.k, step.v))
            return attention(step), None, tuple(kept)

        position = jnp.arange(context)[None]
        x, _, kv = scan_layers(model, model.embed_tokens(tokens), position, attend)
        token = jnp.argmax(model.logits(model.norm(x[:, -1:]))[:, 0], -1)
        layers = [jax.tree.map(lambda a, i=i: a[i], kv) for i in range(config.num_layers)]
        return layers, token

    @local
    def xla_decode(q, k, v, length):
        q = rearrange(q, "b n t h -> b t n h")
        return rearrange(
            jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=length[None]), "b t n h -> b n t h"
        )

    @local
    def einsum_decode(q, k, v, length):
        q = rearrange(q, "b (k g) 1 h -> b k g h", k=config.num_kv_heads)
        s = jnp.einsum("bkgh,bksh->bkgs", q, k, preferred_element_type=jnp.float32) * scale
        p = jax.nn.softmax(jnp.where(jnp.arange(total) < length, s, -1e30), -1).astype(v.dtype)
        return rearrange(jnp.einsum("bkgs,bksh->bkgh", p, v), "b k g h -> b (k g) 1 h")

    def decode(attention, layout, model, layers, state, start):
        """Layers unrolled, and each one's weights and cache arrays of their own: slices of stacks would be copied."""
        axis = layout.split().index("s")

        def one(carry, index):
            caches, token = carry
            x = model.embed_tokens(token[:, None])
            angles = cos_sin(config.rope, config.head_dim, (start + index)[None, None])
            new = []
            for block, kept in zip(layers, caches, strict=True):
                projected = block.project(x, angles)
                q, k_new, v_new = (projected[name] for name in ("q", "k", "v"))
                added = (rearrange(x, f"b k s h -> {layout}") for x in (k_new, v_new))
                k, v = (
                    jax.lax.dynamic_update_slice_in_dim(old, add, start + index, axis)
                    for old, add in zip(kept, added, strict=True)
                )
                new.append((k, v))
                x = block.finish(x, attention(q, k, v, start + index + 1))
            token = jnp.argmax(model.logits(model.norm(x))[:, 0], -1)
            return (new, token), token

        return jax.lax.scan(one, state, jnp.arange(new_tokens))[0]

    @local
    def cudnn_causal(step):
        q, k, v = (rearrange(x, "b n t h -> b t n h") for x in (step.q, step.k, step.v))
        o = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
        return rearrange(o, "b t n h -> b n t h")

    @local
    def cudnn_decode(q, k, v, length):
        q, length = rearrange(q, "b n t h -> b t n h"), length[None]
        attend = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
        o = attend(q, k, v, query_seq_lengths=jnp.ones_like(length), key_value_seq_lengths=length)
        return rearrange(o, "b t n h -> b n t h")

    forms = [
        ("blockwise", "b k s h", causal_attention, einsum_decode),
        ("dot_product_attention", "b s k h", xla_causal, xla_decode),
    ]
    if jax.default_backend() == "gpu" and model.embed.dtype == jnp.bfloat16:
        forms.append(("cuDNN", "b s k h", cudnn_causal, cudnn_decode))
    layers = [jax.tree.map(lambda w, i=i: w[i], model.layers) for i in range(config.num_layers)]
    paths = {}
    for name, layout, causal, single in forms:
        before = jax.jit(functools.partial(prefill, causal, layout))
        after = jax.jit(functools.partial(decode, single, layout), donate_argnums=2)
        paths[name] = (
            lambda tokens, f=before: f(model, tokens),
            lambda state, f=after: f(model, layers, state, np.int32(context)),
        )
    return paths
