"""Tests of the TPU kernel that gathers the seen keys of a list. The entries equal those of XLA's gather bit by bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.vertical_slash import key_lists
from pallas_kernels.vertical_slash.tpu_gather import gather_seen

WINDOW = 5


@functools.cache
def compiled(block):
    def expected(keys):
        return key_lists.gather_seen(keys._replace(k=keys.k[1:], v=keys.v[1:]))

    return jax.jit(functools.partial(gather_seen, block=block, row=1)), jax.jit(expected)


def keys(s, head_dim, dtype, gated, counts, seed):
    """Return a row for each count of seen keys, which are at random places among NaN. Another row's keys come first.
    The marks use all of their bits."""
    rng = np.random.default_rng(seed)
    r = len(counts)
    start = np.broadcast_to(np.arange(s) + WINDOW, (r, s))
    chosen = rng.permuted(np.arange(s) < np.asarray(counts)[:, None], axis=1)
    k, v = (np.where(chosen[..., None], rng.normal(size=(r, s, head_dim)), np.nan) for _ in range(2))
    k, v = (jnp.asarray(np.concatenate([np.ones_like(x[:1]), x]), dtype) for x in (k, v))
    stop = np.where(chosen, rng.integers(start + 1, 2**31), rng.integers(0, start + 1))
    gate = jnp.asarray(np.where(rng.random((r, s)) < 0.1, -1e30, rng.normal(size=(r, s))), jnp.float32)
    return key_lists.Keys(k, v, jnp.asarray(start), jnp.asarray(stop, jnp.int32), gate if gated else None)


def check(block, given_keys):
    actual, expected = (f(given_keys) for f in compiled(block))
    counts = np.sum(given_keys.start < given_keys.stop, 1)
    for row, count in enumerate(counts):
        for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(x[row, :count], y[row, :count])
        # The walk also covers the rest of the block.
        walked = slice(count, -(-count // block) * block)
        assert not np.any(actual.k[row, walked])
        assert not np.any(actual.v[row, walked])
        assert np.all(actual.start[row, count:] == key_lists.FOREVER)
        assert not np.any(actual.stop[row, count:])


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("s", "block", "head_dim", "dtype", "gated"),
    [(700, 128, 32, jnp.float32, True), (512, 256, 96, jnp.bfloat16, False)],
)
@settings(max_examples=6, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_the_seen_keys_are_gathered_in_order(s, block, head_dim, dtype, gated, data):
    edges = [n + more for n in range(0, s, block) for more in (-1, 0, 1)]
    count = st.sampled_from([x for x in edges if 0 <= x < s]) | st.integers(0, s) | st.just(s)
    counts = data.draw(st.tuples(count, count, count))
    check(block, keys(s, head_dim, dtype, gated, counts, data.draw(st.integers(0, 2**16))))


@pytest.mark.parametrize(("head_dim", "dtype"), [(64, jnp.bfloat16), (256, jnp.bfloat16)])
def test_seen_keys_of_other_head_dims_are_gathered(head_dim, dtype):
    check(128, keys(300, head_dim, dtype, True, (131, 300), 0))
