"""How close an implementation must come to the reference, given the same inputs."""

import jax
import jax.numpy as jnp
import numpy as np

OUTPUT = {jnp.float32.dtype: 1e-5, jnp.bfloat16.dtype: 2e-2}
LOG_SUM_EXP = 1e-5


def assert_attention_close(actual, expected):
    """Both `(o, lse)`: the same rows see nothing, and elsewhere the differences are rounding."""
    (o, lse), (o_expected, lse_expected) = actual, expected
    assert o.dtype == o_expected.dtype
    assert lse.dtype == np.float32
    error = jnp.abs(o.astype(jnp.float32) - o_expected.astype(jnp.float32))
    assert float(error.max()) <= OUTPUT[o.dtype]
    empty = np.isneginf(np.asarray(lse_expected))
    np.testing.assert_array_equal(np.isneginf(np.asarray(lse)), empty)
    assert np.all(np.asarray(o, np.float32)[empty] == 0)
    np.testing.assert_allclose(
        np.asarray(lse)[~empty], np.asarray(lse_expected)[~empty], atol=LOG_SUM_EXP, rtol=2e-6
    )


def assert_gradients_close(actual, expected):
    """float32 against float64: differences are rounding, relative to the largest gradient of each input."""
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        y = np.asarray(y)
        np.testing.assert_allclose(np.asarray(x), y, atol=1e-5 * max(1, np.abs(y).max()), rtol=0)
