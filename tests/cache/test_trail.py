"""The trail against lists of the last tokens, after calls of any lengths."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache import trail
from pallas_kernels.bits import as_bits

BATCH, LAYERS, HEADS, WIDTH, SLOTS = 3, 2, 5, 4, 6
CALLS = [
    (4, [4, 1, 3]),
    (1, [1, 1, 0]),
    (9, [9, 0, 7]),
    (1, [0, 1, 1]),
    (1, [1, 1, 1]),
    (16, [6, 16, 0]),
]
"""Tokens that a call is padded to, and how many of each sequence's are real."""


@pytest.mark.parametrize("heads", [(), (HEADS,)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_sequence_remembers_its_own_last_tokens(heads, dtype):
    random = np.random.default_rng(0)
    ring = jnp.zeros((BATCH, SLOTS, LAYERS, *heads, WIDTH), dtype)
    ring = as_bits(ring) if dtype == "bfloat16" else ring  # as a pool on a CPU has them
    newest = jax.vmap(trail.newest, (0, None, None))
    seen, known = np.zeros(BATCH, int), [[] for _ in range(BATCH)]
    for tokens, valid in CALLS:
        # small whole numbers, which bfloat16 has
        x = random.integers(-99, 99, (LAYERS, BATCH, *heads, tokens, WIDTH)).astype(np.float32)
        for row, count in enumerate(valid):
            known[row] += [x[:, row, ..., t, :] for t in range(count)]
        new = newest(jnp.asarray(x, dtype), SLOTS, jnp.array(valid))
        assert new.shape[-2] == min(tokens, SLOTS)
        ring = trail.written(ring, new, jnp.array(seen), jnp.array(valid))
        seen += valid
        found = trail.by_layer(ring, jnp.array(seen), dtype)
        assert found.shape == (LAYERS, BATCH, *heads, SLOTS, WIDTH)
        assert found.dtype == dtype
        for row, own in enumerate(known):
            last = own[-SLOTS:]
            np.testing.assert_array_equal(
                np.asarray(found[:, row, ..., SLOTS - len(last) :, :], np.float32), np.stack(last, -2)
            )
