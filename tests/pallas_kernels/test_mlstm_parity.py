"""Tests of `mlstm` with xLSTM's normaliser against the authors' JAX code (package mlstm-kernels)."""

import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mlstm import Memory, mlstm

SPEC = importlib.util.find_spec("mlstm_kernels")
pytestmark = pytest.mark.skipif(SPEC is None, reason="needs the parity extra")
B, K, T, D, E = 2, 3, 64, 16, 8


def published(*path):
    """Load a module from its file, since the package itself would import triton."""
    assert SPEC is not None
    assert SPEC.submodule_search_locations is not None
    file = Path(SPEC.submodule_search_locations[0], "jax", *path)
    spec = importlib.util.spec_from_file_location(f"published_{path[0]}_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def arguments():
    """Return queries and keys of either sign, and the gates before their activations."""
    random = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(random.standard_normal(shape), jnp.float32)  # noqa: E731
    q, k, v = draw(B, K, T, D), draw(B, K, T, D), draw(B, K, T, E)
    return q, k, v, 2 * draw(B, K, T), 3 + draw(B, K, T)


def ours(q, k, v, i, f, memory=None, chunk=16):
    return mlstm(q, k, v, i, jax.nn.log_sigmoid(f), memory, normaliser="xlstm", chunk=chunk)


def test_the_parallel_form_equals_the_published_code(arguments):
    expected, _, _ = published("parallel", "native", "fw.py").mlstm_parallel_fw(*arguments)
    for chunk in (1, 16, T):
        np.testing.assert_allclose(ours(*arguments, chunk=chunk)[0], expected, rtol=1e-4, atol=1e-4)


def test_the_chunkwise_form_and_its_memory_equal_the_published_code(arguments):
    chunkwise = published("chunkwise", "native", "fw.py").mlstm_chunkwise
    first, second = (tuple(x[:, :, part] for x in arguments) for part in (slice(T // 2), slice(T // 2, None)))
    options = {"return_last_states": True, "chunk_size": 16}
    h, (c, n, m) = chunkwise(*first, **options)
    actual, memory = ours(*first)
    np.testing.assert_allclose(actual, h, rtol=1e-4, atol=1e-4)
    factor = jnp.exp(m.reshape(B, K) - memory.m)[..., None]
    np.testing.assert_allclose(memory.z, factor * n, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(memory.c, factor[..., None] * c, rtol=1e-4, atol=1e-4)
    h_second, _ = chunkwise(*second, c, n, m, **options)
    memory_before = Memory(c, n, m.reshape(B, K))
    np.testing.assert_allclose(ours(*second, memory_before)[0], h_second, rtol=1e-4, atol=1e-4)


def test_the_recurrent_form_equals_the_published_code(arguments):
    step = published("recurrent", "native_step.py").mlstm_recurrent_step__native_fw
    state = jnp.zeros((B, K, D, E)), jnp.zeros((B, K, D)), jnp.zeros((B, K, 1))
    actual, _ = ours(*arguments)
    for t in range(T):
        q, k, v = (x[:, :, t] for x in arguments[:3])
        i, f = (x[:, :, t, None] for x in arguments[3:])
        h, state = step(*state, q, k, v, i, f)
        np.testing.assert_allclose(actual[:, :, t], h, rtol=1e-4, atol=1e-4)
