"""The op `paged_decode`: attention over the paged cache, and writing a decoded token into it."""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Int8, Int32, UInt16

from pallas_kernels.bits import as_bits, as_floats
from pallas_kernels.choose import choose
from pallas_kernels.paged_decode.append import Append
from pallas_kernels.paged_decode.gpu import gpu
from pallas_kernels.paged_decode.hopper import hopper
from pallas_kernels.paged_decode.reference import reference
from pallas_kernels.paged_decode.selection import compact
from pallas_kernels.paged_decode.tpu import tpu
from pallas_kernels.paged_decode.xla import xla
from pallas_kernels.supported import require_whole
from pallas_kernels.varying import alike
from pallas_kernels.vertical_slash import vertical_slash

IMPLEMENTATIONS = {"xla": xla, "tpu": tpu, "gpu": gpu, "hopper": hopper, "reference": reference}


def paged_decode(
    q: Float[Array, "b n t h"],
    pool: Float[Array, "p page 2*h"] | UInt16[Array, "p page 2*h"] | Int8[Array, "p page 2*h"],
    page_table: Int[Array, "b k c"],
    length: Int[Array, "b k"],
    ring_length: Int[Array, " b"] | None = None,
    *,
    ring_pages: int = 0,
    new: tuple[Float[Array, "b k t h"], Float[Array, "b k t h"]] | None = None,
    pages: Bool[Array, "b k global"] | None = None,
    bias: Float[Array, "p page"] | None = None,
    scale: Int32[Array, "p page"] | None = None,
    dtype: DTypeLike | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "b n t h"], Float[Array, "b n t"]]:
    """Compute the attention of `t` new tokens over the pages of each (sequence, kv head).

    The ring pages, columns `[0, ring_pages)` of the table, hold the local window as a ring buffer. The global pages, in
    the columns after them, hold the retained entries. Every query sees the first `ring_length[b]` entries of the ring
    pages, the first `length[b, k]` entries of the global pages, and the tokens of `new` up to its own. Entries and
    columns past a length never affect the result, whatever they hold. A column before it that points outside the pool
    reads the pool's nearest page. Lengths are clipped to their columns.

    Args:
        q: queries; head `x` reads kv head `x // (n / k)`.
        pool: pages of `page` entries, each a key and its value side by side; shared by all rows and layers. On a CPU
            (implementation "xla") 16-bit floats of q's dtype may be given as their bits (`bits.py`). With a `scale` the
            entries are int8 numbers (`int8_entries.py`).
        page_table: the pages of each (sequence, kv head), in order.
        length: the number of entries in its global pages.
        ring_length: the number of entries in the ring pages. None: the ring pages are not read.
        ring_pages: the number of the table's columns that are ring pages.
        new: keys and values of this call's tokens, which are not in the pages yet.
        pages: True for global pages that are read (Quest, Tang et al., 2024). None: all that hold entries.
        bias: a float32 number for every entry of the pool, added to the entry's logit in the global pages. It may be
            as low as -inf; values below -5e29 count as -inf. The ring's entries and `new` have no bias. None: no bias.
            "hopper" takes no bias, and "tpu" takes one only if the page size is a divisor or a multiple of 128. On TPU,
            store a bias of smaller pages flat and reshape it for this call; otherwise XLA copies it at every call.
        scale: the scales of every int8 entry of the pool: two bfloat16 numbers in one int32. On TPU they are stored
            like a bias. "hopper" takes none.
        dtype: the dtype of the output. None: q's. Use float32 if the output is merged with more attention and rounded
            afterwards. "hopper" computes float32 for up to 8 query tokens. For more, and for a table without columns,
            it uses `vertical_slash`, whose "hopper" outputs have 16 bits of mantissa.
        implementation: "xla", "tpu", "gpu" (Triton), "hopper" (Mosaic GPU, bfloat16, head_dim 64, 128 or 256, pages of
            a multiple of 8; as fast as Triton's, and never the default) or "reference" (dense). All but "reference"
            read stored entries only. None: the platform's default.

    Returns:
        The output and the log-sum-exp of the (biased) logits in float32. They are 0 and -inf if nothing is visible or
        every logit is -inf. Without queries both are empty. A table without columns stores nothing.

    Raises:
        ValueError: shapes disagree, there are more ring pages than columns, the pool is empty but the table has
            columns, indices or lengths are not integers, the bias is not float32, int8 numbers have no scales, the
            implementation is unknown, or a kernel does not take the arguments (`supported.py`).
    """
    _check(q, pool, page_table, length, ring_length, ring_pages, new, pages, bias, scale)
    stored = q, pool, page_table, length, ring_length, ring_pages, new, pages, bias, scale
    return _run(*stored, dtype, None, implementation)[:2]


def paged_decode_append(
    q: Float[Array, "b n 1 h"],
    pool: Float[Array, "p page 2*h"] | UInt16[Array, "p page 2*h"] | Int8[Array, "p page 2*h"],
    page_table: Int[Array, "b k c"],
    length: Int[Array, "b k"],
    ring_length: Int[Array, " b"] | None = None,
    *,
    new: tuple[Float[Array, "b k 1 h"], Float[Array, "b k 1 h"]],
    append: Append,
    ring_pages: int = 0,
    pages: Bool[Array, "b k global"] | None = None,
    bias: Float[Array, "p page"] | None = None,
    scale: Int32[Array, "p page"] | None = None,
    implementation: str | None = None,
) -> tuple[
    Float[Array, "b n 1 h"],
    Float[Array, "b n 1"],
    Float[Array, "p page 2*h"] | UInt16[Array, "p page 2*h"] | Int8[Array, "p page 2*h"],
]:
    """Run `paged_decode` for one token, then write the token into the pool. The entry that it replaces may be moved.

    On GPUs and TPUs a kernel writes the pool in place, so that a scan that carries the pool copies nothing.

    Args:
        new: the token's keys and values.
        append: where they are written. Attention reads the pages as they were before. In a pool of int8 numbers they
            are written as `quantised_entries` rounds them; the caller writes their scales.
        q, pool, page_table, length, ring_length, ring_pages, pages, bias, scale, implementation: as in `paged_decode`.

    Returns:
        The output, the log-sum-exp, and the pool with the token in it.

    Raises:
        ValueError: as in `paged_decode`; also if there is more than one token, or if `append` does not have one integer
            for each row.
    """
    _check(q, pool, page_table, length, ring_length, ring_pages, new, pages, bias, scale)
    if q.shape[2] != 1 or any(place.shape != length.shape for place in append):
        raise ValueError(
            f"paged_decode_append: got {q.shape[2]} tokens and places {[place.shape for place in append]}, expected "
            f"one token and places {length.shape}"
        )
    require_whole("paged_decode_append", **append._asdict())
    stored = q, pool, page_table, length, ring_length, ring_pages, new, pages, bias, scale
    return _run(*stored, None, append, implementation)


def _run(
    q, pool, page_table, length, ring_length, ring_pages, new, pages, bias, scale, dtype, append,
    implementation,
):  # fmt: skip
    """Return the output, the log-sum-exp and the pool."""
    call, pool_dtype = choose(IMPLEMENTATIONS, implementation, "paged_decode"), pool.dtype
    dtype = jnp.dtype(q.dtype if dtype is None else dtype)
    if 0 in q.shape[:3] or not page_table.shape[2]:
        return *_nothing_stored(q, new, dtype, implementation), pool
    if call is not xla:
        pool = as_floats(pool, q.dtype)
    page = pool.shape[1]
    length = jnp.clip(length, 0, (page_table.shape[2] - ring_pages) * page)
    if ring_length is not None:
        ring_length = jnp.clip(ring_length, 0, ring_pages * page)
    q, pool, page_table, length, ring_length, new, pages, bias, scale, append = alike(
        q, pool, page_table, length, ring_length, new, pages, bias, scale, append
    )
    if pages is not None and call is not reference:
        page_table, length, pages = *compact(pages, page_table, length, page), None
    options = {} if pages is None else {"pages": pages}
    stored = q, pool, page_table, length, ring_length, ring_pages, new, bias, scale
    o, lse, pool = call(*stored, dtype, append, **options)
    return o, lse, as_bits(pool) if pool.dtype != pool_dtype else pool


def _nothing_stored(q, new, dtype, implementation):
    """Return the output and log-sum-exp if nothing is stored. The tokens of `new`, if given, see each other."""
    if new is not None:
        return vertical_slash(q, *new, window=1, dtype=dtype, implementation=implementation)
    return jnp.zeros_like(q, dtype), jnp.full_like(q[..., 0], -jnp.inf, jnp.float32)


def _check(q, pool, page_table, length, ring_length, ring_pages, new, pages, bias, scale):
    b, n, t, h = q.shape
    heads, columns = page_table.shape[1:]
    if not heads or n % heads:
        raise ValueError(f"paged_decode: {n} query heads are not a multiple of {heads} kv heads")
    if pool.ndim != 3 or pool.shape[2] != 2 * h:
        raise ValueError(f"paged_decode: pool is {pool.shape}, but head_dim {h} needs [pages, page, {2 * h}]")
    if columns and not pool.size:
        raise ValueError(
            f"paged_decode: pool {pool.shape} holds no entry, but page_table has {columns} columns"
        )
    if not 0 <= ring_pages <= columns:
        raise ValueError(f"paged_decode: {ring_pages} ring pages in a page table of {columns} columns")
    if page_table.shape[0] != b or length.shape != (b, heads):
        raise ValueError(
            f"paged_decode: page_table {page_table.shape} and length {length.shape} must be [{b} {heads} c] "
            f"and [{b} {heads}]"
        )
    if ring_length is not None and ring_length.shape != (b,):
        raise ValueError(f"paged_decode: ring_length is {ring_length.shape}, but there are {b} sequences")
    if new is not None and any(x.shape != (b, heads, t, h) for x in new):
        raise ValueError(
            f"paged_decode: new is {[x.shape for x in new]}, but q {q.shape} needs {(b, heads, t, h)}"
        )
    if pages is not None and pages.shape != (b, heads, columns - ring_pages):
        raise ValueError(
            f"paged_decode: pages is {pages.shape}, but the table has {(b, heads, columns - ring_pages)} global pages"
        )
    if bias is not None and (bias.shape != pool.shape[:2] or bias.dtype != jnp.float32):
        raise ValueError(
            f"paged_decode: bias is {bias.dtype} {bias.shape}, but pool {pool.shape} needs float32 {pool.shape[:2]}"
        )
    if (pool.dtype == jnp.int8) != (scale is not None):
        raise ValueError(f"paged_decode: got pool {pool.dtype}, expected a scale if and only if it is int8")
    if scale is not None and (scale.shape != pool.shape[:2] or scale.dtype != jnp.int32):
        raise ValueError(
            f"paged_decode: scale is {scale.dtype} {scale.shape}, but pool {pool.shape} needs int32 {pool.shape[:2]}"
        )
    require_whole("paged_decode", page_table=page_table, length=length, ring_length=ring_length)
