"""The op `mlstm`: a linear attention whose tokens are weighed by gates and forgotten."""

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
"""The default of each backend, for tokens of at least a chunk of the kernel's; for fewer XLA's form on all of them.

TPU, not timed: the kernel keeps a chunk's matrices in vector memory, where XLA's form writes each to HBM.
"""

Normaliser = Literal["plain", "xlstm"]


class Memory(NamedTuple):
    """What is left of the tokens so far, in float32: of a token i with decays f after it `exp(log_i + Σ log_f - m)` of
    its outer product k vᵀ and of its key k."""

    c: Float[Array, "b k d e"]
    """The sum of outer products."""
    z: Float[Array, "b k d"]
    """The sum of keys."""
    m: Float[Array, "b k"]
    """The logarithm that both are over: of the largest weight; -inf: there was no token."""


def empty_memory(batch: int, kv_heads: int, keys: int, values: int) -> Memory:
    """The memory before the first token, of keys and values of these widths."""
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
    """What every query reads of the tokens up to its own, and the memory after the last one.

    A token is written with weight `exp(log_i)`, and all that was written before it decays by `exp(log_f)`. So query t
    gives token j ≤ t the weight `w_tj = exp(log_i_j + Σ_{j < x ≤ t} log_f_x)`, and reads

        plain: h_t = Σ_j w_tj (q_t·k_j) v_j / Σ_j w_tj (q_t·k_j)    (with 1e-6 where w is at most 1)
        xlstm: h_t = Σ_j w_tj (q_t·k_j) v_j / √d / (max(|Σ_j w_tj (q_t·k_j)| / √d, 1) + 1e-6)

    All in float32. For padding give log_i = -inf and log_f = 0: it leaves no trace. Differentiable in all arguments.

    mLSTM: Beck et al., "xLSTM" (arXiv:2405.04517), eq. 19 to 27; chunkwise: "xLSTM 7B" (arXiv:2503.13427), App. The
    plain normaliser is for keys and queries that are not negative, as of KVPOP's scorer.

    Args:
        memory: of the tokens before these; None: there are none.
        chunk: tokens that see each other as in attention, those before them through the memory. Its size does not
            change the result but for rounding: 1 is the recurrent form, t the parallel one. None: the implementation's
            own; "tpu" takes no other.
        implementation: "xla", "tpu" (a kernel: float32, keys and values of at most 512 numbers), "reference" (all pairs
            at once); None: the fastest here, `FASTEST`.

    Raises:
        ValueError: shapes that disagree, a chunk below 1, an unknown normaliser or implementation.
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
    wanted = {
        "k": (k, (b, heads, t, d)), "v": (v, (b, heads, t, e)),
        "log_i": (log_i, (b, heads, t)), "log_f": (log_f, (b, heads, t)),
    }  # fmt: skip
    if memory is not None:
        shapes = (b, heads, d, e), (b, heads, d), (b, heads)
        wanted |= {f"memory.{name}": own for name, *own in zip(Memory._fields, memory, shapes, strict=True)}
    for name, (x, shape) in wanted.items():
        if x.shape != shape:
            raise ValueError(f"mlstm: {name} is {x.shape}, but q {q.shape} and v {v.shape} need {shape}")
