"""Inputs of `vertical_slash`, and checks of it against the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings

from pallas_kernels.vertical_slash import vertical_slash
from pallas_kernels.vertical_slash.api import IMPLEMENTATIONS
from tests.pallas_kernels.closeness import assert_attention_close, nan_outside

FOREVER = jnp.iinfo(jnp.int32).max
OTHERS = [name for name in IMPLEMENTATIONS if name not in ("reference", "hopper")]
few = settings(max_examples=6, deadline=None, derandomize=True, database=None)

SHAPES = {  # b, n, k, t, s, h of whole prompts, a chunk and one query. No block divides these lengths.
    "square": (2, 4, 2, 96, 96, 32),
    "long": (1, 2, 2, 300, 300, 32),
    "chunk": (1, 8, 4, 40, 150, 96),
    "one": (2, 2, 1, 1, 130, 64),
}
more = functools.partial(pytest.param, marks=pytest.mark.thorough)
TPUS = [name if name == "tpu" else more(name) for name in OTHERS]
"""Implementations. All but the TPU's run only in thorough tests."""


@functools.cache
def compiled(implementation, window, gated):
    """Return a function of q, k, v, end and log_gate. The last is ignored unless `gated`."""

    def call(q, k, v, end, log_gate):
        return vertical_slash(
            q, k, v, end, window=window, log_gate=log_gate if gated else None, implementation=implementation
        )

    return jax.jit(call)


def tensors(shape, seed, dtype=jnp.float32):
    """Return q, k, v and a log_gate, of which a tenth is -inf."""
    b, n, k, t, s, h = shape
    rng = np.random.default_rng(seed)
    q, key, value = (
        jnp.asarray(rng.normal(size=x), dtype) for x in ((b, n, t, h), (b, k, s, h), (b, k, s, h))
    )
    gate = np.where(rng.random((b, k, s)) < 0.1, -np.inf, np.log(rng.random((b, k, s)) + 1e-3))
    return q, key, value, jnp.asarray(gate, jnp.float32)


KEPT = {
    "none": lambda rng, shape: np.zeros(shape, bool),
    "one": lambda rng, shape: np.arange(shape[-1]) == rng.integers(shape[-1]),
    "all": lambda rng, shape: np.ones(shape, bool),
    "uneven": lambda rng, shape: rng.random(shape) < rng.random((*shape[:2], 1)) ** 3,
}


def random_ends(shape, window, kept, seed):
    """Return the ends of keys. `kept` says which keys are kept, half of them for good and half until a later index.
    Some keys are never seen."""
    b, _, k, _, s, _ = shape
    rng = np.random.default_rng(seed)
    later = np.where(
        rng.random((b, k, s)) < 0.5, FOREVER, np.arange(s) + window + rng.integers(0, s, (b, k, s))
    )
    end = np.where(KEPT[kept](rng, (b, k, s)), later, np.arange(s) + window)
    padding = (np.arange(s) < rng.integers(0, s, (b, 1, 1)) // 2) | (rng.random((b, k, s)) < 0.05)
    return jnp.asarray(np.where(padding, rng.integers(0, np.arange(s) + 1), end), jnp.int32)


def check_sparse(implementation, shape, window, kept, seed, gated=False, dtype=jnp.float32):
    q, k, v, gate = tensors(shape, seed, dtype)
    end = random_ends(shape, window, kept, seed)
    expected = compiled("reference", window, gated)(q, k, v, end, gate)
    k, v = (nan_outside(x, np.asarray(end) > np.arange(end.shape[-1])) for x in (k, v))
    assert_attention_close(compiled(implementation, window, gated)(q, k, v, end, gate), expected)


def gradients(implementation, window, arguments, weight, end=None):
    """Return the gradients of a weighted sum of o, and of lse where it is finite, with respect to the arguments that
    are not None."""

    def loss(arguments):
        q, k, v, gate = arguments
        o, lse = vertical_slash(q, k, v, end, window=window, log_gate=gate, implementation=implementation)
        return jnp.sum(o * weight[0]) + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0) * weight[1])

    return jax.jit(jax.grad(jax.checkpoint(loss)))(arguments)
