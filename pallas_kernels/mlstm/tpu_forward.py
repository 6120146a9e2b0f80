"""`mlstm` forward on TPU."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.interpret import tpu_interpret
from pallas_kernels.mlstm.tpu_chunk import CHUNK, Form, Inputs, Specs, below_values, divisor, dot, gates_of
from pallas_kernels.varying import output


class Read(NamedTuple):
    """The kernel's outputs."""

    h: jax.Array
    """`[r e t]`"""
    m: jax.Array
    """`[r 1 n+1]`: the m before each chunk and after the last chunk."""
    memory: jax.Array
    """`[r x d]`: the memory after the last token."""
    below: jax.Array | None = None
    """`[r 1 t]`: the values read from the row of ones. Only for the gradient, as are `memories`."""
    memories: jax.Array | None = None
    """`[r n x d]`: the memory before each chunk."""


def forward(form: Form, inputs: Inputs, save: bool) -> Read:
    """Run the forward kernel. With `save` the result also has the arrays that the gradient needs."""
    r, t, d = inputs.q.shape
    e, x, n = inputs.v.shape[1], inputs.memory.shape[1], t // CHUNK
    at = Specs(form, n)
    scalars = functools.partial(at.row, scalars=True)
    shapes = [(r, e, t), (r, 1, n + 1), (r, x, d), (r, 1, t), (r, n, x, d)]
    specs = [at.lanes(e), scalars(1, n + 1), at.row(x, d), at.lanes(1), at.memories(x, d)]
    count = 5 if save else 3
    outputs = pl.pallas_call(
        functools.partial(_kernel, form),
        grid=(r, at.grid),
        in_specs=[
            *(at.tokens(d), at.tokens(d), at.lanes(e), at.lanes(3)),
            *(scalars(2, n), scalars(1, 1), at.row(x, d)),
        ],
        out_specs=specs[:count],
        out_shape=[output(shape, jnp.float32, inputs.q) for shape in shapes[:count]],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        name="mlstm_forward",
        interpret=tpu_interpret(form.interpret),
    )(*inputs)
    return Read(*outputs)


def _kernel(
    form, q_ref, k_ref, v_ref, gates_ref, last_ref, m0_ref, memory0_ref, h_ref, m_ref, memory_ref, *saved
):
    e, d = v_ref.shape[1], q_ref.shape[2]
    block = pl.program_id(1)

    @pl.when(block == 0)
    def _():
        m_ref[0, 0, 0] = m0_ref[0, 0, 0]
        memory_ref[...] = memory0_ref[...]

    first = block * form.chunks
    m, memory = m_ref[0, 0, first], memory_ref[0]
    for c in range(form.chunks):
        at = pl.ds(c * CHUNK, CHUNK)
        q, k, v = q_ref[0, at], k_ref[0, at], below_values(v_ref[0, :, at], 1.0)
        decay, highest = (last_ref[0, i, first + c] for i in (0, 1))
        gates = gates_of(gates_ref[0, :, at], highest, m, d)
        read = dot(v, gates.w * dot(k, q, (1, 1))) + gates.before * dot(memory, q, (1, 1))
        below = read[e : e + 1]
        h_ref[0, :, at] = read[:e] * (form.scale / divisor(form, below, gates))
        if saved:
            below_ref, memories_ref = saved
            below_ref[0, :, at] = below
            memories_ref[0, c] = memory
        memory = gates.kept * memory + dot(gates.last * v, k)
        m = decay + jnp.maximum(m, highest)
        m_ref[0, 0, first + c + 1] = m
    memory_ref[0] = memory
