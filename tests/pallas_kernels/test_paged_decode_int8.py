"""Tests of `paged_decode` over int8 entries."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention_mass import paged_attention_mass
from pallas_kernels.int8_entries import dequantised_entries, quantised_entries
from pallas_kernels.paged_decode import Append, paged_decode, paged_decode_append
from tests.pallas_kernels.closeness import assert_attention_close
from tests.pallas_kernels.paged import OTHERS, SHAPES, biased, cache, compiled

pytestmark = pytest.mark.slow

GARBAGE = 77, -1
"""The number and the scales (NaN) where nothing is stored."""
CASES = {  # lengths of the rings and of the retained entries
    "parts": ([3, 64], [0, 1024, 65, 3, 128, 700, 1, 64]),
    "one": ([0, 5, 32], [0, 112, 3, 0, 17, 16]),
    "chunk": ([7], [200]),
}
SUPPORTED = [(x, case) for case in CASES for x in OTHERS if x != "tpu" or case == "parts"]
"""A TPU takes only pages of a multiple of 32 entries."""


def stored(case, seed=0):
    """Return the arguments of `cache` with int8 entries, their scales, a bias, and the pool of floats."""
    q, pool, table, length, *rest = cache(SHAPES[case], *CASES[case], seed)
    values, scale = quantised_entries(jnp.nan_to_num(pool))
    nothing = jnp.isnan(pool)
    values, scale = jnp.where(nothing, GARBAGE[0], values), jnp.where(nothing[..., 0], GARBAGE[1], scale)
    floats = jnp.where(nothing, jnp.nan, dequantised_entries(values, scale, jnp.float32))
    bias = biased(SHAPES[case][-1], pool, table, length)
    return (q, values, table, length, *rest), scale, bias, floats


@pytest.mark.parametrize(("implementation", "case"), SUPPORTED)
def test_attention_equals_that_of_the_dequantised_entries(implementation, case):
    arguments, scale, bias, floats = stored(case)
    options = SHAPES[case][-1], True, True
    expected = compiled("reference", *options)(arguments[0], floats, *arguments[2:], bias)
    for name in (implementation, "reference"):
        assert_attention_close(compiled(name, *options)(*arguments, bias, scale), expected)


@pytest.mark.parametrize("implementation", OTHERS)
def test_a_token_is_rounded_and_written_and_the_replaced_entry_moves(implementation):
    (q, pool, table, length, ring, new, _), scale, _, _ = stored("parts")
    count, size = pool.shape[0] * 64, length.size
    pages = np.random.default_rng(1).permutation(len(pool))[: 2 * size].reshape(2, *length.shape)
    places = pages * 64 + np.arange(2 * size).reshape(2, *length.shape) % 64
    places[1, 0, 1] = places[:, 1, 0] = count
    slot, moved = places.reshape(2, size)
    options = {"ring_pages": 1, "new": new, "scale": scale, "implementation": implementation}
    call = jax.jit(functools.partial(paged_decode_append, **options))
    *out, written = call(q, pool, table, length, ring, append=Append(*jnp.asarray(places, jnp.int32)))
    assert_attention_close(out, paged_decode(q, pool, table, length, ring, **options))
    tokens = np.asarray(quantised_entries(jnp.concatenate(new, -1))[0]).reshape(size, -1)
    expected = np.array(pool).reshape(count, -1)
    moves = (slot < count) & (moved < count)
    expected[moved[moves]] = expected[slot[moves]]
    expected[slot[slot < count]] = tokens[slot < count]
    np.testing.assert_array_equal(np.asarray(written).reshape(count, -1), expected)


def test_mass_equals_that_of_the_dequantised_entries():
    (q, pool, table, length, *_), scale, _, floats = stored("one")
    options = {"over": "max", "group": "mean"}
    actual, expected = (
        paged_attention_mass(q, x, table[:, :, SHAPES["one"][-1] :], length, scale=s, **options)
        for x, s in ((pool, scale), (jnp.nan_to_num(floats), None))
    )
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("implementation", "case", "scaled", "message"),
    [
        ("xla", "one", False, "got pool int8, expected a scale if and only if it is int8"),
        ("tpu", "one", True, "pages of a multiple of 32 entries, not 16"),
        ("hopper", "parts", True, "pool of q's dtype bfloat16, not int8"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(implementation, case, scaled, message):
    (q, pool, table, length, *_), scale, _, _ = stored(case)
    scale = scale if scaled else None
    with pytest.raises(ValueError, match=message):
        paged_decode(q.astype(jnp.bfloat16), pool, table, length, scale=scale, implementation=implementation)
