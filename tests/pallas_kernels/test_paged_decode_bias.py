"""Tests of `paged_decode` with biases of entries."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_decode.plane import gather_pages, gather_pages_by_lanes
from tests.pallas_kernels.closeness import assert_attention_close
from tests.pallas_kernels.paged import OTHERS, SHAPES, biased, cache, compiled

BIASED = {  # shape; with a ring, with new, with selected pages; lengths of the rings and of the retained entries
    "one": (SHAPES["one"], True, True, True, [0, 5, 32], [0, 112, 3, 0, 17, 16]),
    "several tiles": (SHAPES["several tiles"], True, False, False, [24, 13], [616, 0, 65, 300]),
    "many tiles": (SHAPES["many tiles"], True, True, False, [19], [1810]),
    "large pages": ((1, 4, 2, 8, 96, 256, 4, 0), False, False, True, [0], [1000, 30]),
    "chunk": (SHAPES["chunk"], True, True, False, [7], [200]),
}


@pytest.mark.slow
@pytest.mark.parametrize("implementation", OTHERS)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(x, marks={"one": (), "large pages": pytest.mark.kernels}.get(x, pytest.mark.thorough))
        for x in BIASED
    ],
)
def test_a_bias_is_added_to_the_logits_of_the_global_entries(implementation, case):
    shape, *options, ring_length, length = BIASED[case]
    ring_pages = shape[-1]
    arguments = cache(shape, ring_length, length, 3)
    _, pool, table, lengths, *_ = arguments
    bias = biased(ring_pages, pool, table, lengths)
    # With the second plane no retained entry is visible.
    for plane in (bias, jnp.where(bias > -jnp.inf, -jnp.inf, bias)):
        expected = compiled("reference", ring_pages, *options)(*arguments, plane)
        assert_attention_close(compiled(implementation, ring_pages, *options)(*arguments, plane), expected)


@pytest.mark.parametrize("implementation", OTHERS)
@pytest.mark.parametrize("t", [1, 9])
def test_without_a_bias_there_is_no_array_of_biases(implementation, t):
    *arguments, _ = cache((2, 2, 1, t, 32, 16, 18, 2), [5, 0], [3, 0], 0)
    call = compiled(implementation, 2, True, True)
    assert arguments[1].shape[:2] == (41, 16)  # No other array has this shape.
    assert "[41,16]" not in str(jax.make_jaxpr(call)(*arguments, None))


@pytest.mark.parametrize("page", [8, 24, 64, 128, 256])
def test_both_ways_of_gathering_biases_agree(page):
    bias = jnp.arange(11 * page, dtype=jnp.float32).reshape(11, page).at[3, 2].set(jnp.nan)
    ids = jnp.asarray([[0, 10, 3, -5], [99, 7, 6, 0]])
    np.testing.assert_array_equal(gather_pages_by_lanes(bias, ids), gather_pages(bias, ids))
