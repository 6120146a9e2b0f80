"""Tests of merging attention over disjoint sets of keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import softmax
from pallas_kernels.softmax import merge
from tests.pallas_kernels.closeness import assert_attention_close


def attention(q, k, v):
    o, lse = softmax.finish(softmax.update(softmax.start(q), softmax.logits(q, k), v))
    return o.astype(q.dtype), lse


def test_merging_two_parts_equals_attention_over_both():
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 3, x, 8)), jnp.float32) for x in (4, 9, 9))
    # The logits of the parts differ so much that in some rows their weights differ by many orders of magnitude.
    k = k.at[0, :, :5].multiply(30)
    parts = attention(q, k[:, :, :5], v[:, :, :5]), attention(q, k[:, :, 5:], v[:, :, 5:])
    assert_attention_close(merge(*parts[0], *parts[1]), attention(q, k, v))


def test_merging_with_an_empty_part_changes_nothing():
    rng = np.random.default_rng(1)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 2, 3, 4)), jnp.bfloat16) for _ in range(3))
    o, lse = attention(q, k, v)
    nothing = jnp.zeros_like(o), jnp.full_like(lse, -jnp.inf)
    for merged in (merge(o, lse, *nothing), merge(*nothing, o, lse)):
        np.testing.assert_array_equal(merged[0], o)
        np.testing.assert_array_equal(merged[1], lse)
    o, lse = merge(*nothing, *nothing)
    assert not o.any()
    assert bool(jnp.isneginf(lse).all())


@pytest.mark.parametrize(("dtype", "exact"), [(jnp.float32, True), (jnp.bfloat16, False)])
def test_products_of_float32_are_exact_on_every_device(dtype, exact):
    """The default precision is TF32 on GPUs and bfloat16 on TPUs. CPUs have only one, so the test reads the program."""
    x = jnp.zeros((2, 4, 8), dtype)
    program = str(jax.make_jaxpr(attention)(x, x, x))
    assert program.count("dot_general[") == 2
    assert program.count("Precision.HIGHEST") == (4 if exact else 0)
