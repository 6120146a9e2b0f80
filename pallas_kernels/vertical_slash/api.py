"""The op `vertical_slash`: prefill and training attention."""

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.choose import choose
from pallas_kernels.supported import require_whole
from pallas_kernels.varying import alike
from pallas_kernels.vertical_slash.gpu import gpu
from pallas_kernels.vertical_slash.gpu_backward import gpu_backward
from pallas_kernels.vertical_slash.hopper import hopper, takes
from pallas_kernels.vertical_slash.key_lists import FOREVER
from pallas_kernels.vertical_slash.reference import reference
from pallas_kernels.vertical_slash.tpu import tpu
from pallas_kernels.vertical_slash.tpu_backward import tpu_backward
from pallas_kernels.vertical_slash.vjp import Passes
from pallas_kernels.vertical_slash.xla import xla
from pallas_kernels.vertical_slash.xla_walk import xla_backward

IMPLEMENTATIONS = {
    "xla": Passes(xla, xla_backward),
    "tpu": Passes(tpu, tpu_backward),
    "gpu": Passes(gpu, gpu_backward),
    "hopper": Passes(hopper, gpu_backward),
    "reference": reference,
}


def vertical_slash(
    q: Float[Array, "b n t h"],
    k: Float[Array, "b k s h"],
    v: Float[Array, "b k s h"],
    end: Int[Array, "b k s"] | None = None,
    *,
    window: int,
    log_gate: Float[Array, "b k s"] | None = None,
    segment_ids: Int[Array, "b s"] | None = None,
    dtype: DTypeLike | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "b n t h"], Float[Array, "b n t"]]:
    """Compute causal attention in which each key of each kv head is visible up to an index of its own.

    The queries are the last `t` of the `s` indices: query `i` has index `I = i + s - t`. It sees key `j` iff
    `j <= I < end[j]`. The logit is `q·k / sqrt(h)`, plus `log_gate[j]` if `I >= j + window` (WG-KV's training
    attention). Query head `x` reads kv head `x // (n / k)`. The op is differentiable in q, k, v and log_gate.

    Args:
        q: queries.
        k, v: keys and values.
        end: the first index that no longer sees each key: `j + window` for a dropped key, and any later value, up to
            the largest int32, for a retained key. If `end <= j`, no query ever sees the key, and its k and v may hold
            anything (padding). None: plain causal attention. `ends` makes it from a mask of admitted keys.
        window: the number of indices, its own included, to which a key is visible even if it is dropped; at least 1.
        log_gate: float32, any value down to -inf.
        segment_ids: the document of each index, if several documents are packed into one sequence. Queries see only
            keys of their own document, whose indices must be contiguous.
        dtype: the dtype of the output. None: q's. Use float32 if the output is merged with more attention and rounded
            afterwards; "hopper" gives 16 of its 24 bits.
        implementation: "xla" (the default on a CPU), "tpu", "gpu" (Triton), "hopper" (Mosaic GPU, forward, bfloat16 and
            head_dim 64, 128 or 256) or "reference" (dense). None: the platform's default, which on an H100 or
            H200 is "hopper" if it takes q.

    Returns:
        The output and the log-sum-exp of the logits in float32. They are 0 and -inf if nothing is visible. Without
        queries both are empty.

    Raises:
        ValueError: shapes disagree, window < 1, t > s, `end` or segment_ids are not integers, the implementation is
            unknown, or a kernel does not take the dtype, head_dim or group of query heads.
    """
    dtype = jnp.dtype(q.dtype if dtype is None else dtype)
    if implementation is None and takes(q):
        implementation = "hopper"
    call = choose(IMPLEMENTATIONS, implementation, "vertical_slash")
    _check(q, k, v, end, log_gate, segment_ids, window)
    if segment_ids is not None:
        segment_end = jnp.broadcast_to(_segment_end(segment_ids)[:, None], k.shape[:3])
        end = segment_end if end is None else jnp.minimum(end, segment_end)
    if end is not None:
        # Kernels subtract a block's first index from `end`. With negative values that could wrap around.
        end = jnp.clip(end, 0, min(FOREVER, jnp.iinfo(end.dtype).max)).astype(jnp.int32)
    if log_gate is not None:
        log_gate = log_gate.astype(jnp.float32)
    q, k, v, end, log_gate = alike(q, k, v, end, log_gate)
    if 0 in q.shape[:3]:
        return jnp.zeros_like(q, dtype), jnp.zeros_like(q[..., 0], jnp.float32)
    return call(q, k, v, end, log_gate, min(window, k.shape[2]), dtype)


def ends(admitted: Bool[Array, "b k s"], window: int) -> Int[Array, "b k s"]:
    """Return the `end` of keys. Admitted keys stay for good, and others for the window.

    Raises:
        ValueError: window < 1.
    """
    _check_window("ends", window)
    s = admitted.shape[2]
    # A window beyond the last index is equivalent to one of s, which cannot overflow.
    dropped = jnp.arange(s, dtype=jnp.int32) + min(window, s)
    return jnp.where(admitted, FOREVER, dropped)


def _segment_end(segment_ids):
    """Return the end of each index's document: the index after its last one."""
    s = segment_ids.shape[1]
    last = jnp.concatenate(
        [segment_ids[:, 1:] != segment_ids[:, :-1], jnp.ones_like(segment_ids[:, :1], bool)], 1
    )
    stop = jnp.where(last, jnp.arange(1, s + 1), FOREVER)
    return lax.cummin(stop, axis=1, reverse=True)


def _check_window(op, window):
    if window < 1:
        raise ValueError(f"{op}: window is {window}, but a query always sees itself: at least 1")


def _check(q, k, v, end, log_gate, segment_ids, window):
    _check_window("vertical_slash", window)
    b, n, t, h = q.shape
    if k.ndim != 4 or k.shape != v.shape or (k.shape[0], k.shape[3]) != (b, h):
        raise ValueError(
            f"vertical_slash: k {k.shape} and v {v.shape} must both be [b={b} k s h={h}], as q {q.shape}"
        )
    heads, s = k.shape[1:3]
    if not heads or n % heads:
        raise ValueError(f"vertical_slash: {n} query heads are not a multiple of {heads} kv heads")
    if t > s:
        raise ValueError(
            f"vertical_slash: {t} queries for {s} keys; the queries are the last of the keys' indices"
        )
    for name, x in (("end", end), ("log_gate", log_gate)):
        if x is not None and x.shape != (b, heads, s):
            raise ValueError(f"vertical_slash: {name} is {x.shape}, but k {k.shape} needs {(b, heads, s)}")
    if segment_ids is not None and segment_ids.shape != (b, s):
        raise ValueError(
            f"vertical_slash: segment_ids is {segment_ids.shape}, but k {k.shape} needs {(b, s)}"
        )
    require_whole("vertical_slash", end=end, segment_ids=segment_ids)
