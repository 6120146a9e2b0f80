"""The op `vertical_slash`: prefill and training attention."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.choose import choose
from pallas_kernels.varying import alike
from pallas_kernels.vertical_slash.reference import reference
from pallas_kernels.vertical_slash.xla import xla

IMPLEMENTATIONS = {"xla": xla, "reference": reference}


def vertical_slash(
    q: Float[Array, "b n t h"],
    k: Float[Array, "b k s h"],
    v: Float[Array, "b k s h"],
    end: Int[Array, "b k s"] | None = None,
    *,
    window: int,
    log_gate: Float[Array, "b k s"] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "b n t h"], Float[Array, "b n t"]]:
    """Causal attention in which every (kv head, key) is visible up to a query of its own.

    The queries are the last `t` of the `s` indices: query `i` has index `I = i + s - t`. It sees key `j` iff
    `j <= I < end[j]`; the logit is `q·k / sqrt(h)`, plus `log_gate[j]` where `I >= j + window` (WG-KV's training
    attention). Query head `x` reads kv head `x // (n / k)`.

    Args:
        q: queries. k, v: keys and values.
        end: for each key the first index that no longer sees it. `end <= j`: no query ever does (padding: then what
            stands in k and v there does not matter). Otherwise at least `j + window`: exactly that for a dropped key,
            and any later value, up to the largest int32, for a kept one. None: causal, nothing ends.
        window: how many indices, its own included, a key is visible to whatever its fate. At least 1.
        log_gate: float32, any value down to -inf. Differentiable, as are q, k and v, when `end` is None.
        implementation: "xla" (work proportional to what is visible) or "reference" (dense); None: the backend's own.

    Returns:
        The output in q's dtype and the log-sum-exp of the logits in float32; 0 and -inf where nothing is visible.

    Raises:
        ValueError: shapes that disagree, window < 1, t > s, an unknown implementation.
    """
    call = choose(IMPLEMENTATIONS, implementation, "vertical_slash")
    _check(q, k, v, end, log_gate, window)
    if log_gate is not None:
        log_gate = log_gate.astype(jnp.float32)
    q, k, v, end, log_gate = alike(q, k, v, end, log_gate)
    return call(q, k, v, end, log_gate, min(window, k.shape[2]))


def _check(q, k, v, end, log_gate, window):
    if window < 1:
        raise ValueError(f"vertical_slash: window is {window}, but a query always sees itself: at least 1")
    b, n, t, h = q.shape
    if k.ndim != 4 or k.shape != v.shape or (k.shape[0], k.shape[3]) != (b, h):
        raise ValueError(
            f"vertical_slash: k {k.shape} and v {v.shape} must both be [b={b} k s h={h}], as q {q.shape}"
        )
    heads, s = k.shape[1:3]
    if n % heads:
        raise ValueError(f"vertical_slash: {n} query heads are not a multiple of {heads} kv heads")
    if t > s:
        raise ValueError(
            f"vertical_slash: {t} queries for {s} keys; the queries are the last of the keys' indices"
        )
    for name, x in (("end", end), ("log_gate", log_gate)):
        if x is not None and x.shape != (b, heads, s):
            raise ValueError(f"vertical_slash: {name} is {x.shape}, but k {k.shape} needs {(b, heads, s)}")
