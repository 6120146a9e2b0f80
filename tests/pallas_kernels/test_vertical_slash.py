"""Tests of `vertical_slash`: the definition, every implementation against it, and bugs that must be noticed."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from pallas_kernels import blocks
from pallas_kernels.ahead import lower_for_cuda
from pallas_kernels.vertical_slash import SAVED, ends, tpu, tpu_gather, vertical_slash
from pallas_kernels.vertical_slash.api import IMPLEMENTATIONS
from pallas_kernels.vertical_slash.vjp import Passes
from tests.pallas_kernels.cases.vertical_slash import interpreted
from tests.pallas_kernels.closeness import assert_attention_close, assert_gradients_close
from tests.pallas_kernels.slash_inputs import (
    FOREVER,
    KEPT,
    OTHERS,
    SHAPES,
    TPUS,
    check_sparse,
    compiled,
    few,
    gradients,
    more,
    random_ends,
    tensors,
)

SPARSE = [
    more("square", 1),
    more("square", 32),
    ("long", 7),
    more("long", 64),
    more("chunk", 1),
    ("chunk", 7),
    more("chunk", 1000),
    ("one", 7),
]
CAUSAL = [
    more("square", 7, True),
    more("square", 1000, True),
    ("long", 64, True),
    more("chunk", 1, True),
    ("chunk", 1, False),
]


def test_reference_equals_the_formula():
    b, n, k, t, s, h, window = 1, 4, 2, 4, 7, 3, 2
    q, key, value, gate = tensors((b, n, k, t, s, h), 0)
    end = np.array(random_ends((b, n, k, t, s, h), window, "uneven", 0))
    end[0, 0, 3:] = 0
    o, lse = map(np.asarray, compiled("reference", window, True)(q, key, value, end, gate))
    q, key, value, gate = map(np.asarray, (q, key, value, gate))
    empty = 0
    for head in range(n):
        for i in range(t):
            index, kv = i + s - t, head // (n // k)
            logits, values = [], []
            for j in range(s):
                if j <= index < int(end[0, kv, j]):
                    bias = float(gate[0, kv, j]) if index >= j + window else 0.0
                    logits.append(float(np.dot(q[0, head, i], key[0, kv, j])) / math.sqrt(h) + bias)
                    values.append(np.asarray(value[0, kv, j], np.float64))
            weights = np.exp(logits)
            total = weights.sum()
            empty += total == 0
            expected = sum((w * x for w, x in zip(weights, values, strict=True)), np.zeros(h)) / (total or 1)
            np.testing.assert_allclose(o[0, head, i], expected, atol=1e-6)
            np.testing.assert_allclose(lse[0, head, i], np.log(total) if total else -np.inf, atol=1e-6)
    assert empty  # Some query sees nothing.


@pytest.mark.parametrize("implementation", OTHERS)
@pytest.mark.parametrize(("shape", "window"), SPARSE)
@few
@given(kept=st.sampled_from(list(KEPT)), seed=st.integers(0, 2**16))
def test_keys_with_ends_equal_the_reference(implementation, shape, window, kept, seed):
    check_sparse(implementation, SHAPES[shape], window, kept, seed)


@pytest.mark.parametrize("implementation", OTHERS)
@few
@given(kept=st.sampled_from(list(KEPT)), seed=st.integers(0, 2**16))
def test_keys_with_ends_and_gates_equal_the_reference(implementation, kept, seed):
    check_sparse(implementation, SHAPES["square"], 7, kept, seed, gated=True)


@pytest.mark.parametrize("implementation", OTHERS)
def test_ends_within_the_window_equal_the_reference(implementation):
    shape = SHAPES["square"]
    q, k, v, gate = tensors(shape, 0)
    end = np.random.default_rng(0).integers(-2, 2 * 96, (2, 2, 96), np.int32)
    for seed in (0, 1):
        arguments = q, k, v, np.roll(end, seed, -1), gate
        assert_attention_close(
            compiled(implementation, 7, True)(*arguments), compiled("reference", 7, True)(*arguments)
        )


@pytest.mark.thorough
@pytest.mark.parametrize("implementation", TPUS)
def test_ends_of_the_least_int32_hide_keys(implementation):
    """All keys of one head and half of the other's have the least int32. Output, log-sum-exp and gradients are
    compared."""
    shape = 1, 4, 2, 40, 150, 32
    *arguments, _ = tensors(shape, 0)
    weight = tensors(shape, 1)[0]
    end = np.where(np.arange(150) % 2, FOREVER, np.iinfo(np.int32).min)
    end = jnp.asarray(np.stack([end, np.full(150, np.iinfo(np.int32).min)])[None], jnp.int32)

    def run(implementation):
        def total(q, k, v):
            o, lse = vertical_slash(q, k, v, end, window=7, implementation=implementation)
            return jnp.sum(o * weight) + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0)), (o, lse)

        return jax.jit(jax.grad(total, (0, 1, 2), has_aux=True))(*arguments)

    (actual_gradients, actual), (expected_gradients, expected) = run(implementation), run("reference")
    assert bool(jnp.isneginf(expected[1][:, 2:]).all())
    assert_attention_close(actual, expected)
    assert_gradients_close(actual_gradients, expected_gradients)


@pytest.mark.parametrize("window", [5, 2**31 - 1, 2**40])
def test_a_window_beyond_the_keys_ends_no_key(window):
    end = ends(jnp.asarray([[[True, False, False, False, True]]]), window)
    assert end.dtype == jnp.int32
    assert bool((end >= 5).all())


@pytest.mark.parametrize("implementation", [*OTHERS, "reference"])
@pytest.mark.parametrize("keys", [0, 5])
def test_without_queries_there_is_no_output(implementation, keys):
    q, kv = jnp.zeros((1, 4, 0, 32), jnp.bfloat16), jnp.ones((1, 2, keys, 32), jnp.bfloat16)
    end = jnp.zeros((1, 2, keys), jnp.int32)

    def call(k):
        return vertical_slash(q, k, kv, end, window=3, implementation=implementation)

    o, lse = call(kv)
    assert (o.shape, o.dtype, lse.shape, lse.dtype) == (q.shape, q.dtype, (1, 4, 0), jnp.float32)
    gradient = jax.jit(jax.grad(lambda k: jnp.sum(call(k)[1])))(kv)
    np.testing.assert_array_equal(gradient, np.zeros_like(kv))


@pytest.mark.parametrize("implementation", TPUS)
def test_bfloat16_equals_the_reference(implementation):
    check_sparse(implementation, SHAPES["long"], 16, "uneven", 0, dtype=jnp.bfloat16)
    q, k, v, gate = tensors(SHAPES["square"], 1, jnp.bfloat16)
    arguments = (q, k, v, None, gate)
    assert_attention_close(
        compiled(implementation, 16, True)(*arguments), compiled("reference", 16, True)(*arguments)
    )


@pytest.mark.parametrize("implementation", OTHERS)
@pytest.mark.parametrize(("shape", "window", "gated"), CAUSAL)
def test_causal_attention_equals_the_reference(implementation, shape, window, gated):
    for seed in range(3):
        q, k, v, gate = tensors(SHAPES[shape], seed)
        arguments = (q, k, v, None, gate)
        assert_attention_close(
            compiled(implementation, window, gated)(*arguments),
            compiled("reference", window, gated)(*arguments),
        )


@pytest.mark.parametrize("implementation", OTHERS)
@pytest.mark.thorough
def test_outputs_and_gradients_on_a_mesh(implementation, monkeypatch):
    """The forward pass has ends, and the gradient goes through rematerialisation that saves o and lse by name.

    Kernels run in the general interpreter, which does not know over which axes of the mesh an array varies.
    """
    kernel = implementation != "xla"
    if kernel:
        interpreted = Passes(*(functools.partial(f, interpret=True) for f in IMPLEMENTATIONS[implementation]))
        monkeypatch.setitem(IMPLEMENTATIONS, implementation, interpreted)
    shard_map = functools.partial(jax.shard_map, check_vma=not kernel)
    spec = P(("data", "fsdp"), "tensor")
    *arguments, end = *tensors((4, 8, 4, 70, 70, 32), 0), random_ends((4, 8, 4, 70, 70, 32), 5, "uneven", 0)
    policy = jax.checkpoint_policies.save_only_these_names(SAVED)

    def forward(q, k, v, gate, end):
        return vertical_slash(q, k, v, end, window=5, log_gate=gate, implementation=implementation)

    def loss(implementation, q, k, v, gate):
        o, lse = vertical_slash(q, k, v, window=5, log_gate=gate, implementation=implementation)
        return jnp.sin(o).sum(-1) + lse

    def total(*x):
        saving = jax.checkpoint(functools.partial(loss, implementation), policy=policy)
        return jnp.sum(shard_map(saving, out_specs=spec)(*x))

    mesh = jax.make_mesh(
        (1, 4, 2), ("data", "fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Explicit,) * 3
    )
    with jax.set_mesh(mesh):
        sharded = [jax.device_put(x, spec) for x in (*arguments, end)]
        out = jax.jit(shard_map(forward, out_specs=spec))(*sharded)
        grads = jax.jit(jax.grad(total, (0, 1, 2, 3)))(*sharded[:4])
    assert_attention_close(
        jax.device_get(out), compiled("reference", 5, True)(*arguments[:3], end, arguments[3])
    )
    expected = jax.jit(jax.grad(lambda *x: jnp.sum(loss("reference", *x)), (0, 1, 2, 3)))(*arguments)
    assert_gradients_close(jax.device_get(grads), expected)


@pytest.mark.slow
def test_several_blocks_of_queries_on_a_tpu(monkeypatch):
    monkeypatch.setattr(tpu_gather, "SMALL", tpu_gather.SMALL)  # The case lowers it.
    assert interpreted(tpu, True) < 1e-5


def test_tiles_of_several_rows_equal_the_reference(monkeypatch):
    """Tiles have two (sequence, kv head) rows, and then all four."""
    for rows in (2, 4):
        monkeypatch.setattr(blocks, "logits_at_once", lambda rows=rows: rows * 2 * 48 * 48)
        monkeypatch.setitem(IMPLEMENTATIONS, f"{rows} rows", IMPLEMENTATIONS["xla"])
        check_sparse(f"{rows} rows", SHAPES["square"], 7, "uneven", 0)
    arguments = tensors(SHAPES["square"], 1)
    weight = jnp.ones((2, 4, 96, 32)), jnp.ones((2, 4, 96))
    expected = gradients("reference", 7, arguments, weight)
    assert_gradients_close(gradients("4 rows", 7, arguments, weight), expected)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 256])
@pytest.mark.thorough
def test_lowers_for_cuda(head_dim, dtype):
    """The forward pass, dq, and dk with dv are lowered inside `shard_map`, with its axes checked."""
    q, k = (jax.ShapeDtypeStruct((1, n, 300, head_dim), dtype) for n in (4, 2))
    end, gate = (jax.ShapeDtypeStruct((1, 2, 300), x) for x in (jnp.int32, jnp.float32))

    def loss(q, k, v, end, gate):
        o, lse = vertical_slash(q, k, v, end, window=16, log_gate=gate, implementation="gpu")
        return o.astype(jnp.float32).sum(-1) + lse

    def gradient(*args):
        def total(*x):
            return jnp.sum(jax.shard_map(loss, out_specs=P("chip"))(*x, args[3], args[4]))

        args = [jax.reshard(x, P("chip")) for x in args]
        return jax.grad(total, (0, 1, 2))(*args[:3])

    assert lower_for_cuda(gradient, q, k, k, end, gate).count("xla.gpu.triton") == 3


def test_memory_stays_far_below_all_logits():
    """At 2048 × 2048 one head's logits are 16 MB. The kernels' own memory is tested where they are compiled."""
    shape = (1, 1, 1, 2048, 2048, 32)
    q, k, v, gate = tensors(shape, 0)

    def temporary(f, *x):
        memory = jax.jit(f).lower(*x).compile().memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    call = functools.partial(vertical_slash, window=64, implementation="xla")
    assert temporary(call, q, k, v, random_ends(shape, 64, "all", 0)) < 4 << 20
    assert (
        temporary(jax.grad(lambda q, gate: call(q, k, v, log_gate=gate)[0].sum(), (0, 1)), q, gate) < 4 << 20
    )


def off_by_one_window(q, k, v, end, log_gate, window, dtype):
    return IMPLEMENTATIONS["xla"](q, k, v, end, log_gate, window + 1, dtype)


def kept_too_long(q, k, v, end, *rest):
    return IMPLEMENTATIONS["xla"](q, k, v, jnp.where(end < FOREVER, end + 1, end), *rest)


def padding_shown(q, k, v, end, *rest):
    k, v = (jnp.nan_to_num(x) for x in (k, v))
    return IMPLEMENTATIONS["xla"](q, k, v, jnp.maximum(end, jnp.arange(end.shape[-1]) + 1), *rest)


@pytest.mark.parametrize("bug", [off_by_one_window, kept_too_long, padding_shown])
def test_planted_bugs_are_noticed(monkeypatch, bug):
    monkeypatch.setitem(IMPLEMENTATIONS, bug.__name__, bug)
    with pytest.raises(AssertionError):
        check_sparse(bug.__name__, SHAPES["square"], 7, "uneven", 0, gated=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": 0}, "window is 0"),
        ({"implementation": "cuda"}, "there is no implementation 'cuda', only xla"),
        (
            {"k": jnp.zeros((1, 3, 5, 8)), "v": jnp.zeros((1, 3, 5, 8))},
            "4 query heads are not a multiple of 3",
        ),
        ({"q": jnp.zeros((1, 4, 6, 8))}, "6 queries for 5 keys"),
        ({"v": jnp.zeros((1, 2, 4, 8))}, "v (1, 2, 4, 8)"),
        ({"end": jnp.zeros((1, 2, 4), int)}, "end is (1, 2, 4)"),
        ({"log_gate": jnp.zeros((1, 4, 5))}, "log_gate is (1, 4, 5)"),
        (
            {"implementation": "tpu"},
            "'tpu' takes head_dim 32, 64, 96, 128, 256, not 8; implementation='xla' takes any",
        ),
        ({"segment_ids": jnp.zeros((1, 4), int)}, "segment_ids is (1, 4)"),
        ({"end": jnp.zeros((1, 2, 5), bool)}, "end is bool, but must be whole numbers"),
        ({"end": jnp.zeros((1, 2, 5))}, "end is float32, but must be whole numbers"),
        ({"segment_ids": jnp.zeros((1, 5))}, "segment_ids is float32"),
        (
            {"k": jnp.zeros((1, 0, 5, 8)), "v": jnp.zeros((1, 0, 5, 8))},
            "4 query heads are not a multiple of 0",
        ),
        (
            {"q": jnp.zeros((1, 75, 5, 128), jnp.bfloat16), "implementation": "tpu"}
            | dict.fromkeys("kv", jnp.zeros((1, 1, 5, 128), jnp.bfloat16)),
            "'tpu' takes at most 74 query heads a kv head at this head_dim and dtype, not 75",
        ),
    ],
)
@pytest.mark.usefixtures("shapes_unchecked")
def test_bad_arguments_are_refused_in_one_line(change, message):
    kv = jnp.zeros((1, 2, 5, 8))
    with pytest.raises(ValueError, match="^vertical_slash: ") as error:
        vertical_slash(**{"q": jnp.zeros((1, 4, 5, 8)), "k": kv, "v": kv, "window": 3} | change)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_ends_without_a_window_are_refused_in_one_line():
    with pytest.raises(ValueError, match=r"^ends: window is 0, but a query always sees itself: at least 1$"):
        ends(jnp.zeros((1, 2, 5), bool), 0)
