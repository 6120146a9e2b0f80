"""`attention_mass` in XLA: tiles of queries and keys with an online maximum. The default on a CPU."""

import jax.numpy as jnp
from jax import lax

from pallas_kernels import softmax
from pallas_kernels.attention_mass.passes import FLOOR, apply, mass
from pallas_kernels.blocks import even, logits_at_once

RESIDENT, STREAMED = 256, 1024
"""Most resident rows, and streamed rows of all heads together, of a tile: its logits stay in a core's cache."""


def xla(q, k, valid, lse, query_factor, key_factor, over, group, offset):
    return mass(log_mass, q, k, valid, lse, query_factor, key_factor, over, group, offset)


def log_mass(resident, streamed, column, span, maximum):
    b, x, _, _ = streamed.shape
    size = resident.shape[1]
    tiles, br = even(size, RESIDENT)
    steps, bu = even(span.rows, max(16, STREAMED // x))
    # Tables: arithmetic on a loop counter would keep XLA from vectorising the comparisons that use it.
    row = jnp.minimum(jnp.arange(tiles)[:, None] * br, size - br) + jnp.arange(br)
    low, high = span.low(row), span.high(row)
    first = jnp.arange(steps)[:, None] * bu
    place = jnp.minimum(first, span.rows - bu) + jnp.arange(bu)
    place = jnp.where(place >= first, place, span.rows)

    def row_group(resident, streamed, values):
        def tile(i):
            at = jnp.minimum(i * br, size - br)
            rows = lax.dynamic_slice_in_dim(resident, at, br)

            def step(j, state):
                start = jnp.minimum(j * bu, span.rows - bu)
                u = lax.dynamic_slice_in_dim(streamed, start, bu, 1)
                logits = softmax.logits(u.reshape(x * bu, -1), rows).reshape(x, bu, br)
                seen = (place[j][:, None] >= low[i]) & (place[j][:, None] < high[i])
                if column is not None:
                    value = lax.dynamic_slice_in_dim(values, start, bu, 1)
                    logits = apply(column.choose, logits, value[..., None])
                logits = jnp.where(seen, logits, softmax.MASKED)
                m, l = state
                m_new = jnp.maximum(m, logits.max(1))
                if maximum:
                    return m_new, l
                return m_new, l * jnp.exp(m - m_new) + jnp.exp(logits - m_new[:, None]).sum(1)

            start = jnp.zeros_like(rows[:, 0], jnp.float32, shape=(x, br))
            first, _, _, stop = span.tiles(at, at + br - 1, bu)
            m, l = lax.fori_loop(first, stop, step, (start + FLOOR, start))
            log = m if maximum else m + jnp.log(jnp.where(l > 0, l, 1))
            return jnp.where(m > FLOOR, log, -jnp.inf)

        def put(i, out):
            return lax.dynamic_update_slice_in_dim(out, tile(i), jnp.minimum(i * br, size - br), 1)

        out = jnp.zeros_like(resident[:, 0], jnp.float32, shape=(x, size))
        return lax.fori_loop(0, tiles, put, out)

    batch_size = max(1, min(b, logits_at_once() // (x * bu * br)))
    return lax.map(
        lambda args: row_group(*args), (resident, streamed, column and column.value), batch_size=batch_size
    )
