"""The gradient of `mlstm` on TPU, from the last chunk to the first. A chunk's weights and logits are recomputed.

Everything that key j writes is proportional to its value v_j (with a row of ones) times exp(log_i_j), so the gradient
of log_i is v_j·dv_j. Everything that is read from the memory is proportional to the memory times exp(m), so the
gradient of m is the product of the memory and its gradient.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.interpret import tpu_interpret
from pallas_kernels.mlstm.tpu_chunk import (
    CHUNK,
    Form,
    Inputs,
    Specs,
    below_values,
    divisor,
    dot,
    floor,
    gates_of,
)
from pallas_kernels.mlstm.tpu_forward import Read
from pallas_kernels.varying import output


class Gradients(NamedTuple):
    """The kernel's outputs: the gradients of its inputs."""

    q: jax.Array
    """`[r t d]`"""
    k: jax.Array
    """`[r t d]`"""
    v: jax.Array
    """`[r e t]`"""
    gates: jax.Array
    """`[r 2 t]`: the gradients of the first two gates. That of the first lacks its share through m."""
    m: jax.Array
    """`[r n 1 d]`: the gradient of m before each chunk, to be summed over `d`."""
    memory: jax.Array
    """`[r x d]`: the gradient of the memory before the first token."""


def backward(form: Form, inputs: Inputs, read: Read, dh: jax.Array, dmemory: jax.Array) -> Gradients:
    """Return the gradients, given those of h and of the memory after the last token."""
    r, t, d = inputs.q.shape
    e, x, n = inputs.v.shape[1], inputs.memory.shape[1], t // CHUNK
    at = Specs(form, n, backwards=True)
    scalars = functools.partial(at.row, scalars=True)
    shapes = [(r, t, d), (r, t, d), (r, e, t), (r, 2, t), (r, n, 1, d), (r, x, d)]
    gradients = pl.pallas_call(
        functools.partial(_kernel, form),
        grid=(r, at.grid),
        in_specs=[
            *(at.tokens(d), at.tokens(d), at.lanes(e), at.lanes(3), scalars(2, n), scalars(1, n + 1)),
            *(at.lanes(1), at.memories(x, d), at.lanes(e), at.lanes(e), at.row(x, d)),
        ],
        out_specs=[
            *(at.tokens(d), at.tokens(d), at.lanes(e), at.lanes(2)),
            *(at.memories(1, d), at.row(x, d)),
        ],
        out_shape=[output(shape, jnp.float32, inputs.q) for shape in shapes],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        name="mlstm_backward",
        interpret=tpu_interpret(form.interpret),
    )(*inputs[:5], read.m, read.below, read.memories, read.h, dh, dmemory)
    return Gradients(*gradients)


def _kernel(
    form, q_ref, k_ref, v_ref, gates_ref, last_ref, m_ref, below_ref, memories_ref, h_ref, dh_ref, after_ref,
    dq_ref, dk_ref, dv_ref, dgates_ref, dm_ref, dmemory_ref,
):  # fmt: skip
    e, d = v_ref.shape[1], q_ref.shape[2]
    block = pl.program_id(1)

    @pl.when(block == 0)
    def _():
        dmemory_ref[...] = after_ref[...]

    first = (pl.num_programs(1) - 1 - block) * form.chunks
    dmemory = dmemory_ref[0]
    for c in reversed(range(form.chunks)):
        at = pl.ds(c * CHUNK, CHUNK)
        q, k, v = q_ref[0, at], k_ref[0, at], below_values(v_ref[0, :, at], 1.0)
        gates = gates_of(gates_ref[0, :, at], last_ref[0, 1, first + c], m_ref[0, 0, first + c], d)
        dread, ddecay = _read_gradients(form, gates, below_ref[0, :, at], h_ref[0, :, at], dh_ref[0, :, at])
        memory = memories_ref[0, c]

        dx = gates.w * dot(v, dread, (0, 0))  # gradient of the logits
        from_memory = gates.before * dread
        dq_ref[0, at] = dot(dx, k, (0, 0)) + dot(from_memory, memory, (0, 0))
        dk_ref[0, at] = dot(dx, q) + dot(gates.last * v, dmemory, (0, 0))
        p = gates.w * dot(k, q, (1, 1))
        dv = dot(dread, p, (1, 1)) + gates.last * dot(dmemory, k, (1, 1))
        dv_ref[0, :, at] = dv[:e]
        dwritten = jnp.sum(v * dv, axis=0, keepdims=True)
        dgates_ref[0, :, at] = jnp.concatenate([ddecay, dwritten])
        dmemory = gates.kept * dmemory + dot(from_memory, q)
        dm_ref[0, c] = jnp.sum(memory * dmemory, axis=0, keepdims=True)
    dmemory_ref[0] = dmemory


def _read_gradients(form, gates, below, h, dh):
    """Return the gradients of the read values, `[x C]`, and of the decays through xlstm's floor, `[1 C]`."""
    over = divisor(form, below, gates)
    dover = -jnp.sum(dh * h, axis=0, keepdims=True) / over
    if form.normaliser == "plain":
        return below_values(dh / over, dover), jnp.zeros_like(dover)
    unfloored = jnp.abs(below) * form.scale > floor(gates)
    dbelow = jnp.where(unfloored, jnp.sign(below) * form.scale * dover, 0.0)
    floored = ~unfloored & (gates.decay + gates.top > -80.0)
    return below_values(dh * (form.scale / over), dbelow), jnp.where(floored, -floor(gates) * dover, 0.0)
