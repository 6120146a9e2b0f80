"""Cases for which the kernels of `running_topk` are compiled, and a run of the TPU kernel that detects races."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from pallas_kernels.choose import target
from pallas_kernels.running_topk import running_topk
from pallas_kernels.running_topk.reference import reference


def topk(rank, **options):
    """Run the platform's kernel, whatever the platform's default is."""
    return running_topk(rank, window=64, implementation=target().platform, **options)


def argument(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def on_shards(rank, k):
    """Run inside `shard_map`, with its axes checked."""
    rank, k = (jax.reshard(x, P("chip")) for x in (rank, k))
    call = jax.shard_map(lambda rank, k: topk(rank, k=k), out_specs=P("chip"))
    return jax.tree.map(lambda x: jax.reshard(x, P()), call(rank, k))


COMPILE = {
    "8192 keys": (lambda rank: topk(rank, k=444), (argument(1, 8, 8192),), ()),
    "the longest": (lambda rank: topk(rank, k=1980), (argument(1, 1, 1 << 17),), ()),
    "a chunk's queries, no multiple of a block": (
        lambda rank, k: topk(rank, k=k, queries=1000),
        (argument(2, 2, 9001), argument(2, 2)),
        (),
    ),
    "on shards": (on_shards, (argument(2, 2, 1000), argument(2, 2)), ()),
    "in XLA": (
        functools.partial(running_topk, k=1980, window=64),
        (argument(1, 2, 1 << 13),),
        (),
    ),
}
MOST_TEMPORARIES = {"8192 keys": 4 << 20}
"""Arrays of one number per key take a quarter of a MB; all pairs of keys would take 256 MB."""
LONG = {
    "1048576 keys in counts": (
        functools.partial(running_topk, k=1980, window=64, implementation="counts"),
        (argument(1, 8, 1 << 20),),
        (),
    )
}
MOST_OF_LONG = {"1048576 keys in counts": 32 * 8 << 20}
"""This is 32 bytes per key. The counts of blocks of queries are carried; as a table they would take 3 GB."""

BUGS = {
    "trees not emptied": ("tree_ref[x] = 0", "pass"),
    "the threshold of the row before": ("jnp.where(k > 0, s, -1)", "jnp.where(i + row > 0, state_ref[0], s)"),
    "last query of a block left out": (
        "jnp.minimum(block, s - i * block)",
        "jnp.minimum(block - 1, s - i * block)",
    ),
    "a key too few": ("count < left", "count <= left"),
}


def interpreted(kernel, interpret) -> float:
    """Return the worst error. There are several blocks, the last of which is partly filled, rows of different k, and
    keys that do not compete."""
    kernel.BLOCK = 32
    b, heads, s, window, t = 1, 4, 100, 7, 90
    rng = np.random.default_rng(0)
    rank = jnp.asarray(np.stack([rng.permutation(s) for _ in range(heads)])[None], jnp.int32)
    competes = jnp.asarray(rng.random((b, heads, s)) < 0.8)
    k = jnp.array([[0, 1, 20, 200]])
    call = jax.jit(functools.partial(kernel.tpu, interpret=interpret), static_argnums=(3, 4))
    actual = call(rank, k, competes, window, t)
    return float(jnp.abs(actual - reference(rank, k, competes, window, t)).max())
