"""`paged_decode` of many query tokens, as in chunked prefill, by `vertical_slash` over copies of the stored entries.

Arithmetic outweighs memory traffic here, so copying the entries in order costs little. A few pages are copied at a
time, since a row may have many more columns than entries. The output is carried in float32 and rounded once: in
bfloat16, the last entries of a long context would add less than half a unit in the last place and be lost.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax

from pallas_kernels.int8_entries import dequantised_entries
from pallas_kernels.paged_decode.append import append_tokens
from pallas_kernels.paged_decode.plane import gather_pages, gather_pages_by_lanes
from pallas_kernels.softmax import MASKED, merge
from pallas_kernels.vertical_slash import vertical_slash
from pallas_kernels.vertical_slash.key_lists import FOREVER, Keys, by_row

TOKENS = 8
"""The most query tokens that the decode kernels take."""
ENTRIES = 4096, 32768
"""The least and the most entries of a row that are copied at a time. Each copy merges the whole output once more."""
COPIED = 1 << 27
"""Bytes of entries of all rows that are copied at a time, within the limits of `ENTRIES`."""


def attend_many(
    attend: Callable,
    name: str,
    q,
    pool,
    page_table,
    length,
    ring_length,
    ring_pages,
    new,
    bias,
    scale,
    dtype,
    append,
):
    """Run the op with `attend`, the function of the `vertical_slash` implementation called `name`."""
    b, heads, columns = page_table.shape
    page, h = pool.shape[1], q.shape[-1]
    ring_length = jnp.zeros(b, jnp.int32) if ring_length is None else ring_length
    ring_length = jnp.broadcast_to(ring_length[:, None], length.shape)
    entries = min(max(COPIED // (b * heads * 2 * h * q.dtype.itemsize), ENTRIES[0]), ENTRIES[1])
    width = min(columns, max(1, entries // page))
    table = jnp.pad(page_table, ((0, 0), (0, 0), (0, -columns % width)))
    ring = ring_pages * page
    gather = gather_pages_by_lanes if name == "tpu" else gather_pages
    used = jnp.where(length > 0, ring + length, ring_length)

    def block(j, state):
        place = j * width * page + jnp.arange(width * page)
        in_ring, in_global = place < ring_length[..., None], place - ring < length[..., None]
        stored = jnp.where(place < ring, in_ring, in_global)
        ids = lax.dynamic_slice_in_dim(table, j * width, width, 2)
        entries = pool.at[ids].get(mode="clip")
        if scale is not None:
            entries = dequantised_entries(entries, gather(scale, ids), q.dtype)
        entries = entries.reshape(b, heads, width * page, 2 * h)
        entries = jnp.where(stored[..., None], entries, 0)
        gate = None
        if bias is not None:
            gate = gather(bias, ids).reshape(stored.shape)
            gate = jnp.where(stored & (place >= ring), jnp.maximum(gate, MASKED), 0)
        start = jnp.where(place < used[..., None], 0, FOREVER)
        rows = *jnp.split(entries, 2, -1), start, jnp.where(stored, FOREVER, 0), gate
        far = Keys(*by_row(*rows))
        return merge(*state, *attend(q, None, far))

    if new is None:
        state = jnp.zeros_like(q, jnp.float32), jnp.full_like(q[..., 0], -jnp.inf, jnp.float32)
    else:
        state = vertical_slash(q, *new, window=1, implementation=name, dtype=jnp.float32)
    o, lse = lax.fori_loop(0, -(-used.max() // (width * page)), block, state)
    return o.astype(dtype), lse, append_tokens(pool, append, new, lse)
