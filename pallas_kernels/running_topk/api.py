"""The op `running_topk`: the k best of the keys that have left the window, at every index."""

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

CPU, measured on two cores, eight rows of 8192 and of 32768 keys, k an eighteenth: xla 13 and 58 ms, counts 31 and 286.
TPU, not timed: counts is dense arithmetic, where the Fenwick tree takes a chain of scalar steps for each key that
matters when it comes, and xla gathers and scatters single numbers.
GPU, measured on an H100, eight rows of 8192, 32768 and 131072 keys, k an eighteenth: xla 0.17, 0.24 and 0.78 ms, counts
as it was, without sorts, 0.09, 0.78 and 6.3, the Fenwick tree, which waits for memory at every key, 8, 38 and 163.
"""

FOREVER = jnp.iinfo(jnp.int32).max


def ranks(scores: Float[Array, "*b s"]) -> Int[Array, "*b s"]:
    """The rank of each score among those of its row: 0 the highest, of equal ones the first, NaN after all others."""
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
    """The threshold rank at every query, and for every key the index at which it is out.

    Key `j` competes from index `j + window` on, when it has left the window. A query at index `I` sees those competing
    keys whose rank is at most `tau_I`, the rank of the k-th best of them. As `tau` never rises, what is out stays out,
    and `j <= I < end_j` says the same. The queries are the last `t` of the `s` indices: query `i` has index
    `I = i + s - t`.

    KVPOP, App. C; Fenwick, "A new data structure for cumulative frequency tables" (1994).

    Args:
        rank: int32, in each row a permutation of 0 to s - 1, 0 the best; `ranks` makes it from scores.
        k: how many stay, at least 0; more than there are: all of them.
        window: at least 1.
        queries: t; None: s.
        competes: the keys that take part; None: all.
        implementation: "xla" (descends a wavelet tree), "counts" (counts in two levels, in XLA too), "tpu" or "gpu" (a
            Fenwick tree in a kernel), "reference" (sorts for every query); None: the fastest here, `FASTEST`.

    Returns:
        tau: int32; s where fewer than k keys compete yet, and -1 where k is 0.
        end: int32; at least `j + window` and, of the queries' indices, the first one that does not see the key. The
            largest int32 where there is none, and for keys that do not compete.

    Raises:
        ValueError: a rank that is not int32, a k that is no integer, shapes that disagree, k < 0, window < 1, more
            queries than keys, an unknown implementation.
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
    # Sorting numbers takes a TPU less time than gathering or scattering them one by one.
    seen = _seen_by_sorting if call in (counts, tpu) else _seen_by_counting
    return tau, _end(seen(rank, tau), competes, window, t)


def _end(seen, competes, window, t):
    """The queries that see a key are the first ones: `seen` says how many."""
    s = seen.shape[2]
    end = jnp.maximum(jnp.arange(s, dtype=jnp.int32) + window, s - t + seen)
    return jnp.where(competes & (end < s), end, FOREVER)


def _seen_by_counting(rank, tau):
    """How many queries see each key: those of a threshold at or above its rank."""
    b, heads, s = rank.shape
    row = jnp.ogrid[:b, :heads, :1][:2]
    count = jnp.zeros_like(rank, shape=(b, heads, s + 2)).at[(*row, tau + 1)].add(1)
    seen = jax.lax.cumsum(count, 2, reverse=True)
    return seen.at[(*row, rank + 1)].get(mode="promise_in_bounds")


def _seen_by_sorting(rank, tau):
    """The same: keys and thresholds in one order, the keys then back in their own."""
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
