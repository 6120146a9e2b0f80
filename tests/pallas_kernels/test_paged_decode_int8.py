"""Tests of `paged_decode` over int8 entries, whose attention is that of the floats that they stand for."""

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

GARBAGE = 77, -1
"""The number and the scales, which are NaN, in places where nothing is stored."""
CASES = {  # lengths of the rings and of the retained entries
    "parts": ([3, 64], [0, 1024, 65, 3, 128, 700, 1, 64]),
    "one": ([0, 5, 32], [0, 112, 3, 0, 17, 16]),
    "chunk": ([7], [200]),
}
"""A TPU takes pages of a multiple of 32."""
TAKEN = [(x, case) for case in CASES for x in OTHERS if x != "tpu" or case == "parts"]


def stored(case, seed=0):
    """Return the arguments of `cache` with int8 entries, their scales, a bias, and the pool of floats."""
    q, pool, table, length, *rest = cache(SHAPES[case], *CASES[case], seed)
    values, scale = quantised_entries(jnp.nan_to_num(pool))
    nothing = jnp.isnan(pool)
    values, scale = jnp.where(nothing, GARBAGE[0], values), jnp.where(nothing[..., 0], GARBAGE[1], scale)
    floats = jnp.where(nothing, jnp.nan, dequantised_entries(values, scale, jnp.float32))
    bias = biased(SHAPES[case][-1], pool, table, length)
    return (q, values, table, length, *rest), scale, bias, floats


@pytest.mark.parametrize(("implementation", "case"), TAKEN)
def test_attention_is_that_of_the_floats_that_they_stand_for(implementation, case):
    arguments, scale, bias, floats = stored(case)
    options = SHAPES[case][-1], True, True
    expected = compiled("reference", *options)(arguments[0], floats, *arguments[2:], bias)
    for name in (implementation, "reference"):
        assert_attention_close(compiled(name, *options)(*arguments, bias, scale), expected)


@pytest.mark.parametrize("implementation", OTHERS)
def test_a_token_is_written_as_it_is_rounded_and_the_entry_in_its_place_moves(implementation):
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
    wanted = np.array(pool).reshape(count, -1)
    there = (slot < count) & (moved < count)
    wanted[moved[there]] = wanted[slot[there]]
    wanted[slot[slot < count]] = tokens[slot < count]
    np.testing.assert_array_equal(np.asarray(written).reshape(count, -1), wanted)


def test_the_mass_of_keys_in_pages():
    (q, pool, table, length, *_), scale, _, floats = stored("one")
    options = {"over": "max", "group": "mean"}
    own, expected = (
        paged_attention_mass(q, x, table[:, :, SHAPES["one"][-1] :], length, scale=s, **options)
        for x, s in ((pool, scale), (jnp.nan_to_num(floats), None))
    )
    np.testing.assert_allclose(own, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("implementation", "case", "scaled", "said"),
    [
        ("xla", "one", False, "got pool int8, expected a scale if and only if it is int8"),
        ("tpu", "one", True, "pages of a multiple of 32 entries, not 16"),
        ("hopper", "parts", True, "pool of q's dtype bfloat16, not int8"),
    ],
)
def test_what_does_not_fit_is_one_line(implementation, case, scaled, said):
    (q, pool, table, length, *_), scale, _, _ = stored(case)
    scale = scale if scaled else None
    with pytest.raises(ValueError, match=said):
        paged_decode(q.astype(jnp.bfloat16), pool, table, length, scale=scale, implementation=implementation)
