"""`running_topk` on GPU, in Triton: each (sequence, kv head) has a Fenwick tree in global memory and one warp.

The rank of a key determines the nodes that count it, so the lanes of the warp update them together.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.interpret import gpu_interpret
from pallas_kernels.running_topk.fenwick import entries, levels
from pallas_kernels.varying import output

LANES = 32


def gpu(rank, k, competes, window, t, interpret: bool | None = None):
    b, heads, s = rank.shape
    rows = b * heads
    entry = entries(rank, competes, window)
    interpret = gpu_interpret(interpret)
    # The interpreter has no barriers and needs none.
    barrier = _no_barrier if interpret else plt.debug_barrier
    tau, _ = pl.pallas_call(
        functools.partial(_kernel, s=s, barrier=barrier),
        grid=(rows,),
        out_shape=[output((rows, s), jnp.int32, rank), output((rows, s + 1), jnp.int32, rank)],
        input_output_aliases={2: 1},
        compiler_params=plt.CompilerParams(num_warps=1, num_stages=1),
        name="running_topk",
        interpret=interpret,
    )(k.reshape(rows), entry, jnp.zeros_like(entry, shape=(rows, s + 1)))
    return tau.reshape(b, heads, s)[..., s - t :]


def _no_barrier():
    pass


def _kernel(k_ref, entry_ref, _, tau_ref, tree_ref, *, s, barrier):
    """`entry_ref` and `tau_ref` [rows s], `tree_ref` [rows s + 1]."""
    row = pl.program_id(0)
    k = plt.load(k_ref.at[row])

    def insert(rank):
        level = jnp.arange(LANES)
        odd = (rank >> level) + 1
        node = odd << level
        counts_rank = (level < levels(s)) & (odd % 2 == 1) & (node <= s)
        nodes = tree_ref.at[row, jnp.where(counts_rank, node, s + 1)]
        plt.store(nodes, plt.load(nodes, mask=counts_rank, other=0, volatile=True) + 1, mask=counts_rank)
        barrier()

    def kth():
        """Return the largest x such that fewer than k of the ranks are below x."""

        def descend(level, carry):
            x, remaining = carry
            node = x + (1 << (levels(s) - 1 - level))
            count = plt.load(tree_ref.at[row, node], mask=node <= s, other=s + 1, volatile=True)
            take = count < remaining
            return jnp.where(take, node, x), jnp.where(take, remaining - count, remaining)

        return lax.fori_loop(0, levels(s), descend, (jnp.int32(0), k))[0]

    def query(i, carry):
        tau, keys = carry
        rank = plt.load(entry_ref.at[row, i])

        def add():
            insert(rank)
            return lax.cond(keys + 1 >= k, kth, lambda: tau), keys + 1

        tau, keys = lax.cond(rank < tau, add, lambda: (tau, keys))
        plt.store(tau_ref.at[row, i], tau)
        return tau, keys

    lax.fori_loop(0, s, query, (jnp.where(k > 0, jnp.int32(s), jnp.int32(-1)), jnp.int32(0)))
