"""Tests of the TPU kernels with far lists of a few heads at a time, and with numbers of keys that no block divides."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.vertical_slash import tpu_gather, vertical_slash
from tests.pallas_kernels.closeness import assert_attention_close, assert_gradients_close, nan_outside

WINDOW = 20


def arguments(b, n, k, t, s, h, dtype, seed=0):
    """Return q, k, v, end and log_gate. A tenth of the gates is -inf, and 30% of the keys are kept. There is padding
    at the beginning of each sequence and among the other keys, with NaN in k and v."""
    rng = np.random.default_rng(seed)
    q, key, value = (
        jnp.asarray(rng.normal(size=x), dtype) for x in ((b, n, t, h), (b, k, s, h), (b, k, s, h))
    )
    place = np.arange(s)
    end = np.where(rng.random((b, k, s)) < 0.3, np.iinfo(np.int32).max, place + WINDOW)
    padding = (place < rng.integers(1, s // 2, (b, 1, 1))) | (rng.random((b, k, s)) < 0.02)
    end = np.where(padding, rng.integers(-5, place + 1, (b, k, s)), end)
    key, value = (jnp.asarray(nan_outside(x, ~padding)) for x in (key, value))
    gate = np.where(rng.random((b, k, s)) < 0.1, -np.inf, np.log(rng.random((b, k, s)) + 1e-3))
    return q, key, value, jnp.asarray(end, jnp.int32), jnp.asarray(gate, jnp.float32)


def documents(b, s):
    return jnp.asarray(np.arange(s) * 3 // s + np.zeros((b, 1), int), jnp.int32)


CASES = {  # b, n, k, t, s, h, dtype; gated; packed. Last tiles are padded copies or moved back.
    "groups of 3": ((1, 6, 2, 70, 90, 64, jnp.float32), False, True),
    "gates": ((2, 2, 2, 300, 700, 128, jnp.float32), True, True),
    "bfloat16": ((2, 8, 4, 300, 650, 256, jnp.bfloat16), True, False),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_lists_of_a_few_heads_at_a_time_equal_the_reference(case, monkeypatch):
    monkeypatch.setattr(tpu_gather, "SMALL", 0)
    shape, gated, packed = CASES[case]
    q, k, v, end, gate = arguments(*shape)
    assert tpu_gather.rows_at_once(k.reshape(-1, *k.shape[2:])) < shape[0] * shape[2]

    def call(implementation):
        options = {"log_gate": gate if gated else None, "implementation": implementation}
        segments = documents(shape[0], shape[4]) if packed else None
        return jax.jit(functools.partial(vertical_slash, window=WINDOW, segment_ids=segments, **options))(
            q, k, v, end
        )

    assert_attention_close(call("tpu"), call("reference"))


@pytest.mark.slow
@pytest.mark.parametrize("s", [pytest.param(640, marks=pytest.mark.thorough), 650])
def test_unseen_keys_get_no_gradient(s, monkeypatch):
    """Keys that no query sees may be NaN."""
    monkeypatch.setattr(tpu_gather, "SMALL", 0)
    shape = 1, 4, 2, 200, s, 64
    *qkv, end, gate = arguments(*shape, jnp.float32)
    weight, _, _, _, _ = arguments(*shape, jnp.float32, seed=1)

    def gradients(implementation, *x):
        def loss(q, k, v, gate):
            o, lse = vertical_slash(q, k, v, end, window=WINDOW, log_gate=gate, implementation=implementation)
            return jnp.sum(o * weight) + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0))

        return jax.jit(jax.grad(loss, (0, 1, 2, 3)))(*x)

    visible = [np.nan_to_num(x) for x in qkv]
    assert_gradients_close(gradients("tpu", *qkv, gate), gradients("reference", *visible, gate))


@pytest.mark.slow
@pytest.mark.parametrize("gated", [False, True])
def test_causal_attention_over_lengths_that_no_block_divides(gated):
    """Far tiles are read in place. The last one is a padded copy (650) or moved back (640)."""
    for s in (640, 650):
        q, k, v, _, gate = arguments(1, 4, 2, 150, s, 32, jnp.float32)
        k, v = np.nan_to_num(k), np.nan_to_num(v)
        call = functools.partial(vertical_slash, window=WINDOW, log_gate=gate if gated else None)
        actual, expected = (
            jax.jit(functools.partial(call, implementation=x))(q, k, v) for x in ("tpu", "reference")
        )
        assert_attention_close(actual, expected)
