"""Tests of the gradient of `vertical_slash` against the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.vertical_slash import tpu_backward, vertical_slash
from pallas_kernels.vertical_slash.tpu_walk import Blocks
from tests.pallas_kernels.closeness import assert_gradients_close
from tests.pallas_kernels.slash_inputs import (
    OTHERS,
    SHAPES,
    TPUS,
    gradients,
    more,
    random_ends,
    tensors,
)


def weighted(shape, window, gated, ending):
    """Return the arguments, the weights and the ends that `gradients` takes."""
    b, n, _, t, _, h = SHAPES[shape]
    rng = np.random.default_rng(1)
    *qkv, gate = tensors(SHAPES[shape], 2)
    end = random_ends(SHAPES[shape], window, "uneven", 3) if ending else None
    arguments = (*qkv, gate if gated else None)
    weight = rng.normal(size=(b, n, t, h)), rng.normal(size=(b, n, t))
    return arguments, weight, end


@functools.cache
def exact_gradients(shape, window, gated, ending):
    """Return the reference's gradients in float64."""
    arguments, weight, end = weighted(shape, window, gated, ending)
    with jax.enable_x64(True):
        exact = jax.tree.map(lambda x: jnp.asarray(np.asarray(x), jnp.float64), arguments)
        return jax.device_get(gradients("reference", window, exact, weight, end))


@pytest.mark.parametrize("implementation", OTHERS)
@pytest.mark.parametrize(
    ("shape", "window", "gated", "ending"),
    [
        more("long", 7, True, False),
        more("chunk", 1, True, False),
        more("square", 7, False, False),
        more("square", 7, False, True),
        ("chunk", 7, True, True),
    ],
)
def test_gradients_equal_float64(implementation, shape, window, gated, ending):
    arguments, weight, end = weighted(shape, window, gated, ending)
    actual = gradients(implementation, window, arguments, jax.tree.map(np.float32, weight), end)
    assert_gradients_close(actual, exact_gradients(shape, window, gated, ending))


@pytest.mark.parametrize("implementation", OTHERS)
@pytest.mark.thorough
def test_gradients_in_bfloat16_are_close(implementation):
    """Products have probabilities of 8 bits, so errors reach 2% of the largest gradient. The gate's gradient is
    float32."""
    b, n, _, t, _, h = SHAPES["square"]
    arguments = tensors(SHAPES["square"], 3, jnp.bfloat16)
    weight = jnp.ones((b, n, t, h)), jnp.zeros((b, n, t))
    actual = gradients(implementation, 7, arguments, weight)
    expected = gradients("reference", 7, jax.tree.map(jnp.float32, arguments), weight)
    assert [x.dtype for x in actual] == [x.dtype for x in arguments]
    for x, y in zip(actual, expected, strict=True):
        assert float(jnp.abs(x.astype(jnp.float32) - y).max()) <= 2e-2 * float(jnp.abs(y).max())


@pytest.mark.slow
def test_gradients_on_a_matrix_unit_no_wider_than_a_head(monkeypatch):
    """In the other tests heads are narrower than the unit, and the sums are transposed."""
    arguments = tensors(SHAPES["chunk"], 1)
    b, n, _, t, _, h = SHAPES["chunk"]
    weight = jnp.ones((b, n, t, h)), jnp.ones((b, n, t))
    monkeypatch.setattr(tpu_backward, "unit_width", lambda: h)
    expected = gradients("reference", 7, arguments, weight)
    assert_gradients_close(gradients("tpu", 7, arguments, weight), expected)


@pytest.mark.slow
def test_gradients_of_keys_that_several_blocks_of_queries_see(monkeypatch):
    """There are more blocks than buffers."""
    monkeypatch.setattr(tpu_backward, "blocks_of_gradient", lambda *_: Blocks(128, 128))
    arguments = tensors((1, 2, 1, 512, 512, 32), 1)
    weight = jnp.ones((1, 2, 512, 32)), jnp.ones((1, 2, 512))
    expected = gradients("reference", 7, arguments, weight)
    assert_gradients_close(gradients("tpu", 7, arguments, weight), expected)


@pytest.mark.thorough
@pytest.mark.parametrize("implementation", TPUS)
def test_the_narrow_output_is_the_rounded_float32_output(implementation):
    """The gradients of both are equal for a cotangent that bfloat16 represents."""
    *arguments, _ = tensors((1, 2, 1, 40, 40, 32), 0, jnp.bfloat16)

    def run(dtype):
        def total(q, k, v):
            o, _ = vertical_slash(q, k, v, window=7, dtype=dtype, implementation=implementation)
            return jnp.sum(o.astype(jnp.float32)), o

        return jax.jit(jax.grad(total, (0, 1, 2), has_aux=True))(*arguments)

    (gradients_exact, exact), (gradients_rounded, rounded) = run(jnp.float32), run(None)
    assert (exact.dtype, rounded.dtype) == (jnp.float32, jnp.bfloat16)
    np.testing.assert_array_equal(exact.astype(jnp.bfloat16), rounded)
    assert bool((exact != rounded).any())
    for x, y in zip(gradients_exact, gradients_rounded, strict=True):
        assert x.dtype == jnp.bfloat16
        x, y = (np.asarray(a, np.float32) for a in (x, y))
        assert np.abs(x - y).max() <= 2e-2 * np.abs(y).max()
