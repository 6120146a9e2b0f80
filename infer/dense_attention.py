"""Full attention over contiguous caches by several paths: the rivals of `benchmark.py`."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange

from kvjax.mesh import BATCH, HEADS, put
from kvjax.models.decoder import SPLIT, Decoder, causal_attention, scan_layers
from kvjax.models.rope import cos_sin

State = Any
"""Each layer's keys and values, and the next token."""
local = functools.partial(jax.shard_map, out_specs=SPLIT)


def has_cudnn(model: Decoder) -> bool:
    """Return True if cuDNN's attention can run this model on this machine."""
    return jax.default_backend() == "gpu" and model.dtype == jnp.bfloat16


def dense_prefills(model: Decoder) -> dict[str, Callable]:
    """Return functions by name: prefill(tokens) → each layer's keys and values, and the next token."""

    @local
    def xla(step):
        """Run `jax.nn.dot_product_attention` on one block of queries at a time, since the whole matrix would not
        fit."""
        q, k, v = (rearrange(x, "b n t h -> b t n h") for x in (step.q, step.k, step.v))
        context = q.shape[1]
        rows = math.gcd(1024, context)

        def block(i):
            part = jax.lax.dynamic_slice_in_dim(q, i * rows, rows, 1)
            mask = i * rows + jnp.arange(rows)[:, None] >= jnp.arange(context)
            return jax.nn.dot_product_attention(part, k, v, mask=mask[None, None])

        o = jax.lax.map(block, jnp.arange(context // rows))
        return rearrange(o, "blocks b t n h -> b n (blocks t) h")

    @local
    def cudnn(step):
        q, k, v = (rearrange(x, "b n t h -> b t n h") for x in (step.q, step.k, step.v))
        o = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
        return rearrange(o, "b t n h -> b n t h")

    def prefill(attention, layout, model, tokens):
        def attend(step, _, xs):
            return (
                attention(step),
                None,
                tuple(rearrange(x, f"b k s h -> {layout}") for x in (step.k, step.v)),
            )

        position = jnp.arange(tokens.shape[1])[None]
        x, _, kv, _ = scan_layers(model, model.embed_tokens(tokens), position, attend)
        return kv, jnp.argmax(model.logits(model.norm(x[:, -1:]))[:, 0], -1)

    forms = {"blockwise": (causal_attention, "b k s h"), "dot_product_attention": (xla, "b s k h")}
    if has_cudnn(model):
        forms["cuDNN"] = cudnn, "b s k h"
    return {
        name: functools.partial(jax.jit(functools.partial(prefill, *form)), model)
        for name, form in forms.items()
    }


def layers_of(model: Decoder) -> list[Any]:
    """Return the model's layers with separate weights, since slices of a stack would be copied in every call."""
    return [jax.tree.map(lambda w, i=i: w[i], model.layers) for i in range(model.config.num_layers)]


def dense_decodes(
    model: Decoder, layers: list[Any], batch: int, context: int, new_tokens: int
) -> dict[str, tuple[Callable[[], State], Callable[[State], State]]]:
    """Return pairs of functions by name: make() → state, and decode(state) → state.

    They decode `new_tokens` greedy tokens after `context` random ones, in caches allocated for all of them.
    """
    config, total = model.config, context + new_tokens

    @local
    def einsum(q, k, v, length):
        q = rearrange(q, "b (k g) 1 h -> b k g h", k=config.num_kv_heads)
        s = jnp.einsum("bkgh,bksh->bkgs", q, k, preferred_element_type=jnp.float32) * config.head_dim**-0.5
        p = jax.nn.softmax(jnp.where(jnp.arange(total) < length, s, -1e30), -1).astype(v.dtype)
        return rearrange(jnp.einsum("bkgs,bksh->bkgh", p, v), "b k g h -> b (k g) 1 h")

    @local
    def xla(q, k, v, length):
        q, length = rearrange(q, "b n t h -> b t n h"), jnp.broadcast_to(length, batch)
        o = jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=length)
        return rearrange(o, "b t n h -> b n t h")

    @local
    def cudnn(q, k, v, length):
        q, length = rearrange(q, "b n t h -> b t n h"), jnp.broadcast_to(length, batch)
        attend = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
        o = attend(q, k, v, query_seq_lengths=jnp.ones_like(length), key_value_seq_lengths=length)
        return rearrange(o, "b t n h -> b n t h")

    def decode(attention, layout, model, layers, state):
        axis = layout.split().index("s")

        def step(carry, index):
            caches, token = carry
            x = model.embed_tokens(token[:, None])
            angles = cos_sin(config.rope, config.head_dim, index[None, None])
            new = []
            for block, cached in zip(layers, caches, strict=True):
                projected = block.project(x, angles)
                q, k_new, v_new = (projected[name] for name in ("q", "k", "v"))
                added = (rearrange(x, f"b k s h -> {layout}") for x in (k_new, v_new))
                k, v = (
                    jax.lax.dynamic_update_slice_in_dim(old, add, index, axis)
                    for old, add in zip(cached, added, strict=True)
                )
                new.append((k, v))
                x = block.finish(x, attention(q, k, v, index + 1))
            token = jnp.argmax(model.logits(model.norm(x))[:, 0], -1)
            return (new, token), None

        return jax.lax.scan(step, state, context + jnp.arange(new_tokens))[0]

    def make(layout):
        sizes = {"b": batch, "k": config.num_kv_heads, "s": total, "h": config.head_dim}
        shape = tuple(sizes[axis] for axis in layout.split())
        spec = [{"b": BATCH, "k": HEADS}.get(axis) for axis in layout.split()]
        key, dtype = jax.random.key(0), model.dtype
        caches = [tuple(put(_random(key, shape, dtype), *spec) for _ in "kv") for _ in layers]
        return caches, put(np.zeros(batch, np.int32), BATCH)

    forms = {"einsum": (einsum, "b k s h"), "dot_product_attention": (xla, "b s k h")}
    if has_cudnn(model):
        forms["cuDNN"] = cudnn, "b s k h"
    paths = {}
    for name, form in forms.items():
        run = jax.jit(functools.partial(decode, *form), donate_argnums=2)
        paths[name] = (
            functools.partial(make, form[1]),
            lambda state, run=run: run(model, layers, state),
        )
    return paths


@functools.partial(jax.jit, static_argnums=(1, 2))
def _random(key: Any, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Return an array that repeats about a million normal numbers."""
    size = math.prod(shape)
    part = jax.random.normal(key, (min(size, 1 << 20),), dtype)
    return part[jnp.arange(size, dtype=np.uint32) % part.size].reshape(shape)
