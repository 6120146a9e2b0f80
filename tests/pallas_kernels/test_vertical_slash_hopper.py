"""Tests of the Hopper kernel of `vertical_slash`, in the interpreter of Mosaic GPU and lowered for a GPU that is not
here."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams
from jax.sharding import PartitionSpec as P

from pallas_kernels.ahead import lower_for_cuda
from pallas_kernels.vertical_slash import hopper, key_lists, vertical_slash
from pallas_kernels.vertical_slash.reference import reference
from tests.pallas_kernels.closeness import assert_attention_close
from tests.pallas_kernels.interpreted import INTERPRETED

FOREVER = jnp.iinfo(jnp.int32).max
JAX_0_11 = jax.__version_info__ >= (0, 11)

pytestmark = pytest.mark.thorough

# n, k, t, s, h, window, gated, ending; every case walks more tiles than fit into shared memory
CASES = {
    "two heads a program, band and far list, gates": (2, 1, 128, 640, 64, 32, True, True),
    "one head a program, causal": (1, 1, 128, 384, 128, 1000, False, False),
    "head_dim 256": (2, 1, 64, 320, 256, 16, False, True),
    "lengths that no block divides": (1, 1, 150, 333, 64, 40, True, True),
}


def arguments(n, k, t, s, h, window, gated, ending):
    """Return inputs in which the first quarter of the keys ends in the middle of the queries. Half of the others stay,
    and some are never seen."""
    rng = np.random.default_rng(0)
    q, key, value = (
        jnp.asarray(rng.normal(size=x), jnp.bfloat16) for x in ((1, n, t, h), (1, k, s, h), (1, k, s, h))
    )
    place = np.arange(s)
    end = np.where(rng.random((1, k, s)) < 0.5, FOREVER, place + window)
    end = np.where(place < s // 4, s - t // 2, end)
    end = np.where(rng.random((1, k, s)) < 0.05, place, end)
    gate = jnp.asarray(np.log(rng.random((1, k, s)) + 1e-3), jnp.float32)
    return q, key, value, jnp.asarray(end, jnp.int32) if ending else None, gate if gated else None


def interpreted(window, dtype, *arguments):
    """Return o of `dtype` and lse, and whether anything raced."""
    q, k, *_ = arguments
    params = InterpretGPUParams(detect_races=True)
    if not JAX_0_11:  # Its interpreter cannot otherwise imitate TMA, which fills with zeros.
        params = dataclasses.replace(params, out_of_bounds_reads="uninitialized", uninitialized_memory="zero")
    band, far = key_lists.gathered(*key_lists.zero_unseen_by_row(*arguments[1:]), window=window)
    first = k.shape[2] - q.shape[2]
    out = hopper.attend(
        q, band, far, dtype, first=first, window=window, interpret=params, machine=INTERPRETED
    )
    jax.block_until_ready(out)
    return out, interpret_pallas_call.get_races().races_found


def check(case, dtype=jnp.bfloat16):
    given = arguments(*case)
    window = case[5]
    q, k, v, end, gate = given
    if end is not None:
        k, v = (jnp.where((end > jnp.arange(end.shape[-1]))[..., None], x, jnp.nan) for x in (k, v))
    (o, lse), raced = interpreted(window, dtype, q, k, v, end, gate)
    # Probabilities are bfloat16 for every dtype of the output.
    assert_attention_close((o.astype(q.dtype), lse), reference(*given, window, q.dtype))
    assert not raced
    return np.asarray(o, np.float32)


@pytest.mark.parametrize("case", CASES)
def test_values_are_right_and_nothing_races(case):
    check(CASES[case])


def test_wider_outputs_have_16_bits():
    """Each number is within bfloat16's rounding of the narrow output, and nearer to the exact one."""
    case = CASES["two heads a program, band and far list, gates"]
    narrow, wide = check(case), check(case, jnp.float32)
    np.testing.assert_allclose(wide, narrow, rtol=2**-8)
    exact, _ = reference(*arguments(*case), case[5], jnp.float32)
    assert np.abs(wide - exact).mean() < 0.9 * np.abs(narrow - exact).mean()


def test_a_planted_bug_is_noticed(monkeypatch):
    monkeypatch.setattr(hopper, "MASKED", 0.0)
    with pytest.raises(AssertionError):
        check(CASES["head_dim 256"])


def call(q, k, v, end, log_gate, window=256):
    return vertical_slash(q, k, v, end, window=window, log_gate=log_gate, implementation="hopper")


def on_a_mesh(*x):
    return jax.shard_map(call, in_specs=P(), out_specs=P())(*x)


@pytest.mark.parametrize(
    ("function", "case"),
    [
        (call, (4, 2, 4096, 4096, 64, True, True)),
        (on_a_mesh, (8, 2, 1001, 1100, 128, False, True)),
        (call, (7, 1, 512, 512, 256, False, False)),
    ],
)
def test_lowers_for_a_gpu(function, case):
    n, k, t, s, h, gated, ending = case
    array = jax.ShapeDtypeStruct
    q, kv = array((1, n, t, h), jnp.bfloat16), array((1, k, s, h), jnp.bfloat16)
    end = array((1, k, s), jnp.int32) if ending else None
    gate = array((1, k, s), jnp.float32) if gated else None
    assert "mosaic_gpu" in lower_for_cuda(function, q, kv, kv, end, gate)


def test_gradients_are_not_summed_over_devices():
    def loss(q, k, v):
        split = jax.shard_map(functools.partial(call, end=None, log_gate=None), out_specs=P("chip"))
        return split(q, k, v)[0].astype(jnp.float32).sum()

    def gradients(*x):
        return jax.grad(loss, (0, 1, 2))(*(jax.sharding.reshard(x, P("chip")) for x in x))

    x = jax.ShapeDtypeStruct((2, 4, 512, 64), jnp.bfloat16)
    text = lower_for_cuda(gradients, x, x, x)
    assert "mosaic_gpu" in text
    assert "all_reduce" not in text


@pytest.mark.parametrize(
    ("h", "dtype", "kind", "message"),
    [
        (96, jnp.bfloat16, "NVIDIA H100 80GB HBM3", "head_dim 64, 128, 256, not 96"),
        (64, jnp.float32, "NVIDIA H100 80GB HBM3", "bfloat16, not float32"),
        (64, jnp.bfloat16, "NVIDIA A100-SXM4-40GB", "H100 or H200, not NVIDIA A100"),
    ],
)
def test_unsupported_arguments_are_refused_in_one_line(h, dtype, kind, message):
    x = jax.ShapeDtypeStruct((1, 2, 64, h), dtype)
    with pytest.raises(ValueError, match="^vertical_slash: implementation 'hopper' takes ") as error:
        lower_for_cuda(functools.partial(call, end=None, log_gate=None), x, x, x, kind=kind)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
