"""Tests of the observation buffer against lists of the last tokens, after calls of any lengths."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache import observations
from pallas_kernels.bits import as_bits

BATCH, LAYERS, HEADS, WIDTH, SLOTS = 3, 2, 5, 4, 6
CALLS = [
    (4, [4, 1, 3]),
    (1, [1, 1, 0]),
    (16, [9, 0, 7]),
    (1, [0, 1, 1]),
    (1, [1, 1, 1]),
    (16, [6, 16, 0]),
]
"""For each call, the number of tokens that it is padded to and how many of each sequence's tokens are real."""


@jax.jit
def written(buffer, x, seen, valid):
    """Return the buffer after a call, its content by layer, and the number of slots that were written."""
    new = jax.vmap(observations.newest, (0, None, None))(x, SLOTS, valid)
    buffer = observations.written(buffer, new, seen, valid)
    return buffer, observations.by_layer(buffer, seen + valid, x.dtype), new.shape[-2]


@pytest.mark.parametrize("heads", [(), (HEADS,)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_buffer_holds_the_last_tokens_of_each_sequence(heads, dtype):
    random = np.random.default_rng(0)
    buffer = jnp.zeros((BATCH, SLOTS, LAYERS, *heads, WIDTH), dtype)
    buffer = as_bits(buffer) if dtype == "bfloat16" else buffer  # a pool on a CPU stores them like this
    seen, tokens_so_far = np.zeros(BATCH, int), [[] for _ in range(BATCH)]
    for tokens, valid in CALLS:
        # bfloat16 represents these small whole numbers exactly
        x = random.integers(-99, 99, (LAYERS, BATCH, *heads, tokens, WIDTH)).astype(np.float32)
        for row, count in enumerate(valid):
            tokens_so_far[row] += [x[:, row, ..., t, :] for t in range(count)]
        buffer, content, slots = written(buffer, x.astype(dtype), np.array(seen), np.array(valid))
        assert slots == min(tokens, SLOTS)
        seen += valid
        assert content.shape == (LAYERS, BATCH, *heads, SLOTS, WIDTH)
        assert content.dtype == dtype
        for row, past in enumerate(tokens_so_far):
            last = past[-SLOTS:]
            np.testing.assert_array_equal(
                np.asarray(content[:, row, ..., SLOTS - len(last) :, :], np.float32), np.stack(last, -2)
            )
