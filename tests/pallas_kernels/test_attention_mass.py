"""Tests of `attention_mass`: the definition, every implementation against it, and bugs that must be noticed."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from pallas_kernels.ahead import lower_for_cuda
from pallas_kernels.attention_mass import attention_mass, paged_attention_mass
from pallas_kernels.attention_mass.api import IMPLEMENTATIONS
from tests.pallas_kernels.closeness import nan_outside

OTHERS = [name for name in IMPLEMENTATIONS if name != "reference"]
TPUS = [pytest.param(x, marks=() if x == "tpu" else pytest.mark.thorough) for x in OTHERS]
"""Implementations. All but the TPU's run only in thorough tests."""
few = settings(max_examples=4, deadline=None, derandomize=True, database=None)

SHAPES = {  # b, n, k, t, s, h; no tile divides these lengths
    "square": (1, 4, 2, 150, 150, 32),
    "window": (2, 6, 2, 16, 300, 64),
    "chunk": (1, 2, 2, 70, 190, 96),
    "guidance": (1, 4, 1, 90, 40, 32),
}
CASES = {  # shape, over, group, offset, True if lse is given, True if some keys are not valid
    "KVPOP's target": ("square", "logsumexp", "max", 7, True, False),
    "KVzip's score": ("chunk", "max", "max", 0, False, True),
    "SnapKV's window": ("window", "sum", "mean", 0, False, False),
    "OracleKV's guidance": ("guidance", "sum", "sum", None, False, True),
    "largest of each head, added": ("square", "max", "sum", None, True, True),
    "logarithm of the mean": ("square", "logsumexp", "mean", 0, False, True),
}


def tensors(shape, seed, dtype=jnp.float32):
    """Return q, k, valid and lse. Some heads have few valid keys, and one may have none. A tenth of lse is -inf."""
    b, n, k, t, s, h = shape
    rng = np.random.default_rng(seed)
    q, key = (jnp.asarray(2 * rng.normal(size=x), dtype) for x in ((b, n, t, h), (b, k, s, h)))
    valid = rng.random((b, k, s)) < rng.choice([0.1, 0.7, 1], (b, k, 1))
    valid[0, 0] &= rng.random() < 0.8
    lse = np.where(rng.random((b, n, t)) < 0.1, -np.inf, 3 * rng.normal(size=(b, n, t)))
    return q, key, jnp.asarray(valid), jnp.asarray(lse, jnp.float32)


@functools.cache
def compiled(implementation, case):
    _, over, group, offset, lse_given, some_valid = CASES[case]

    def call(q, k, valid, lse):
        return attention_mass(
            q,
            k,
            over=over,
            group=group,
            offset=offset,
            valid=valid if some_valid else None,
            lse=lse if lse_given else None,
            implementation=implementation,
        )

    return jax.jit(call)


def assert_close(actual, expected):
    assert actual.dtype == jnp.float32
    np.testing.assert_allclose(actual, expected, atol=1e-5, rtol=1e-5)


def check(implementation, case, seed, dtype=jnp.float32):
    shape, _, _, _, lse_given, some_valid = CASES[case]
    q, k, valid, lse = tensors(SHAPES[shape], seed, dtype)
    expected = compiled("reference", case)(q, k, valid, lse)
    if lse_given:
        q = nan_outside(q, ~np.isneginf(lse))
    if some_valid:
        k = nan_outside(k, valid)
    assert_close(compiled(implementation, case)(q, k, valid, lse), expected)


@pytest.mark.parametrize("case", CASES)
def test_reference_equals_the_formula(case):
    shape, over, group, offset, lse_given, some_valid = CASES[case]
    b, n, k, t, s, h = (1, 4, 2, *(x // 10 for x in SHAPES[shape][3:5]), 3)
    q, key, valid, lse = tensors((b, n, k, t, s, h), 1)
    if offset:
        offset = 2
    call = functools.partial(
        attention_mass, over=over, group=group, offset=offset, implementation="reference"
    )
    actual = jax.jit(call)(q, key, valid=valid if some_valid else None, lse=lse if lse_given else None)
    logits = np.einsum(
        "bngth,bnsh->bngts", np.asarray(q, float).reshape(b, k, -1, t, h), np.asarray(key, float)
    )
    counted = np.array([
        [[offset is None or i + s - t >= j + offset for j in range(s)] for i in range(t)]
    ]) & (np.asarray(valid)[:, :, None] | (not some_valid))  # fmt: skip
    weights = np.exp(logits / math.sqrt(h)) * counted[:, :, None]
    total = np.exp(np.asarray(lse, float)).reshape(weights.shape[:4]) if lse_given else weights.sum(-1)
    p = weights / np.where(total > 0, total, np.inf)[..., None]
    head = p.max(3) if over == "max" else p.sum(3)
    expected = {"max": head.max(2), "mean": head.mean(2), "sum": head.sum(2)}[group]
    np.testing.assert_allclose(
        np.exp(actual) if over == "logsumexp" else actual, expected, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("implementation", OTHERS)
@pytest.mark.parametrize("case", CASES)
@few
@given(seed=st.integers(0, 2**16))
def test_implementations_equal_the_reference(implementation, case, seed):
    check(implementation, case, seed)


@pytest.mark.parametrize("implementation", TPUS)
@pytest.mark.parametrize("case", ["KVPOP's target", "SnapKV's window"])
def test_bfloat16_equals_the_reference(implementation, case):
    check(implementation, case, 0, jnp.bfloat16)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_factors_scale_queries_and_keys(implementation):
    """Keys with a factor of 0 receive nothing."""
    q, k, valid, _ = tensors(SHAPES["chunk"], 3)
    rng = np.random.default_rng(4)
    query_factors = rng.uniform(0.1, 3, q.shape[:3]).astype(np.float32)
    key_factors = rng.uniform(0, 3, (*q.shape[:2], k.shape[2])).astype(np.float32)
    key_factors[..., ::7] = 0
    call = functools.partial(
        attention_mass, over="max", group="max", valid=valid, implementation=implementation
    )
    actual = jax.jit(call)(q, k, query_factor=jnp.asarray(query_factors), key_factor=jnp.asarray(key_factors))
    b, _, t, h = q.shape
    logits = np.einsum(
        "bngth,bnsh->bngts", np.asarray(q, float).reshape(b, 2, -1, t, h), np.asarray(k, float)
    )
    counted = np.tril(np.ones(logits.shape[3:], bool), k.shape[2] - t) & np.asarray(valid)[:, :, None, None]
    weights = np.exp(logits / math.sqrt(h)) * counted
    p = weights / np.maximum(weights.sum(-1, keepdims=True), 1e-300)
    p = (p * query_factors.reshape(b, 2, -1, t, 1)).max(3) * key_factors.reshape(b, 2, -1, k.shape[2])
    np.testing.assert_allclose(actual, p.max(2), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("implementation", OTHERS)
def test_extreme_probabilities_equal_the_reference(implementation):
    """The lse is that of other keys, so that p ranges from e^-200 to e^200."""
    q, k, valid, lse = tensors(SHAPES["square"], 0)
    call, expected = (compiled(name, "KVPOP's target") for name in (implementation, "reference"))
    for shift in (-200, 200):
        arguments = q, k, valid, np.asarray(lse) + np.float32(shift)
        assert_close(call(*arguments), expected(*arguments))


def test_tiles_of_several_rows_equal_the_reference(monkeypatch):
    """A tile has all four (sequence, kv head) rows."""
    monkeypatch.setattr("pallas_kernels.attention_mass.xla.logits_at_once", lambda: 1 << 24)
    monkeypatch.setitem(IMPLEMENTATIONS, "together", IMPLEMENTATIONS["xla"])
    check("together", "SnapKV's window", 0)


@pytest.mark.parametrize("implementation", OTHERS)
@pytest.mark.thorough
def test_many_tiles_equal_the_reference(implementation):
    """There are more resident and streamed rows than any implementation has in a tile."""
    shape = (1, 1, 1, 600, 1100, 32)
    q, k, _, _ = tensors(shape, 0)
    actual, expected = (
        jax.jit(functools.partial(attention_mass, over="logsumexp", group="max", implementation=name))(q, k)
        for name in (implementation, "reference")
    )
    assert_close(actual, expected)


@pytest.mark.parametrize("implementation", OTHERS)
def test_keys_in_pages_equal_contiguous_keys(implementation):
    """Pages are shuffled, and lengths are 0, 1, one more than a page, and all entries. Beyond the lengths, entries are
    NaN and the table points beyond the pool."""
    b, n, k, t, columns, page, h = 2, 4, 2, 5, 6, 16, 32
    rng = np.random.default_rng(0)
    length = np.array([[0, 1], [17, 96]])
    table = rng.permutation(b * k * columns).reshape(b, k, columns)
    entries = rng.normal(size=(b, k, columns * page, 2 * h))
    stored = np.arange(columns * page) < length[..., None]
    pool = np.empty((b * k * columns, page, 2 * h))
    pool[table] = np.where(stored[..., None], entries, np.nan).reshape(b, k, columns, page, 2 * h)
    table = np.where(np.arange(columns) * page < length[..., None], table, 10**6)
    q = jnp.asarray(rng.normal(size=(b, n, t, h)), jnp.float32)
    call = functools.partial(paged_attention_mass, over="sum", group="mean", implementation=implementation)
    actual = jax.jit(call)(
        q, jnp.asarray(pool, jnp.float32), jnp.asarray(table, jnp.int32), jnp.asarray(length)
    )
    k_dense = jnp.asarray(entries[..., :h], jnp.float32)
    dense = functools.partial(
        attention_mass, over="sum", group="mean", offset=None, implementation="reference"
    )
    assert_close(actual, jax.jit(dense)(q, k_dense, valid=jnp.asarray(stored)))


@pytest.mark.parametrize("implementation", [*OTHERS, "reference"])
@pytest.mark.parametrize(("over", "nothing"), [("sum", 0), ("logsumexp", -math.inf)])
def test_without_queries_or_keys_nothing_counts(implementation, over, nothing):
    options = {"over": over, "group": "max", "implementation": implementation}
    q, k = jnp.ones((1, 4, 3, 32)), jnp.ones((1, 2, 5, 32))
    np.testing.assert_array_equal(attention_mass(q[:, :, :0], k, **options), np.full((1, 2, 5), nothing))
    assert attention_mass(q, k[:, :, :0], offset=None, **options).shape == (1, 2, 0)
    pages = jnp.ones((0, 8, 64)), jnp.zeros((1, 2, 0), jnp.int32), jnp.ones((1, 2), jnp.int32)
    assert paged_attention_mass(q, *pages, **options).shape == (1, 2, 0)


@pytest.mark.parametrize("implementation", OTHERS)
@pytest.mark.thorough
def test_on_a_mesh_inside_a_scan(implementation):
    spec = P(("data", "fsdp"), "tensor")
    q, k, valid, _ = tensors((4, 8, 4, 20, 70, 32), 0)
    call = functools.partial(attention_mass, over="sum", group="max")

    def step(total, _):
        more = jax.shard_map(
            lambda q, k, valid: call(q, k, valid=valid, implementation=implementation),
            out_specs=spec,
            # The interpreter of GPU kernels does not support this check. Their lowering below does.
            check_vma=implementation != "gpu",
        )(q_sharded, k_sharded, valid_sharded)
        return total + more, None

    mesh = jax.make_mesh(
        (1, 4, 2), ("data", "fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Explicit,) * 3
    )
    with jax.set_mesh(mesh):
        q_sharded, k_sharded, valid_sharded = (jax.device_put(x, spec) for x in (q, k, valid))
        start = jax.device_put(jnp.zeros(valid.shape), spec)
        out, _ = jax.jit(lambda start: jax.lax.scan(step, start, None, length=2))(start)
    assert_close(jax.device_get(out), 2 * call(q, k, valid=valid, implementation="reference"))


@pytest.mark.parametrize("implementation", OTHERS)
def test_no_gradient_flows(implementation):
    q, k, _, _ = tensors((1, 2, 1, 16, 32, 32), 0)

    def total(q, k):
        mass = attention_mass(q, k, over="sum", group="max", implementation=implementation)
        return jnp.sum(mass) + jnp.sum(q) + jnp.sum(k)

    for gradient in jax.jit(jax.grad(total, (0, 1)))(q, k):
        np.testing.assert_array_equal(gradient, 1)


def test_memory_stays_far_below_all_logits():
    """At 2048 × 2048 one head's logits are 16 MB."""
    x = jax.ShapeDtypeStruct((1, 1, 2048, 32), jnp.float32)
    call = functools.partial(attention_mass, over="sum", group="max", implementation="xla")
    memory = jax.jit(call).lower(x, x).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 4 << 20


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 256])
@pytest.mark.thorough
def test_lowers_for_cuda(head_dim, dtype):
    q, k = (jax.ShapeDtypeStruct((1, n, s, head_dim), dtype) for n, s in ((4, 100), (2, 3000)))
    call = functools.partial(attention_mass, over="sum", group="mean", implementation="gpu")
    assert lower_for_cuda(call, q, k).count("xla.gpu.triton") == 2

    def on_shards(*args):
        args = [jax.reshard(x, P("chip")) for x in args]
        return jax.shard_map(call, out_specs=P("chip"))(*args)

    if head_dim == 96:
        assert lower_for_cuda(on_shards, q, k).count("xla.gpu.triton") == 2


def late_by_one(*args):
    return IMPLEMENTATIONS["xla"](*args[:-1], args[-1] + 1)


def query_too_many(q, k, valid, lse, *args):
    return IMPLEMENTATIONS["xla"](q, k, valid, jnp.maximum(lse, -10), *args)


def heads_not_reduced(q, k, valid, lse, *args):
    return IMPLEMENTATIONS["xla"](q[:, ::2], k, valid, lse[:, ::2], *args)


@pytest.mark.parametrize("bug", [late_by_one, query_too_many, heads_not_reduced])
def test_planted_bugs_are_noticed(monkeypatch, bug):
    monkeypatch.setitem(IMPLEMENTATIONS, bug.__name__, bug)
    with pytest.raises(AssertionError):
        check(bug.__name__, "KVPOP's target", 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"over": "mean"}, "over is 'mean', but must be one of logsumexp, max, sum"),
        ({"group": "min"}, "group is 'min'"),
        ({"implementation": "cuda"}, "'cuda', only xla, reference, tpu, gpu"),
        ({"k": jnp.zeros((1, 3, 5, 8))}, "4 query heads are not a multiple of 3"),
        ({"k": jnp.zeros((1, 2, 5, 4))}, "k float32(1, 2, 5, 4)"),
        ({"k": jnp.zeros((1, 2, 5, 8), jnp.bfloat16)}, "k bfloat16(1, 2, 5, 8)"),
        ({"q": jnp.zeros((1, 4, 6, 8))}, "6 queries for 5 keys"),
        ({"offset": -1}, "offset is -1"),
        ({"offset": 3}, "offset 3 needs lse"),
        ({"valid": jnp.zeros((1, 2, 4), bool)}, "valid is (1, 2, 4)"),
        ({"lse": jnp.zeros((1, 2, 5))}, "lse is (1, 2, 5)"),
        ({"query_factor": jnp.zeros((1, 4, 4))}, "query_factor is (1, 4, 4)"),
        ({"key_factor": jnp.zeros((1, 2, 5))}, "key_factor is (1, 2, 5)"),
        ({"implementation": "tpu"}, "head_dim 32, 64, 96, 128, 256, not 8"),
        (
            {"q": jnp.zeros((1, 4, 5, 32), jnp.float16), "k": jnp.zeros((1, 2, 5, 32), jnp.float16)}
            | {"implementation": "gpu"},
            "float32 or bfloat16, not float16; implementation='xla' takes any",
        ),
        (
            {"q": jnp.zeros((1, 38, 5, 256)), "k": jnp.zeros((1, 1, 5, 256)), "implementation": "tpu"},
            "'tpu' takes at most 37 query heads a kv head at this head_dim and dtype, not 38",
        ),
    ],
)
@pytest.mark.usefixtures("shapes_unchecked")
def test_bad_arguments_are_refused_in_one_line(change, message):
    arguments = {"q": jnp.zeros((1, 4, 5, 8)), "k": jnp.zeros((1, 2, 5, 8)), "over": "sum", "group": "max"}
    with pytest.raises(ValueError, match="^attention_mass: ") as error:
        attention_mass(**arguments | change)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pool": jnp.zeros((4, 16, 8))}, "head_dim 8 needs [pages, page, 16]"),
        ({"length": jnp.zeros((1, 3), int)}, "length is (1, 3)"),
        ({"length": jnp.zeros((1, 2))}, "length is float32, but must be whole numbers"),
        ({"pool": jnp.zeros((0, 16, 16))}, "pool (0, 16, 16) holds no entry, but page_table has 2 columns"),
    ],
)
@pytest.mark.usefixtures("shapes_unchecked")
def test_bad_pages_are_refused_in_one_line(change, message):
    arguments = {
        "q": jnp.zeros((1, 4, 5, 8)),
        "pool": jnp.zeros((4, 16, 16)),
        "page_table": jnp.zeros((1, 2, 2), int),
        "length": jnp.zeros((1, 2), int),
        "over": "sum",
        "group": "max",
    }
    with pytest.raises(ValueError, match="^paged_attention_mass: ") as error:
        paged_attention_mass(**arguments | change)
    assert message in str(error.value)
