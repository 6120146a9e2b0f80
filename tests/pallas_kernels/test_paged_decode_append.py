"""Tests of `paged_decode_append`: a decoded token is written, the replaced entry moves, and nothing else changes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

from pallas_kernels.ahead import lower_for_cuda
from pallas_kernels.bits import as_bits
from pallas_kernels.paged_decode import Append, hopper, paged_decode, paged_decode_append
from tests.pallas_kernels.closeness import assert_attention_close
from tests.pallas_kernels.interpreted import INTERPRETED
from tests.pallas_kernels.paged import OTHERS, SHAPES, biased, cache

SHAPE, RINGS, LENGTHS = SHAPES["one"], [0, 5, 32], [0, 111, 3, 0, 17, 16]
B, K, PAGE, RING_PAGES = SHAPE[0], SHAPE[2], SHAPE[5], SHAPE[7]


def places(pool, seed=0):
    """Return indices of every kind: a slot whose entry moves, a slot whose entry is dropped, and no slot."""
    rng = np.random.default_rng(seed)
    pages = rng.permutation(len(pool))[: 2 * B * K].reshape(2, B, K)
    indices = pages * pool.shape[1] + rng.integers(pool.shape[1], size=pages.shape)
    nowhere = pool.shape[0] * pool.shape[1]
    indices[1, 0, 1], indices[:, 1, 0], indices[1, 2, 0] = nowhere, nowhere, nowhere + 7
    return Append(*jnp.asarray(indices, jnp.int32))


def expected_pool(pool, append, new):
    """Return the expected pool, written entry by entry."""
    entries = np.array(pool).reshape(-1, pool.shape[2])
    for row in np.ndindex(B, K):
        slot, moved = (int(place[row]) for place in append)
        if moved < len(entries):
            entries[moved] = entries[slot]
        if slot < len(entries):
            entries[slot] = np.concatenate([x[row][0] for x in new])
    return entries.reshape(pool.shape)


def assert_same(actual, expected):
    np.testing.assert_array_equal(*(np.asarray(x, np.float32) for x in (actual, expected)))


@pytest.mark.parametrize(
    "implementation",
    [pytest.param(x, marks=pytest.mark.kernels if x == "tpu" else ()) for x in (*OTHERS, "reference")],
)
@pytest.mark.parametrize("dtype", [pytest.param(jnp.float32, marks=pytest.mark.thorough), jnp.bfloat16])
def test_the_token_is_written_and_the_replaced_entry_moves(implementation, dtype):
    q, pool, table, length, ring, new, pages = cache(SHAPE, RINGS, LENGTHS, 0, dtype)
    append = places(pool)
    options = {
        "ring_pages": RING_PAGES,
        "new": new,
        "pages": pages,
        "bias": biased(RING_PAGES, pool, table, length),
    }
    options["implementation"] = implementation
    call = jax.jit(functools.partial(paged_decode_append, **options))
    *out, written = call(q, pool, table, length, ring, append=append)
    assert_attention_close(out, paged_decode(q, pool, table, length, ring, **options))
    assert written.dtype == dtype
    assert_same(written, expected_pool(pool, append, new))


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_bits_stay_bits(implementation):
    q, pool, table, length, ring, new, _ = cache(SHAPE, RINGS, LENGTHS, 0, jnp.bfloat16)
    append = places(pool)
    call = functools.partial(paged_decode_append, ring_pages=RING_PAGES, new=new, append=append)
    *_, written = call(q, as_bits(pool), table, length, ring, implementation=implementation)
    np.testing.assert_array_equal(
        written, as_bits(jnp.asarray(expected_pool(pool, append, new), jnp.bfloat16))
    )


@pytest.mark.thorough
def test_split_heads_on_hopper_write_once():
    """65 query heads of a kv head are more than a wgmma has rows."""
    shape = (B, 130, K, 1, 64, 16, 9, RING_PAGES)
    q, pool, table, length, ring, new, _ = cache(shape, RINGS, LENGTHS, 0, jnp.bfloat16)
    pool, append = jnp.nan_to_num(pool), places(pool)
    call = functools.partial(hopper.hopper, interpret=InterpretGPUParams(), machine=INTERPRETED)
    *_, written = call(q, pool, table, length, ring, RING_PAGES, new, None, None, q.dtype, append)
    assert_same(written, expected_pool(pool, append, new))


def test_on_a_gpu_only_the_two_kernels_use_the_pool():
    q, pool, table, length, ring, new, _ = cache(SHAPE, RINGS, LENGTHS, 0, jnp.bfloat16)
    append = places(pool)
    call = functools.partial(paged_decode_append, ring_pages=RING_PAGES, implementation="gpu")
    text = lower_for_cuda(
        lambda *x: call(*x[:5], new=x[5], append=x[6]), q, pool, table, length, ring, new, append
    )
    assert text.count("xla.gpu.triton") == 2
    assert "scatter" not in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": jnp.zeros((1, 2, 3, 8)), "new": (jnp.zeros((1, 2, 3, 8)),) * 2}, "3 tokens"),
        ({"append": Append(jnp.zeros((1, 2), int), jnp.zeros((1, 3), int))}, "[(1, 2), (1, 3)]"),
        (
            {"append": Append(jnp.zeros((1, 2)), jnp.zeros((1, 2), int))},
            "slot is float32, but must be whole numbers",
        ),
        ({"length": jnp.zeros((1, 2))}, "length is float32"),
    ],
)
@pytest.mark.usefixtures("shapes_unchecked")
def test_bad_arguments_are_refused_in_one_line(change, message):
    good = {
        "q": jnp.zeros((1, 2, 1, 8)),
        "pool": jnp.zeros((6, 4, 16)),
        "page_table": jnp.zeros((1, 2, 3), int),
        "length": jnp.zeros((1, 2), int),
        "new": (jnp.zeros((1, 2, 1, 8)),) * 2,
        "append": Append(jnp.zeros((1, 2), int), jnp.ones((1, 2), int)),
    }
    with pytest.raises(ValueError, match="^paged_decode") as error:
        paged_decode_append(**good | change)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
