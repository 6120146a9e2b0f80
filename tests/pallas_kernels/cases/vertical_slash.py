"""Cases for which `vertical_slash` is compiled for chips that are not here, and the bugs planted in the TPU kernel."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from pallas_kernels.vertical_slash import tpu_gather, vertical_slash
from pallas_kernels.vertical_slash.reference import reference


def shapes(n, k, t, s, h, dtype, ending=False, gated=False):
    """Return the shapes of q, k, v, end and log_gate. end is None unless `ending`, and log_gate unless `gated`."""
    array = jax.ShapeDtypeStruct
    q, kv = array((1, n, t, h), dtype), array((1, k, s, h), dtype)
    end = array((1, k, s), jnp.int32) if ending else None
    return q, kv, kv, end, array((1, k, s), jnp.float32) if gated else None


def attend(q, k, v, end, log_gate, window=256):
    return vertical_slash(q, k, v, end, window=window, log_gate=log_gate)


def gradient(q, k, v, end, log_gate):
    def loss(q, k, v, log_gate):
        o, lse = attend(q, k, v, end, log_gate)
        return jnp.sum(o.astype(jnp.float32)) + jnp.sum(lse)

    return jax.grad(loss, (0, 1, 2) if log_gate is None else (0, 1, 2, 3))(q, k, v, log_gate)


def on_a_mesh(q, k, v, end, log_gate):
    return jax.shard_map(attend, in_specs=P(), out_specs=P())(q, k, v, end, log_gate)


COMPILE = {
    "prefill": (attend, shapes(8, 2, 4096, 4096, 128, jnp.bfloat16, ending=True), ()),
    "prefill of 131072": (attend, shapes(32, 8, 1 << 17, 1 << 17, 128, jnp.bfloat16, ending=True), ()),
    "chunk, group of 7, head_dim 32, 131072 keys": (
        attend,
        shapes(7, 1, 512, 131072, 32, jnp.bfloat16, ending=True),
        (),
    ),
    "float32, head_dim 64, odd lengths": (
        attend,
        shapes(8, 8, 1000, 1100, 64, jnp.float32, ending=True, gated=True),
        (),
    ),
    "head_dim 96": (on_a_mesh, shapes(4, 1, 300, 300, 96, jnp.bfloat16, ending=True), ()),
    "training": (gradient, shapes(8, 2, 4096, 4096, 128, jnp.bfloat16, gated=True), ()),
    "training, float32, head_dim 256, ends": (
        gradient,
        shapes(4, 2, 512, 512, 256, jnp.float32, ending=True),
        (),
    ),
}
LONG = {
    "prefill of 400000": (attend, shapes(32, 8, 400_000, 400_000, 128, jnp.bfloat16, ending=True), ()),
    "prefill of 1048576": (attend, shapes(32, 8, 1 << 20, 1 << 20, 128, jnp.bfloat16, ending=True), ()),
}
"""Each of these cases is compiled in its own process."""
MOST_TEMPORARIES = {"prefill": 16 << 20, "prefill of 131072": 200 << 20, "training": 32 << 20}
"""All logits of a head would take 64 MiB at 4096 tokens. Keys and values of 131,072 tokens take 512 MiB."""
MOST_OF_LONG = {"prefill of 400000": 610 << 20, "prefill of 1048576": 1600 << 20}
"""The bytes per token are those of the prefill of 131072."""

BUGS = {
    "a copy not waited for": ("            copies(block, j, slot, lambda copy: copy.wait())\n", ""),
    "the next tile into the same buffer": ("copies(i, j_next, 1 - slot,", "copies(i, j_next, slot,"),
    "a window of one more": (
        "return jnp.where((index >= start) & (index < stop)",
        "return jnp.where((index >= start) & (index <= stop)",
    ),
    "a tile too far": ("return (table[0, i] + j - band_tiles(i)) * bk", "return (table[0, i] + j) * bk"),
    "another row's last tile": ("bring(tail, row, slice(None))", "bring(tail, 0, slice(None))"),
    "padding in the band": ("pl.when(table[3, block] > 0)(lambda: clean(slot))", "pass"),
    "padding in the far list": ("entries = jnp.where(chosen, ", "entries = jnp.where(True, "),
    "the band of the first heads": ("each(band, row_ref[0], band_start(i)", "each(band, 0, band_start(i)"),
    "a full block of seen keys not written": ("full = filled(", "full = -1 + filled("),
    "the rest of the seen keys not moved": (
        "            staged[:block] = staged[block : 2 * block]\n",
        "",
    ),
}


def interpreted(kernel, interpret) -> float:
    """Return the worst error of a case that makes every kind of copy.

    The last tile of a band is a padded copy. Far tiles have a mask, have none, or are skipped since their keys have
    ended. There are four rows, two at a time, and two whole blocks of queries, since the interpreter writes no partial
    blocks into a given array. The first seen keys fill blocks exactly, and later ones continue in the next block.
    """
    n, k, t, s, h, window = 16, 4, 512, 1500, 32, 300
    rng = np.random.default_rng(0)
    q, key, value = (
        jnp.asarray(rng.normal(size=x), jnp.float32) for x in ((1, n, t, h), (1, k, s, h), (1, k, s, h))
    )
    place = np.arange(s)
    end = np.where((rng.random((1, k, s)) < 0.9) & (place > 600), 1 << 30, place + window)
    end = np.where(place < 600, 1210, end)
    padding = (place > 600) & (rng.random((1, k, s)) < 0.01)
    end = jnp.asarray(np.where(padding, place, end), jnp.int32)
    key, value = (jnp.where(padding[..., None], jnp.nan, x) for x in (key, value))
    arguments = q, key, value, end, None, window, q.dtype
    tpu_gather.SMALL = value.nbytes
    actual, expected = kernel.tpu(*arguments, interpret=interpret), reference(*arguments)
    # NumPy's maximum propagates NaN.
    return float(np.max([np.abs(x - np.asarray(y)).max() for x, y in zip(actual, expected, strict=True)]))
