"""Tests of `vertical_slash`: the definition, every implementation against it, its gradient, and bugs that must be
noticed."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from pallas_kernels import blocks
from pallas_kernels.ahead import lower_for_cuda
from pallas_kernels.vertical_slash import SAVED, ends, tpu, tpu_backward, tpu_gather, vertical_slash
from pallas_kernels.vertical_slash.api import IMPLEMENTATIONS
from pallas_kernels.vertical_slash.tpu_walk import Blocks
from pallas_kernels.vertical_slash.vjp import Passes
from tests.pallas_kernels.cases.vertical_slash import interpreted
from tests.pallas_kernels.closeness import assert_attention_close, assert_gradients_close, nan_outside

FOREVER = jnp.iinfo(jnp.int32).max
OTHERS = [name for name in IMPLEMENTATIONS if name not in ("reference", "hopper")]
few = settings(max_examples=6, deadline=None, derandomize=True, database=None)

SHAPES = {  # b, n, k, t, s, h of whole prompts, a chunk after a ring and one query; no block divides these lengths
    "square": (2, 4, 2, 96, 96, 32),
    "long": (1, 2, 2, 300, 300, 32),
    "chunk": (1, 8, 4, 40, 150, 96),
    "one": (2, 2, 1, 1, 130, 64),
}
more = functools.partial(pytest.param, marks=pytest.mark.thorough)
TPUS = [name if name == "tpu" else more(name) for name in OTHERS]
"""Implementations, of which all but the TPU's run only in thorough tests."""
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


@functools.cache
def compiled(implementation, window, gated):
    """Return a function of q, k, v, end and log_gate, which is left out unless `gated`."""

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
    """Return the ends of keys that are kept as `kept` says, half of them for ever and half until a later index. Some
    keys are seen by nobody."""
    b, _, k, _, s, _ = shape
    rng = np.random.default_rng(seed)
    later = np.where(
        rng.random((b, k, s)) < 0.5, FOREVER, np.arange(s) + window + rng.integers(0, s, (b, k, s))
    )
    end = np.where(KEPT[kept](rng, (b, k, s)), later, np.arange(s) + window)
    padding = (np.arange(s) < rng.integers(0, s, (b, 1, 1)) // 2) | (rng.random((b, k, s)) < 0.05)
    return jnp.asarray(np.where(padding, rng.integers(0, np.arange(s) + 1), end), jnp.int32)


def test_reference_means_the_formula():
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
    assert empty  # the case of a query that sees nothing is among them


def check_sparse(implementation, shape, window, kept, seed, gated=False, dtype=jnp.float32):
    q, k, v, gate = tensors(shape, seed, dtype)
    end = random_ends(shape, window, kept, seed)
    expected = compiled("reference", window, gated)(q, k, v, end, gate)
    k, v = (nan_outside(x, np.asarray(end) > np.arange(end.shape[-1])) for x in (k, v))
    assert_attention_close(compiled(implementation, window, gated)(q, k, v, end, gate), expected)


@pytest.mark.parametrize("implementation", OTHERS)
@pytest.mark.parametrize(("shape", "window"), SPARSE)
@few
@given(kept=st.sampled_from(list(KEPT)), seed=st.integers(0, 2**16))
def test_keys_with_an_end(implementation, shape, window, kept, seed):
    check_sparse(implementation, SHAPES[shape], window, kept, seed)


@pytest.mark.parametrize("implementation", OTHERS)
@few
@given(kept=st.sampled_from(list(KEPT)), seed=st.integers(0, 2**16))
def test_keys_with_an_end_and_a_gate(implementation, kept, seed):
    check_sparse(implementation, SHAPES["square"], 7, kept, seed, gated=True)


@pytest.mark.parametrize("implementation", OTHERS)
def test_any_end_also_within_the_window(implementation):
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
def test_ends_far_below_zero_are_as_zero(implementation):
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
def test_a_window_beyond_the_keys_ends_none_of_them(window):
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


@pytest.mark.thorough
@pytest.mark.parametrize("implementation", TPUS)
def test_an_output_in_float32_is_what_is_rounded(implementation):
    """Its gradient is that of the rounded output, for a cotangent that bfloat16 has."""
    *arguments, _ = tensors((1, 2, 1, 40, 40, 32), 0, jnp.bfloat16)

    def run(dtype):
        def total(q, k, v):
            o, _ = vertical_slash(q, k, v, window=7, dtype=dtype, implementation=implementation)
            return jnp.sum(o.astype(jnp.float32)), o

        return jax.jit(jax.grad(total, (0, 1, 2), has_aux=True))(*arguments)

    (gradients_exact, exact), (gradients_rounded, rounded) = run(jnp.float32), run(None)
    assert (exact.dtype, rounded.dtype) == (jnp.float32, jnp.bfloat16)
    np.testing.assert_array_equal(exact.astype(jnp.bfloat16), rounded)
    assert bool((exact != rounded).any())
    for x, y in zip(gradients_exact, gradients_rounded, strict=True):
        assert x.dtype == jnp.bfloat16
        x, y = (np.asarray(a, np.float32) for a in (x, y))
        assert np.abs(x - y).max() <= 2e-2 * np.abs(y).max()


DOCUMENTS = 70, 1, 25
"""Lengths of the documents that are packed into one sequence. The first and the last have the same id."""


@functools.cache
def packed(implementation, gated):
    """Return a function of q, k, v, log_gate, admitted and segment_ids that gives the gradients of q, k and v, and o
    and lse."""

    def run(q, k, v, gate, admitted, segments):
        o, lse = vertical_slash(
            q,
            k,
            v,
            None if gated else ends(admitted, 7),
            window=7,
            log_gate=gate if gated else None,
            segment_ids=segments,
            implementation=implementation,
        )
        return jnp.sum(jnp.sin(o)) + jnp.sum(lse), (o, lse)

    return jax.jit(jax.grad(run, (0, 1, 2), has_aux=True))


def packed_arguments():
    q, k, v, gate = tensors((1, 4, 2, sum(DOCUMENTS), sum(DOCUMENTS), 32), 4)
    admitted = np.random.default_rng(5).random(gate.shape) < 0.3
    arguments = *(np.asarray(x) for x in (q, k, v, gate)), admitted
    return arguments, np.repeat(np.array([3, 0, 3], np.int32), DOCUMENTS)[None]


@pytest.mark.parametrize("gated", [more(False), True])
def test_reference_keeps_packed_documents_apart(gated):
    arguments, segments = packed_arguments()
    gradients, out = jax.device_get(packed("reference", gated)(*arguments, segments))
    for start, stop in itertools.pairwise(np.cumsum((0, *DOCUMENTS))):
        alone = [x[:, :, start:stop] for x in arguments]
        gradients_alone, expected = packed("reference", gated)(*alone, segments[:, start:stop])
        assert_attention_close([x[:, :, start:stop] for x in out], expected)
        assert_gradients_close([x[:, :, start:stop] for x in gradients], gradients_alone)


@pytest.mark.thorough
@pytest.mark.parametrize("implementation", TPUS)
@pytest.mark.parametrize("gated", [more(False), True])
def test_packed_documents(implementation, gated):
    arguments, segments = packed_arguments()
    gradients, out = packed(implementation, gated)(*arguments, segments)
    expected_gradients, expected = packed("reference", gated)(*arguments, segments)
    assert_attention_close(out, expected)
    assert_gradients_close(gradients, expected_gradients)


@pytest.mark.parametrize("implementation", TPUS)
def test_bfloat16(implementation):
    check_sparse(implementation, SHAPES["long"], 16, "uneven", 0, dtype=jnp.bfloat16)
    q, k, v, gate = tensors(SHAPES["square"], 1, jnp.bfloat16)
    arguments = (q, k, v, None, gate)
    assert_attention_close(
        compiled(implementation, 16, True)(*arguments), compiled("reference", 16, True)(*arguments)
    )


@pytest.mark.parametrize("implementation", OTHERS)
@pytest.mark.parametrize(("shape", "window", "gated"), CAUSAL)
def test_causal(implementation, shape, window, gated):
    for seed in range(3):
        q, k, v, gate = tensors(SHAPES[shape], seed)
        arguments = (q, k, v, None, gate)
        assert_attention_close(
            compiled(implementation, window, gated)(*arguments),
            compiled("reference", window, gated)(*arguments),
        )


def gradients(implementation, window, arguments, weight, end=None):
    """Return the gradients of a weighted sum of o, and of lse where it is finite, with respect to every argument that
    is there."""

    def loss(arguments):
        q, k, v, gate = arguments
        o, lse = vertical_slash(q, k, v, end, window=window, log_gate=gate, implementation=implementation)
        return jnp.sum(o * weight[0]) + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0) * weight[1])

    return jax.jit(jax.grad(jax.checkpoint(loss)))(arguments)


def weighted(shape, window, gated, ending):
    """Return the arguments, the weights and the ends that `gradients` takes."""
    b, n, _, t, _, h = SHAPES[shape]
    rng = np.random.default_rng(1)
    *qkv, gate = tensors(SHAPES[shape], 2)
    end = random_ends(SHAPES[shape], window, "uneven", 3) if ending else None
    arguments = (*qkv, gate if gated else None)
    weight = rng.normal(size=(b, n, t, h)), rng.normal(size=(b, n, t))
    return arguments, weight, end


@functools.cache
def exact_gradients(shape, window, gated, ending):
    """Return the reference's gradients in float64."""
    arguments, weight, end = weighted(shape, window, gated, ending)
    with jax.enable_x64(True):
        exact = jax.tree.map(lambda x: jnp.asarray(np.asarray(x), jnp.float64), arguments)
        return jax.device_get(gradients("reference", window, exact, weight, end))


@pytest.mark.parametrize("implementation", OTHERS)
@pytest.mark.parametrize(
    ("shape", "window", "gated", "ending"),
    [
        more("long", 7, True, False),
        more("chunk", 1, True, False),
        more("square", 7, False, False),
        more("square", 7, False, True),
        ("chunk", 7, True, True),
    ],
)
def test_gradient_against_float64(implementation, shape, window, gated, ending):
    arguments, weight, end = weighted(shape, window, gated, ending)
    actual = gradients(implementation, window, arguments, jax.tree.map(np.float32, weight), end)
    assert_gradients_close(actual, exact_gradients(shape, window, gated, ending))


@pytest.mark.parametrize("implementation", OTHERS)
@pytest.mark.thorough
def test_gradient_in_bfloat16(implementation):
    """Its products take probabilities of 8 bits, so errors reach 2% of the largest gradient. The gate's own gradient is
    float32."""
    b, n, _, t, _, h = SHAPES["square"]
    arguments = tensors(SHAPES["square"], 3, jnp.bfloat16)
    weight = jnp.ones((b, n, t, h)), jnp.zeros((b, n, t))
    actual = gradients(implementation, 7, arguments, weight)
    expected = gradients("reference", 7, jax.tree.map(jnp.float32, arguments), weight)
    assert [x.dtype for x in actual] == [x.dtype for x in arguments]
    for x, y in zip(actual, expected, strict=True):
        assert float(jnp.abs(x.astype(jnp.float32) - y).max()) <= 2e-2 * float(jnp.abs(y).max())


@pytest.mark.parametrize("implementation", OTHERS)
@pytest.mark.thorough
def test_on_a_mesh(implementation, monkeypatch):
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


def test_gradient_on_a_matrix_unit_no_wider_than_a_head(monkeypatch):
    """Elsewhere heads are narrower than the unit, and the sums are turned."""
    arguments = tensors(SHAPES["chunk"], 1)
    b, n, _, t, _, h = SHAPES["chunk"]
    weight = jnp.ones((b, n, t, h)), jnp.ones((b, n, t))
    monkeypatch.setattr(tpu_backward, "unit_width", lambda: h)
    expected = gradients("reference", 7, arguments, weight)
    assert_gradients_close(gradients("tpu", 7, arguments, weight), expected)


def test_gradient_of_keys_that_several_blocks_of_queries_see(monkeypatch):
    """There are more blocks than buffers."""
    monkeypatch.setattr(tpu_backward, "blocks_of_gradient", lambda *_: Blocks(128, 128))
    arguments = tensors((1, 2, 1, 512, 512, 32), 1)
    weight = jnp.ones((1, 2, 512, 32)), jnp.ones((1, 2, 512))
    expected = gradients("reference", 7, arguments, weight)
    assert_gradients_close(gradients("tpu", 7, arguments, weight), expected)


def test_several_blocks_of_queries_on_a_tpu(monkeypatch):
    monkeypatch.setattr(tpu_gather, "SMALL", tpu_gather.SMALL)  # the case lowers it
    assert interpreted(tpu, True) < 1e-5


def test_rows_taken_together_as_on_accelerators(monkeypatch):
    """Two of the tiles' (sequence, kv head) rows are taken together, then all four."""
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
def test_bad_arguments_are_one_line(change, message):
    kv = jnp.zeros((1, 2, 5, 8))
    with pytest.raises(ValueError, match="^vertical_slash: ") as error:
        vertical_slash(**{"q": jnp.zeros((1, 4, 5, 8)), "k": kv, "v": kv, "window": 3} | change)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_ends_of_no_window_is_one_line():
    with pytest.raises(ValueError, match=r"^ends: window is 0, but a query always sees itself: at least 1$"):
        ends(jnp.zeros((1, 2, 5), bool), 0)
