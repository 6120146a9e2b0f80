"""What is measured where: every size stands here."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp


@dataclass(frozen=True)
class Setting:
    """The heads are those of one layer, the contexts in tokens."""

    implementation: str
    """Of the ops: what is timed."""
    beside: tuple[str, ...]
    """Other implementations that prefill and decoding are timed with, as rivals."""
    checked: tuple[str, ...]
    """Implementations that are checked before, where there is no hardware for them in an interpreter."""
    dense: str
    """The dense rival: "cudnn", or "blocks", XLA's a block of queries at a time."""
    torch: bool
    """Whether torch's rivals are measured too, where it is installed."""
    dtype: Any
    """Of q, k and v."""
    n: int
    """Query heads."""
    k: int
    """kv heads."""
    h: int
    """Head dim."""
    window: int
    """Last tokens that are always seen."""
    page: int
    """Entries of a page."""
    prefill: tuple[int, ...]
    """Contexts of the forward pass."""
    kept: tuple[float, ...]
    """Shares of the keys that are kept for good."""
    training: tuple[int, ...]
    """Contexts of the forward and backward pass."""
    decode: tuple[tuple[int, int], ...]
    """Batch and context."""
    mass: tuple[int, ...]
    """Contexts of which all queries are counted."""
    observation: tuple[int, ...]
    """Contexts of which the last `OBSERVED` queries are counted."""
    topk: tuple[int, ...]
    """Lengths of the running top-k."""
    mlstm: tuple[int, ...]
    """Tokens of an mLSTM's sequence, forward and backward."""
    mask: int
    """Longest context whose mask torch gets in full."""
    logits: int
    """Most bytes of logits that a rival may hold."""
    inner: int
    """Runs of a short op inside one program, so that starting programs is not what is measured."""
    copied: int
    """Bytes of the array whose copy is the bound of what reads memory."""
    matmul: int
    """Width of the square matrices whose product is the bound of what computes."""
    batch: float
    """Seconds that one timing takes at least, by repetition."""
    seconds: float
    """About how long the timings of one job take."""
    limit: float
    """Seconds after which no job begins."""


OBSERVED = 32

GPU = Setting(
    implementation="gpu",
    beside=(),
    checked=("gpu", "hopper", "counts", "xla"),
    dense="cudnn",
    torch=True,
    dtype=jnp.bfloat16,
    n=32,
    k=8,
    h=128,
    window=256,
    page=64,
    prefill=(32768, 8192, 131072, 262144),
    kept=(0.05, 0.25, 1.0),
    training=(8192, 32768),
    decode=((1, 32768), (16, 32768), (1, 262144), (16, 131072), (1, 8192), (16, 8192), (16, 262144)),
    mass=(8192, 32768),
    observation=(32768, 131072),
    topk=(8192, 32768, 131072),
    mlstm=(8192, 32768),
    mask=8192,
    logits=1 << 34,
    inner=32,
    copied=1 << 32,
    matmul=8192,
    batch=0.02,
    seconds=3.0,
    limit=420.0,
)
"""One layer of Llama-3.1-8B or Qwen3-4B. What matters most comes first, since no job begins after the limit."""

CPU = Setting(
    implementation="xla",
    beside=(),
    checked=("xla", "counts", "tpu", "gpu"),
    dense="blocks",
    torch=True,
    dtype=jnp.float32,
    n=8,
    k=2,
    h=64,
    window=256,
    page=64,
    prefill=(4096, 16384),
    kept=(0.05, 0.25, 1.0),
    training=(2048,),
    decode=((1, 16384), (4, 16384)),
    mass=(4096,),
    observation=(16384,),
    topk=(8192,),
    mlstm=(4096, 8192, 16384),
    mask=0,
    logits=1 << 30,
    inner=1,
    copied=1 << 28,
    matmul=1024,
    batch=0.0,
    seconds=10.0,
    limit=600.0,
)
"""One layer of a small model, on a few cores."""
