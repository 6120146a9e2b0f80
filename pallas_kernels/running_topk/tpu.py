"""`running_topk` on TPU: a Fenwick tree in scalar memory, for one (sequence, kv head) after another."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.interpret import tpu_interpret
from pallas_kernels.running_topk.fenwick import entries, levels
from pallas_kernels.varying import output

KEYS = 1 << 17
"""The most keys. Their tree takes half of the scalar memory."""
BLOCK = 4096
"""Queries that are in scalar memory at a time."""


def tpu(rank, k, competes, window, t, interpret: Any = None):
    b, heads, s = rank.shape
    if s > KEYS:
        raise ValueError(
            f"running_topk: implementation 'tpu' takes at most {KEYS} keys, not {s}; implementation='xla' takes any"
        )
    block = min(BLOCK, s)
    rows = b * heads
    blocks = pl.BlockSpec((1, 1, block), lambda row, i: (row, 0, i), memory_space=pltpu.SMEM)
    tau = pl.pallas_call(
        _kernel,
        grid=(rows, pl.cdiv(s, block)),
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), blocks],
        out_specs=blocks,
        out_shape=output((rows, 1, s), jnp.int32, rank),
        scratch_shapes=[pltpu.SMEM((s + 1,), jnp.int32), pltpu.SMEM((2,), jnp.int32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary", "arbitrary")),
        name="running_topk",
        interpret=tpu_interpret(interpret),
    )(k.reshape(rows), entries(rank, competes, window)[:, None])
    return tau.reshape(b, heads, s)[..., s - t :]


def _kernel(k_ref, entry_ref, tau_ref, tree_ref, state_ref):
    """`entry_ref` and `tau_ref` [1 1 block]; scratch: the tree [s + 1], the threshold and the number of keys [2]."""
    s = tree_ref.shape[0] - 1
    row, i = pl.program_id(0), pl.program_id(1)
    k = k_ref[row]
    block = entry_ref.shape[2]

    @pl.when(i == 0)
    def _():
        state_ref[0] = jnp.where(k > 0, s, -1)
        state_ref[1] = 0

        def clear(x, _):
            tree_ref[x] = 0

        lax.fori_loop(0, s + 1, clear, None)

    def insert(rank):
        def node(x):
            tree_ref[x] += 1
            return x + (x & -x)

        lax.while_loop(lambda x: x <= s, node, rank + 1)

    def kth():
        """Return the largest x such that fewer than k of the ranks are below x."""

        def descend(level, carry):
            x, left = carry
            node = x + (1 << (levels(s) - 1 - level))
            count = tree_ref[jnp.minimum(node, s)]
            take = (node <= s) & (count < left)
            return jnp.where(take, node, x), jnp.where(take, left - count, left)

        return lax.fori_loop(0, levels(s), descend, (jnp.int32(0), k))[0]

    def query(j, carry):
        tau, keys = carry
        rank = entry_ref[0, 0, j]

        def add():
            insert(rank)
            return jax.lax.cond(keys + 1 >= k, kth, lambda: tau), keys + 1

        tau, keys = lax.cond(rank < tau, add, lambda: (tau, keys))
        tau_ref[0, 0, j] = tau
        return tau, keys

    # The last block may extend past the last query.
    last = jnp.minimum(block, s - i * block)
    state_ref[0], state_ref[1] = lax.fori_loop(0, last, query, (state_ref[0], state_ref[1]))
