"""The op `running_topk`: at every index, the k best of the keys that have left the window."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.choose import choose
from pallas_kernels.running_topk.counts import counts
from pallas_kernels.running_topk.gpu import gpu
from pallas_kernels.running_topk.reference import reference
from pallas_kernels.running_topk.tpu import tpu
from pallas_kernels.running_topk.xla import xla
from pallas_kernels.supported import require_whole
from pallas_kernels.varying import alike

IMPLEMENTATIONS = {"xla": xla, "counts": counts, "reference": reference, "tpu": tpu, "gpu": gpu}

FASTEST = {"cpu": "xla", "tpu": "counts", "gpu": "xla"}
"""The default of each backend.

CPU, two cores, eight rows of 8192 and 32768 keys, k = s / 18: xla takes 13 and 58 ms, counts 31 and 286 ms.
TPU, not timed: counts is dense arithmetic, while the Fenwick tree takes a chain of scalar steps for each key below the
threshold, and xla gathers and scatters single numbers.
GPU, H100, eight rows of 8192, 32768 and 131072 keys, k = s / 18: xla takes 0.17, 0.24 and 0.78 ms, an earlier counts
without sorts 0.09, 0.78 and 6.3 ms, and the Fenwick tree, which waits for memory at every key, 8, 38 and 163 ms.
"""

FOREVER = jnp.iinfo(jnp.int32).max


def ranks(scores: Float[Array, "*b s"]) -> Int[Array, "*b s"]:
    """Return each score's rank in its row: 0 for the highest. Of equal scores the first ranks first; NaN ranks last."""
    order = jnp.argsort(-scores, axis=-1, stable=True)
    return jnp.argsort(order, axis=-1).astype(jnp.int32)


def running_topk(
    rank: Int[Array, "b k s"],
    *,
    k: int | Int[Array, ""] | Int[Array, "b k"],
    window: int,
    queries: int | None = None,
    competes: Bool[Array, "b k s"] | None = None,
    implementation: str | None = None,
) -> tuple[Int[Array, "b k t"], Int[Array, "b k s"]]:
    """Return the threshold rank at every query, and for every key the index at which it is dropped.

    Key `j` competes from index `j + window` on, when it has left the window. A query at index `I` sees the competing
    keys whose rank is at most `tau_I`, the rank of the k-th best of them. Since `tau` never rises, a dropped key stays
    dropped, and the query sees the key iff `j <= I < end_j`. The queries are the last `t` of the `s` indices: query `i`
    has index `I = i + s - t`.

    KVPOP, App. C; Fenwick, "A new data structure for cumulative frequency tables" (1994).

    Args:
        rank: int32, in each row a permutation of 0 to s - 1, 0 the best; `ranks` makes it from scores.
        k: the number of keys that stay, at least 0. If there are no more than k keys, all of them stay.
        window: the size of the local window in tokens, at least 1.
        queries: the number of queries, t. None: s.
        competes: True for keys that compete. None: all keys do.
        implementation: "xla" (descends a wavelet tree), "counts" (counts in two levels, in XLA too), "tpu" or "gpu" (a
            Fenwick tree in a kernel) or "reference" (sorts for every query). None: the platform's default (`FASTEST`).

    Returns:
        tau: int32; s while fewer than k keys compete, and -1 if k is 0.
        end: int32; the first index of a query that does not see the key, at least `j + window`. It is the largest int32
            if there is no such query, and for keys that do not compete.

    Raises:
        ValueError: rank is not int32, k is not an integer, shapes disagree, k < 0, window < 1, there are more queries
            than keys, or the implementation is unknown.
    """
    call = choose(IMPLEMENTATIONS, implementation, "running_topk", FASTEST)
    _check(rank, k, window, queries, competes)
    b, heads, s = rank.shape
    t = s if queries is None else queries
    if not rank.size:
        return rank[..., s - t :], rank
    window = min(window, s)
    k = jnp.broadcast_to(jnp.asarray(k, jnp.int32), (b, heads))
    if competes is None:
        competes = jnp.ones_like(rank, bool)
    rank, k, competes = alike(rank, k, competes)
    tau = call(rank, k, competes, window, t)
    # A TPU sorts numbers faster than it gathers or scatters them one by one.
    seen = _seen_by_sorting if call in (counts, tpu) else _seen_by_counting
    return tau, _end(seen(rank, tau), competes, window, t)


def _end(seen, competes, window, t):
    """Return the end of each key, which the first `seen` queries see."""
    s = seen.shape[2]
    end = jnp.maximum(jnp.arange(s, dtype=jnp.int32) + window, s - t + seen)
    return jnp.where(competes & (end < s), end, FOREVER)


def _seen_by_counting(rank, tau):
    """Return the number of queries that see each key: those whose threshold is at or above its rank."""
    b, heads, s = rank.shape
    row = jnp.ogrid[:b, :heads, :1][:2]
    count = jnp.zeros_like(rank, shape=(b, heads, s + 2)).at[(*row, tau + 1)].add(1)
    seen = jax.lax.cumsum(count, 2, reverse=True)
    return seen.at[(*row, rank + 1)].get(mode="promise_in_bounds")


def _seen_by_sorting(rank, tau):
    """Do the same as `_seen_by_counting`: sort keys and thresholds together, then the keys back to their order."""
    s, t = rank.shape[2], tau.shape[2]
    order = jnp.concatenate([2 * rank, 2 * tau + 1], 2)
    key = jnp.broadcast_to(jnp.minimum(jnp.arange(s + t, dtype=jnp.int32), s), order.shape)
    order, key = jax.lax.sort((order, key), num_keys=1, is_stable=False)
    seen = t - jnp.cumsum(order & 1, 2, dtype=jnp.int32)
    return jax.lax.sort((key, seen), num_keys=1, is_stable=False)[1][..., :s]


def _check(rank, k, window, queries, competes):
    if rank.ndim != 3:
        raise ValueError(f"running_topk: rank is {rank.shape}, not [b k s]")
    b, heads, s = rank.shape
    if rank.dtype != jnp.int32:
        raise ValueError(f"running_topk: rank is {rank.dtype}, not int32")
    if isinstance(k, int):
        if k < 0:
            raise ValueError(f"running_topk: k is {k}, but must be at least 0")
    else:
        require_whole("running_topk", k=k)
    if not isinstance(k, int) and k.shape not in ((), (b, heads)):
        raise ValueError(f"running_topk: k is {k.shape}, but must be one number or {(b, heads)}")
    if window < 1:
        raise ValueError(f"running_topk: window is {window}, but must be at least 1")
    if queries is not None and not 1 <= queries <= s:
        raise ValueError(
            f"running_topk: {queries} queries for {s} keys; the queries are the last of the keys' indices"
        )
    if competes is not None and competes.shape != rank.shape:
        raise ValueError(f"running_topk: competes is {competes.shape}, but rank is {rank.shape}")
