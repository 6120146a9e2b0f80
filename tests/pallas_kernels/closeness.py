"""Checks that an implementation is close to the reference, given the same inputs."""

import jax
import jax.numpy as jnp
import numpy as np

OUTPUT = {jnp.float32.dtype: 1e-5, jnp.bfloat16.dtype: 1e-2}
"""Tolerance of each query's output, relative to its norm. Over many keys the values average out, and an absolute
tolerance that suits few keys would let everything pass."""
LOG_SUM_EXP = 1e-5


def assert_attention_close(actual, expected):
    """Check that both `(o, lse)` are empty for the same rows, and that elsewhere they differ by rounding only."""
    (o, lse), (o_expected, lse_expected) = actual, expected
    assert o.dtype == o_expected.dtype
    assert lse.dtype == np.float32
    exact = np.asarray(o_expected, np.float32)
    error = np.linalg.norm(np.asarray(o, np.float32) - exact, axis=-1)
    assert np.all(error <= OUTPUT[o.dtype] * np.linalg.norm(exact, axis=-1))
    empty = np.isneginf(np.asarray(lse_expected))
    np.testing.assert_array_equal(np.isneginf(np.asarray(lse)), empty)
    assert np.all(np.asarray(o, np.float32)[empty] == 0)
    np.testing.assert_allclose(
        np.asarray(lse)[~empty], np.asarray(lse_expected)[~empty], atol=LOG_SUM_EXP, rtol=2e-6
    )


def nan_outside(x, kept):
    """Return `x` with NaN where `kept`, a mask over its first axes, is False."""
    x, kept = np.array(x), np.asarray(kept)
    x[~kept] = np.nan
    return x


def assert_gradients_close(actual, expected):
    """Check that float32 gradients differ from float64 by rounding only, relative to the largest gradient of each
    input."""
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        y = np.asarray(y)
        np.testing.assert_allclose(np.asarray(x), y, atol=1e-5 * max(1, np.abs(y).max()), rtol=0)
