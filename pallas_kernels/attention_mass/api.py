"""The op `attention_mass`: the attention that every key receives from the queries."""

from typing import Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Int8, Int32, UInt16

from pallas_kernels.attention_mass.gpu import gpu
from pallas_kernels.attention_mass.reference import reference
from pallas_kernels.attention_mass.tpu import tpu
from pallas_kernels.attention_mass.xla import xla
from pallas_kernels.bits import as_floats
from pallas_kernels.choose import choose
from pallas_kernels.int8_entries import dequantised_entries
from pallas_kernels.supported import require_whole
from pallas_kernels.varying import alike

IMPLEMENTATIONS = {"xla": xla, "reference": reference, "tpu": tpu, "gpu": gpu}

Over = Literal["logsumexp", "max", "sum"]
Group = Literal["max", "mean", "sum"]


def attention_mass(
    q: Float[Array, "b n t h"],
    k: Float[Array, "b k s h"],
    *,
    over: Over,
    group: Group,
    offset: int | None = 0,
    valid: Bool[Array, "b k s"] | None = None,
    lse: Float[Array, "b n t"] | None = None,
    query_factor: Float[Array, "b n t"] | None = None,
    key_factor: Float[Array, "b n s"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "b k s"]:
    """Return the attention `p_ij = exp(q_i·k_j / sqrt(h) - lse_i)` that each key receives, reduced to one number.

    It is first reduced `over` the queries that count the key, then over the query heads of the key's `group`. The
    queries are the last `t` of the `s` indices: query `i` has index `I = i + s - t` and counts key `j` iff
    `I >= j + offset`. Query head `x` reads kv head `x // (n / k)`. The gradient is zero.

    This serves KVPOP's target (App. D: "logsumexp" and "max", offset = window, lse of the sparse pass), KVzip's score
    (eq. 2 and 3: "max" and "max", `valid` for the chunk and the keys that may share its softmax), KVzip+'s (the same
    with factors 1/‖h_i‖ of the queries and ‖W_O v_j‖ of the keys), the observation windows of SnapKV and of OracleKV
    (eq. 2), and H2O's statistic ("sum" and "mean").

    Args:
        over: "sum" of p over the queries, its logarithm ("logsumexp"), or the largest p ("max").
        group: "max", "mean" or "sum" of these over the group. It reduces probabilities, not their logarithms, so that
            "logsumexp" is the logarithm of "sum" for every group.
        offset: the distance, at least 0, from a key's index to that of the first query that counts it. None: every
            query counts every key.
        valid: True for keys that exist; the contents of the others do not matter. None: all exist.
        lse: each query's log-sum-exp, possibly over other keys than these, so that p may exceed 1. A query with -inf
            adds nothing. None: it is computed over the valid keys that the query counts; the offset must then be 0 or
            None.
        query_factor: positive factors of each query's p. None: 1.
        key_factor: non-negative factors of the reduced value of each query head and key. None: 1.
        implementation: "xla", "tpu" or "gpu" (blocks of queries and keys, in one pass, or two if lse is not given), or
            "reference" (dense). None: the platform's default.

    Returns:
        The mass in float32. It is 0 (-inf for "logsumexp") for keys that are not valid or that no query counts.

    Raises:
        ValueError: shapes disagree, t > s with an offset, the offset is negative or, without lse, positive; over, group
            or implementation is unknown; or a kernel does not take the dtype, head_dim or group of query heads.
    """
    call = choose(IMPLEMENTATIONS, implementation, "attention_mass")
    _check(q, k, over, group, offset, valid, lse, query_factor, key_factor)
    arrays = q, k, valid, lse, query_factor, key_factor
    q, k, valid, lse, query_factor, key_factor = alike(*map(_constant, arrays))
    if 0 in q.shape[:3] or not k.shape[2]:
        return jnp.full_like(k[..., 0], -jnp.inf if over == "logsumexp" else 0, jnp.float32)
    return call(q, k, valid, lse, query_factor, key_factor, over, group, offset)


def paged_attention_mass(
    q: Float[Array, "b n t h"],
    pool: Float[Array, "p page 2*h"] | UInt16[Array, "p page 2*h"] | Int8[Array, "p page 2*h"],
    page_table: Int[Array, "b k c"],
    length: Int[Array, "b k"],
    *,
    over: Over,
    group: Group,
    lse: Float[Array, "b n t"] | None = None,
    scale: Int32[Array, "p page"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "b k c*page"]:
    """Return the `attention_mass` of the keys stored in pages. Every query counts all keys (offset None).

    Args:
        pool: pages of `page` entries, each a key and its value side by side. 16-bit floats in q's dtype may be given as
            their bits, and int8 numbers with a `scale`.
        page_table: the pages of each (sequence, kv head), in order.
        length: the number of entries they hold. Entries past it and table entries beyond the pool do not matter.
        scale: the scales of each entry of the pool (`int8_entries.py`).
        over, group, lse, implementation: as in `attention_mass`.

    Returns:
        The mass of every entry of the pages. It is 0 (-inf for "logsumexp") past the length.

    Raises:
        ValueError: as in `attention_mass`; also if the pool does not fit the queries, if it is empty but the table has
            columns, or if indices or lengths are not integers.
    """
    b, heads, columns = page_table.shape
    h = q.shape[3]
    if pool.ndim != 3 or pool.shape[2] != 2 * h:
        raise ValueError(
            f"paged_attention_mass: pool is {pool.shape}, but head_dim {h} needs [pages, page, {2 * h}]"
        )
    if length.shape != (b, heads):
        raise ValueError(f"paged_attention_mass: length is {length.shape}, but page_table {page_table.shape}")
    if columns and not pool.size:
        raise ValueError(
            f"paged_attention_mass: pool {pool.shape} holds no entry, but page_table has {columns} columns"
        )
    if (pool.dtype == jnp.int8) != (scale is not None):
        raise ValueError(
            f"paged_attention_mass: got pool {pool.dtype}, expected a scale if and only if it is int8"
        )
    require_whole("paged_attention_mass", page_table=page_table, length=length)
    pool, page_table, length, scale = alike(pool, page_table, length, scale)
    s = columns * pool.shape[1]
    # The keys are copied once and read twice. Whole pages are gathered and the values cut off afterwards. If the slice
    # came first, XLA would copy half of the pool.
    entries = pool.at[page_table].get(mode="clip") if columns else pool[:0]
    if scale is not None and columns:
        entries = dequantised_entries(entries, scale.at[page_table].get(mode="clip"), q.dtype)
    k = as_floats(entries.reshape(b, heads, s, 2 * h)[..., :h], q.dtype)
    valid = jnp.arange(s) < length[..., None]
    return attention_mass(
        q, k, over=over, group=group, offset=None, valid=valid, lse=lse, implementation=implementation
    )


def _constant(x):
    return None if x is None else lax.stop_gradient(x)


def _check(q, k, over, group, offset, valid, lse, query_factor, key_factor):
    for name, value, allowed in (
        ("over", over, ("logsumexp", "max", "sum")),
        ("group", group, ("max", "mean", "sum")),
    ):
        if value not in allowed:
            raise ValueError(f"attention_mass: {name} is {value!r}, but must be one of {', '.join(allowed)}")
    b, n, t, h = q.shape
    if k.ndim != 4 or (k.shape[0], k.shape[3]) != (b, h) or k.dtype != q.dtype:
        raise ValueError(
            f"attention_mass: k {k.dtype}{k.shape} must be {q.dtype}[b={b} k s h={h}], as q {q.shape}"
        )
    heads, s = k.shape[1:3]
    if not heads or n % heads:
        raise ValueError(f"attention_mass: {n} query heads are not a multiple of {heads} kv heads")
    if offset is not None and t > s:
        raise ValueError(
            f"attention_mass: {t} queries for {s} keys; the queries are the last of the keys' indices"
        )
    if offset is not None and offset < 0:
        raise ValueError(f"attention_mass: offset is {offset}, but must be at least 0")
    if offset and lse is None:
        raise ValueError(
            f"attention_mass: offset {offset} needs lse, which is computed for offset 0 or None only"
        )
    shapes = {
        "valid": (valid, (b, heads, s)),
        "lse": (lse, (b, n, t)),
        "query_factor": (query_factor, (b, n, t)),
        "key_factor": (key_factor, (b, n, s)),
    }
    for name, (x, shape) in shapes.items():
        if x is not None and x.shape != shape:
            raise ValueError(
                f"attention_mass: {name} is {x.shape}, but q {q.shape} and k {k.shape} need {shape}"
            )
