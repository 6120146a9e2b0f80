"""`mlstm` on TPU: chunk after chunk of each (sequence, kv head), with its memory kept on chip.

tpu_chunk: the definitions that both kernels share. tpu_forward, tpu_backward: the kernels.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.mlstm.tpu_backward import backward
from pallas_kernels.mlstm.tpu_chunk import CHUNK, SUBLANES, Form, Inputs
from pallas_kernels.mlstm.tpu_forward import forward
from pallas_kernels.supported import require

LANES = 128
BLOCK = 8
"""The most chunks that are on chip together, so that their products overlap. Wide keys and values allow fewer."""
WIDEST = 512
"""The most numbers in a key or a value."""


def tpu(q, k, v, log_i, log_f, memory: Any, normaliser, chunk, interpret: Any = None):
    b, heads, t, d = q.shape
    e = v.shape[3]
    require(
        "mlstm",
        "tpu",
        (q.dtype == jnp.float32, f"float32, not {q.dtype}"),
        (chunk in (None, CHUNK), f"chunks of {CHUNK} tokens, not {chunk}"),
        (max(d, e) <= WIDEST, f"keys and values of at most {WIDEST} numbers, not {d} and {e}"),
    )
    wide, tall = _up(d, LANES), _up(e, SUBLANES)
    block = _block(t, max(1, BLOCK * LANES**2 // (wide * max(tall, LANES))))
    form = Form(normaliser, 1.0 if normaliser == "plain" else d**-0.5, block, interpret)
    pad = functools.partial(_pad, tokens=_up(t, block) - t)
    q, k = (pad(x.reshape(-1, t, d), wide=wide - d) for x in (q, k))
    v = pad(v.reshape(-1, t, e), wide=tall - e)
    log_i = pad(log_i.reshape(-1, t, 1), fill=-jnp.inf)[..., 0]
    log_f = pad(log_f.reshape(-1, t, 1))[..., 0]
    c, z, m = (x.reshape(b * heads, *x.shape[2:]) for x in memory)
    c = jnp.concatenate([_pad(c, 0, tall - e), _pad(z[..., None], 0, SUBLANES - 1)], 2)
    outputs: Any = _mlstm(form, q, k, v, log_i, log_f, _pad(c, wide - d).swapaxes(1, 2), m)
    h, after, m = outputs
    after = after.swapaxes(1, 2).reshape(b, heads, wide, -1)[:, :, :d]
    h = h.reshape(b, heads, *h.shape[1:])[:, :, :t, :e]
    return h, type(memory)(after[..., :e], after[..., tall], m.reshape(b, heads))


def _block(t: int, most: int) -> int:
    """Return the tokens of a block, if `t` tokens are cut into equal blocks of at most `most` chunks."""
    chunks = -(-t // CHUNK)
    return CHUNK * -(-chunks // -(-chunks // most))


def _up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple


def _pad(x, tokens, wide=0, fill=0.0):
    return jnp.pad(x, ((0, 0), (0, tokens), (0, wide)), constant_values=fill)


def _inputs(q, k, v, log_i, log_f, memory, m) -> Inputs:
    """Prepare the inputs from q and k `[r t d]`, v `[r t e]`, log gates `[r t]`, memory `[r x d]` and m `[r]`."""
    r, t = log_i.shape
    chunks = r, t // CHUNK, CHUNK
    decay = jnp.cumsum(log_f.reshape(chunks), 2)
    written = log_i.reshape(chunks) - decay
    top = lax.cummax(written, axis=2)
    gates = jnp.stack([decay, written, top], 1)
    return Inputs(
        q, k, v.swapaxes(1, 2), gates.reshape(r, 3, t), gates[:, ::2, :, -1], m[:, None, None], memory
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mlstm(form, *arguments):
    return _result(forward(form, _inputs(*arguments), save=False))


def _result(read):
    return read.h.swapaxes(1, 2), read.memory, read.m[:, 0, -1]


def _forward(form, *arguments):
    inputs = _inputs(*arguments)
    read = forward(form, inputs, save=True)
    return _result(read), (inputs, read)


def _backward(form, saved, cotangents):
    inputs, read = saved
    dh, dmemory, dm = cotangents
    gradients = backward(form, inputs, read, dh.swapaxes(1, 2), dmemory)
    r, t = gradients.gates.shape[::2]
    from_later = jnp.sum(gradients.m, (2, 3))
    dm = jnp.where(jnp.isneginf(read.m[:, 0, -1]), 0.0, dm)
    ddecay, dwritten = gradients.gates[:, 0], gradients.gates[:, 1]
    ddecay = (ddecay - dwritten).reshape(r, -1, CHUNK)
    # A chunk's m is the m before it plus the chunk's total decay.
    ddecay = ddecay.at[..., -1].add(jnp.concatenate([from_later[:, 1:], dm[:, None]], 1))
    dlog_f = lax.cumsum(ddecay, axis=2, reverse=True).reshape(r, t)
    return (
        gradients.q,
        gradients.k,
        gradients.v.swapaxes(1, 2),
        dwritten,
        dlog_f,
        gradients.memory,
        from_later[:, 0],
    )


_mlstm.defvjp(_forward, _backward)
