"""The op `mlstm`: a linear attention with input and forget gates."""

from typing import Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.choose import choose
from pallas_kernels.mlstm.reference import reference
from pallas_kernels.mlstm.tpu import tpu
from pallas_kernels.mlstm.tpu_chunk import CHUNK
from pallas_kernels.mlstm.xla import xla
from pallas_kernels.varying import alike

IMPLEMENTATIONS = {"xla": xla, "reference": reference, "tpu": tpu}
FASTEST = {"cpu": "xla", "tpu": "tpu", "gpu": "xla"}
"""The default of each backend for at least `CHUNK` tokens. For fewer tokens it is "xla" everywhere.

The TPU's default has not been timed. The kernel keeps a chunk's matrices in vector memory, while "xla" writes each
to HBM.
"""

Normaliser = Literal["plain", "xlstm"]


class Memory(NamedTuple):
    """The memory of the tokens so far, in float32.

    A token with input gate log_i and the decays log_f after it has weight `exp(log_i + Σ log_f - m)` in both sums.
    """

    c: Float[Array, "b k d e"]
    """The weighted sum of outer products k vᵀ."""
    z: Float[Array, "b k d"]
    """The weighted sum of keys k."""
    m: Float[Array, "b k"]
    """The logarithm of the largest weight, by which both sums are divided. -inf: there have been no tokens."""


def empty_memory(batch: int, kv_heads: int, keys: int, values: int) -> Memory:
    """Return the memory before the first token, for keys and values of these widths."""
    c = jnp.zeros((batch, kv_heads, keys, values), jnp.float32)
    return Memory(c, c[..., 0], jnp.full((batch, kv_heads), -jnp.inf, jnp.float32))


def mlstm(
    q: Float[Array, "b k t d"],
    k: Float[Array, "b k t d"],
    v: Float[Array, "b k t e"],
    log_i: Float[Array, "b k t"],
    log_f: Float[Array, "b k t"],
    memory: Memory | None = None,
    *,
    normaliser: Normaliser = "plain",
    chunk: int | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "b k t e"], Memory]:
    """Return the output of every query, and the memory after the last token.

    A token is written with weight `exp(log_i)`, and everything written before it decays by `exp(log_f)`. So query t
    gives token j ≤ t the weight `w_tj = exp(log_i_j + Σ_{j < x ≤ t} log_f_x)`, and its output is

        plain: h_t = Σ_j w_tj (q_t·k_j) v_j / Σ_j w_tj (q_t·k_j)    (plus 1e-6 below, with w scaled to at most 1)
        xlstm: h_t = Σ_j w_tj (q_t·k_j) v_j / √d / (max(|Σ_j w_tj (q_t·k_j)| / √d, 1) + 1e-6)

    Everything is computed in float32. Padding with log_i = -inf and log_f = 0 has no effect. The op is differentiable
    in all arguments.

    mLSTM: Beck et al., "xLSTM" (arXiv:2405.04517), eq. 19 to 27; chunkwise: "xLSTM 7B" (arXiv:2503.13427), App. The
    plain normaliser is for non-negative keys and queries, such as those of KVPOP's scorer.

    Args:
        memory: the memory of the tokens before these. None: there are no earlier tokens.
        chunk: tokens of a chunk. They see each other as in attention, and earlier tokens through the memory. The
            result differs by rounding only; 1 is the recurrent form, t the parallel form. None: the implementation's
            default, the only one that "tpu" takes.
        implementation: "xla", "tpu" (a kernel for float32 keys and values of at most 512 numbers) or "reference" (all
            pairs at once). None: the platform's default (`FASTEST`).

    Raises:
        ValueError: shapes disagree, the chunk is below 1, or the normaliser or implementation is unknown.
    """
    if implementation is None and q.shape[2] < CHUNK:
        implementation = "xla"
    call = choose(IMPLEMENTATIONS, implementation, "mlstm", FASTEST)
    _check(q, k, v, log_i, log_f, memory, normaliser, chunk)
    b, heads, _, d = q.shape
    before = empty_memory(b, heads, d, v.shape[3]) if memory is None else memory
    exact = jnp.promote_types(q.dtype, jnp.float32)
    inputs = tuple(x.astype(exact) for x in (q, k, v, log_i, log_f))
    inputs, before = alike(inputs, before)
    if not q.size:
        return inputs[2], before
    return call(*inputs, before, normaliser, chunk)


def _check(q, k, v, log_i, log_f, memory, normaliser, chunk):
    if normaliser not in ("plain", "xlstm"):
        raise ValueError(f"mlstm: normaliser is {normaliser!r}, but must be plain or xlstm")
    if chunk is not None and chunk < 1:
        raise ValueError(f"mlstm: chunk is {chunk}, but must be at least 1")
    b, heads, t, d = q.shape
    e = v.shape[-1]
    expected = {
        "k": (k, (b, heads, t, d)), "v": (v, (b, heads, t, e)),
        "log_i": (log_i, (b, heads, t)), "log_f": (log_f, (b, heads, t)),
    }  # fmt: skip
    if memory is not None:
        shapes = (b, heads, d, e), (b, heads, d), (b, heads)
        expected |= {
            f"memory.{name}": pair for name, *pair in zip(Memory._fields, memory, shapes, strict=True)
        }
    for name, (x, shape) in expected.items():
        if x.shape != shape:
            raise ValueError(f"mlstm: {name} is {x.shape}, but q {q.shape} and v {v.shape} need {shape}")
