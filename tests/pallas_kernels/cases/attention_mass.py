"""Cases for which the kernels of `attention_mass` are compiled, and a run of the TPU kernel that detects races."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from pallas_kernels.attention_mass import attention_mass, paged_attention_mass
from pallas_kernels.attention_mass.reference import reference

Shape = jax.ShapeDtypeStruct


def case(b, n, k, t, s, h, dtype, *, over="logsumexp", group="max", offset: Any = 0, lse=False, valid=False):
    def call(q, k, lse, valid):
        return attention_mass(q, k, over=over, group=group, offset=offset, lse=lse, valid=valid)

    return (
        call,
        (
            Shape((b, n, t, h), dtype),
            Shape((b, k, s, h), dtype),
            Shape((b, n, t), jnp.float32) if lse else None,
            Shape((b, k, s), jnp.bool_) if valid else None,
        ),
        (),
    )


def on_shards(*args):
    """Run inside `shard_map`, with its axes checked."""
    args = jax.tree.map(lambda x: jax.reshard(x, P("chip", *(None,) * (x.ndim - 1))), args)
    call, _, _ = case(2, 8, 2, 512, 512, 128, jnp.bfloat16)
    return jax.reshard(jax.shard_map(call, out_specs=P("chip"))(*args), P())


def pages(head_dim, pool):
    """Return a case of 1024 entries of two kv heads, in a pool of `pool` pages."""
    return (
        paged,
        (
            Shape((1, 8, 16, head_dim), jnp.bfloat16),
            Shape((pool, 16, 2 * head_dim), jnp.bfloat16),
            Shape((1, 2, 64), jnp.int32),
            Shape((1, 2), jnp.int32),
        ),
        (),
    )


def paged(q, pool, table, length):
    return paged_attention_mass(q, pool, table, length, over="sum", group="sum")


COMPILE = {
    "head_dim 32, seven heads, float32": case(1, 7, 1, 600, 1000, 32, jnp.float32),
    "head_dim 64, an observation window": case(
        1, 32, 8, 32, 32768, 64, jnp.bfloat16, valid=True, over="sum", group="mean"
    ),
    "head_dim 96, 37 queries of a cache": case(
        2, 4, 4, 37, 1000, 96, jnp.bfloat16, offset=None, over="max", valid=True
    ),
    "head_dim 128, KVPOP's target": case(1, 8, 2, 8192, 8192, 128, jnp.bfloat16, offset=64, lse=True),
    "head_dim 256, float32, KVzip's score": case(
        1, 4, 2, 700, 3000, 256, jnp.float32, over="max", valid=True
    ),
    "on shards": (on_shards, case(2, 8, 2, 512, 512, 128, jnp.bfloat16)[1], ()),
    "pages, head_dim 64": pages(64, 1 << 19),
    "pages, head_dim 128": pages(128, 1 << 18),
    "71 query heads of one": case(1, 71, 1, 256, 1024, 64, jnp.bfloat16),
}
MOST_TEMPORARIES = {
    "head_dim 128, KVPOP's target": 20 << 20,
    "pages, head_dim 64": 16 << 20,
    "pages, head_dim 128": 16 << 20,
}
"""Temporaries hold a copy of the queries (16 MB, on a GPU) and each query head's masses; all logits would be 2 GB. The
pools have 2 GB, more than any vector memory, where temporaries are not counted; 1 MB of them is copied."""

BUGS = {
    "sums not emptied": ("l_ref[...] = jnp.zeros_like(l_ref)", "pass"),
    "one tile too few": ("jnp.minimum(start + j, stop - 1)", "jnp.minimum(start + j, stop - 2)"),
    "a tile's edge not masked": ("(tile >= whole_start) & ", ""),
    "the first head's bias for all": ("column_ref[0, x + y]", "column_ref[0, y]"),
}


def interpreted(kernel, interpret) -> float:
    """Return the worst error. There are several resident and streamed tiles, the last of which are partly filled, two
    heads, processed one at a time, and keys that do not exist."""
    kernel.tile_sizes = lambda *_: (128, 128)
    kernel.CHUNK = 128
    b, n, k, t, s, h = 1, 2, 1, 300, 330, 32
    rng = np.random.default_rng(0)
    q, key = (jnp.asarray(rng.normal(size=x), jnp.float32) for x in ((b, n, t, h), (b, k, s, h)))
    valid = jnp.asarray(rng.random((b, k, s)) < 0.8)
    rest = valid, None, None, None, "logsumexp", "max", 0
    expected = reference(q, key, *rest)
    call = jax.jit(functools.partial(kernel.tpu, interpret=interpret), static_argnums=(6, 7, 8))
    actual = call(q, jnp.where(valid[..., None], key, jnp.nan), *rest)
    return float(jnp.abs(jnp.exp(actual) - jnp.exp(expected)).max())
