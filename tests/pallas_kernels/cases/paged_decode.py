"""Cases for which the kernels of `paged_decode` are compiled, and a run of the TPU kernel that detects races."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from pallas_kernels.ordering import after
from pallas_kernels.paged_decode import Append, paged_decode, paged_decode_append
from pallas_kernels.paged_decode.append import append_tokens
from pallas_kernels.paged_decode.reference import reference


def arguments(dtype, h, page, *, b=4, k=8, g=4, t=1, columns=64, pages=4096, new=True):
    """Return the shapes of q, pool, page_table, length, ring_length and, if asked for, new."""
    shapes = [
        jax.ShapeDtypeStruct((b, k * g, t, h), dtype),
        jax.ShapeDtypeStruct((pages, page, 2 * h), dtype),
        jax.ShapeDtypeStruct((b, k, columns), jnp.int32),
        jax.ShapeDtypeStruct((b, k), jnp.int32),
        jax.ShapeDtypeStruct((b,), jnp.int32),
    ]
    return (*shapes, (jax.ShapeDtypeStruct((b, k, t, h), dtype),) * 2) if new else tuple(shapes)


def attend(q, pool, table, length, ring_length=None, new=None, pages=None, bias=None, scale=None):
    ring_pages = 0 if ring_length is None else 2
    return paged_decode(
        q,
        pool,
        table,
        length,
        ring_length,
        ring_pages=ring_pages,
        new=new,
        pages=pages,
        bias=bias,
        scale=scale,
    )


def many(q, pool, table, length, ring_length, new, plane):
    """Attend with more tokens than a decode kernel takes."""
    name = "scale" if pool.dtype == jnp.int8 else "bias"
    return attend(q, pool, table, length, ring_length, new, **{name: plane.reshape(pool.shape[:2])})


def on_shards(*args):
    """Run inside `shard_map`, with its axes checked."""
    args = jax.tree.map(lambda x: jax.reshard(x, P("chip", *(None,) * (x.ndim - 1))), args)
    return jax.reshard(jax.shard_map(attend, out_specs=P("chip"))(*args), P())


def scan(q, pool, table, length, ring_length, new, plane=None):
    """Run a decode loop that carries, reads and then writes the pool and, if there is one, the plane of biases or
    scales."""
    page, name = pool.shape[1], "scale" if pool.dtype == jnp.int8 else "bias"

    def step(carry, _):
        q, pool, plane, length = carry
        of_plane = {} if plane is None else {name: plane.reshape(pool.shape[:2])}
        column = jnp.take_along_axis(table, 2 + length[..., None] // page, 2)[..., 0]
        entry = column * page + length % page
        append = Append(table[..., 0] * page + length % page, entry)
        o, lse, pool = paged_decode_append(
            q, pool, table, length, ring_length, ring_pages=2, new=new, append=append, **of_plane
        )
        if plane is not None:
            numbers = lse[:, :: q.shape[1] // table.shape[1], 0]
            plane = plane.at[after(entry, lse)].set(numbers.astype(plane.dtype), mode="drop")
        return (q + o, pool, plane, length + 1), lse

    (_, pool, plane, _), lse = jax.lax.scan(step, (q, pool, plane, length), None, length=8)
    return pool, plane, lse


def biased(q, pool, *rest):
    """Return the shapes with a bias, which is stored flat."""
    return q, pool, *rest, jax.ShapeDtypeStruct((math.prod(pool.shape[:2]),), jnp.float32)


def in_eight_bits(q, pool, *rest):
    """Return the shapes with int8 numbers. Their scales are stored flat."""
    scale = jax.ShapeDtypeStruct((math.prod(pool.shape[:2]),), jnp.int32)
    return q, jax.ShapeDtypeStruct(pool.shape, jnp.int8), *rest, scale


SCANS = {
    "scan, head_dim 128": arguments(jnp.bfloat16, 128, 64, pages=1 << 16),
    "scan, head_dim 64": arguments(jnp.bfloat16, 64, 16, columns=256, pages=1 << 19),
    "scan, biased, head_dim 64": biased(*arguments(jnp.bfloat16, 64, 16, columns=256, pages=1 << 19)),
    "scan, biased, pages of 128": biased(*arguments(jnp.bfloat16, 128, 128, columns=32, pages=1 << 15)),
    "scan, int8": in_eight_bits(*arguments(jnp.bfloat16, 128, 64, pages=1 << 17)),
    "scan, int8, head_dim 64": in_eight_bits(*arguments(jnp.bfloat16, 64, 32, columns=128, pages=1 << 19)),
}
"""The pools have 2 GiB, more than any vector memory, because a copy into vector memory is not counted as a temporary.
Their biases have 32 and 16 MiB."""
COMPILE = {
    "head_dim 32, float32": (attend, arguments(jnp.float32, 32, 8, t=3), ()),
    "head_dim 64, one query head, selected pages": (
        attend,
        (*arguments(jnp.bfloat16, 64, 24, g=1), jax.ShapeDtypeStruct((4, 8, 62), bool)),
        (),
    ),
    "head_dim 96, without ring and new": (
        attend,
        arguments(jnp.bfloat16, 96, 16, new=False)[:4],
        (),
    ),
    "head_dim 128, float32, eight tokens": (attend, arguments(jnp.float32, 128, 128, t=8, g=8), ()),
    "head_dim 256, five rows, long table": (
        attend,
        arguments(jnp.bfloat16, 256, 256, b=1, k=5, columns=49152),
        (),
    ),
    "as many queries and as large pages as are taken": (
        attend,
        arguments(jnp.float32, 256, 128, t=8, g=64, pages=256),
        (),
    ),
    "on shards": (on_shards, arguments(jnp.bfloat16, 128, 16, b=16), ()),
    "many tokens, biased": (
        many,
        biased(*arguments(jnp.bfloat16, 128, 16, b=1, k=2, t=12, pages=1 << 18)),
        (),
    ),
    "many tokens, int8": (
        many,
        in_eight_bits(*arguments(jnp.bfloat16, 128, 32, b=1, k=2, t=12, pages=1 << 18)),
        (),
    ),
    **{name: (scan, args, (1, 6) if len(args) == 7 else (1,)) for name, args in SCANS.items()},
}
MOST_TEMPORARIES = dict.fromkeys(SCANS, 1 << 20) | dict.fromkeys(
    ("many tokens, biased", "many tokens, int8"), 4 << 20
)

BUGS = {
    "biases not awaited": ("pltpu.make_async_copy(rows, rows, sems.at[slot]).wait()", "pass"),
    "pages not awaited": ("pltpu.make_async_copy(pages, pages, page_sems.at[slot]).wait()", "pass"),
    "tables not awaited": ("table_copy(row).wait()", "None"),
    "a block too far ahead": ("(0, SLOTS - 1, fetch", "(0, SLOTS, fetch"),
    "every step begins anew": ("pl.when(step == 0)", "pl.when(step >= 0)"),
    "a table read where another comes": ("begin = ((row - first_row)", "begin = ((row + 1 - first_row)"),
    "a part that is too small": ("(left > part)", "(left > part + 1)"),
    "values behind a page's entries": ("jnp.where(place < stored, x, jnp.zeros_like(x))", "x"),
    "pages not copied read": ("jnp.where(index * block + p < pages, v[p], 0)", "v[p]"),
    "the blocks of a long row one off": ("column_of(row, begin + SLOTS - 1", "column_of(row, begin + SLOTS"),
    "a row's last block taken for a full one": ("steady = blocks - SLOTS", "steady = blocks - SLOTS + 1"),
    "no page of the ring's left out": ("(index > 0) | (stored_first == page)", "(index >= 0)"),
    "entries not awaited": ("each_copy(lambda fetch, put: fetch.wait())", "None"),
    "written entries not awaited": ("each_copy(lambda fetch, put: put.wait())", "None"),
    "another entry than the one that moves": ("at = entry == lax.rem(slot, size)", "at = entry == 0"),
}


def interpreted(kernel, interpret) -> float:
    """Return the worst error for two cores with six rows each, three per step.

    Rows are empty, or have one page, several blocks, or more blocks than slots. There are more rows than tables, and
    one table is full. Blocks are read in part, and the copies that do not overlap with arithmetic are started in groups
    and one by one. Entries that are not stored are NaN. Then a token of each row is written: over an entry that moves,
    over one that is dropped, into a free slot, or nowhere.
    """
    kernel.BLOCK_BYTES, kernel.GROUP, kernel.STEP_ROWS, kernel._cores = 1 << 16, 2, 3, lambda rows: 2
    b, k, h, page, columns, ring_pages = 2, 6, 32, 16, 128, 12
    rng = np.random.default_rng(0)
    length = np.array([[0, 395, 3, 16, 0, 1299], [17, 448, 0, 1856, 1, 140]])
    ring_length = np.array([0, 13])
    stored = np.zeros((b, k, columns * page), bool)
    for row in np.ndindex(b, k):
        stored[row][: ring_length[row[0]]] = True
        stored[row][ring_pages * page : ring_pages * page + length[row]] = True
    table = rng.permutation(b * k * columns).reshape(b, k, columns)
    pool = np.full((b * k * columns, page, 2 * h), np.nan)
    pool[table] = np.where(
        stored.reshape(b, k, columns, page)[..., None], rng.normal(size=(b, k, columns, page, 2 * h)), np.nan
    )
    q, *new = (rng.normal(size=(b, heads, 2, h)) for heads in (2 * k, k, k))
    q, pool, *new = (jnp.asarray(x, jnp.float32) for x in (q, pool, *new))
    bias = np.where(stored.reshape(b, k, columns, page), rng.normal(size=(b, k, columns, page)), np.nan)
    bias[:, :, :ring_pages] = np.nan
    args = (
        q,
        pool,
        *(jnp.asarray(x, jnp.int32) for x in (table, length, ring_length)),
        ring_pages,
        tuple(new),
        jnp.zeros(pool.shape[:2]).at[table].set(bias),
        None,
        q.dtype,
    )
    call = jax.jit(kernel.tpu, static_argnums=(5, 9, 11))
    (*actual, _), (*expected, _) = call(*args, None, interpret), reference(*args)
    entries, nowhere = pool.shape[0] * page, pool.shape[0] * page + 3
    pages = rng.permutation(pool.shape[0])[: 2 * b * k].reshape(2, b, k)
    places = pages * page + rng.integers(page, size=pages.shape)
    places[1, 0, :2], places[:, 1, 3] = nowhere, entries
    append, token = Append(*jnp.asarray(places, jnp.int32)), tuple(x[:, :, :1] for x in new)
    pool = jnp.nan_to_num(pool)
    actual.append(jax.jit(kernel.append_tokens, static_argnums=4)(pool, append, token, actual[1], interpret))
    expected.append(append_tokens(pool, append, token, expected[1]))
    return max(
        float(np.abs(np.asarray(x) - np.asarray(y)).max()) for x, y in zip(actual, expected, strict=True)
    )
