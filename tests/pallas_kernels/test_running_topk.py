"""Tests of `running_topk`: the definition, every implementation against it, and bugs that must be noticed."""

import bisect
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from pallas_kernels.ahead import lower_for_cuda
from pallas_kernels.running_topk import ranks, running_topk
from pallas_kernels.running_topk.api import FASTEST, IMPLEMENTATIONS

OTHERS = [name for name in IMPLEMENTATIONS if name != "reference"]
TPUS = [pytest.param(x, marks=() if x == "tpu" else pytest.mark.thorough) for x in OTHERS]
"""Implementations. All but the TPU's run only in thorough tests."""
FOREVER = jnp.iinfo(jnp.int32).max
few = settings(max_examples=8, deadline=None, derandomize=True, database=None)

SHAPES = {  # b, k, s, t, window
    "square": (2, 2, 128, 128, 7),
    "chunk": (1, 2, 300, 41, 64),
    "no window": (1, 3, 67, 67, 1),
    "window longer than all": (1, 2, 40, 40, 100),
    "one key": (1, 1, 1, 1, 1),
}


@functools.cache
def compiled(implementation, window, queries):
    return jax.jit(
        functools.partial(running_topk, window=window, queries=queries, implementation=implementation)
    )


def permutations(shape, seed):
    """Return ranks in random, rising or falling order, and a mask of competing keys: all, none or some in each row."""
    b, k, s, _, _ = shape
    rng = np.random.default_rng(seed)
    rows = [rng.permutation(s) for _ in range(b * k)]
    rows = [(row, np.sort(row), np.sort(row)[::-1])[rng.choice(3, p=[0.6, 0.2, 0.2])] for row in rows]
    competes = rng.random((b, k, s)) < rng.choice([0, 0.7, 1], (b, k, 1), p=[0.1, 0.5, 0.4])
    return jnp.asarray(np.reshape(rows, (b, k, s)), jnp.int32), jnp.asarray(competes)


def check(implementation, shape, seed):
    b, heads, s, t, window = shape
    rank, competes = permutations(shape, seed)
    k = jnp.asarray(np.random.default_rng(seed).integers(0, s + 3, (b, heads)) >> (seed % 4), jnp.int32)
    actual = compiled(implementation, window, t)(rank, k=k, competes=competes)
    expected = compiled("reference", window, t)(rank, k=k, competes=competes)
    for x, y in zip(actual, expected, strict=True):
        assert x.dtype == jnp.int32
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("shape", ["square", "chunk", "no window"])
def test_reference_equals_a_simulated_cache(shape):
    """In the simulation keys leave the window one by one, and beyond k keys the worst is dropped."""
    b, heads, s, t, window = SHAPES[shape]
    rank, competes = permutations(SHAPES[shape], 0)
    k = 5
    places = np.full((b, heads), k, np.int32)
    tau, end = compiled("reference", window, t)(rank, k=places, competes=competes)
    rank, competes, tau, end = map(np.asarray, (rank, competes, tau, end))
    for row in np.ndindex(b, heads):
        kept = []
        for index in range(s):
            leaves = index - window
            if leaves >= 0 and competes[row][leaves]:
                bisect.insort(kept, int(rank[row][leaves]))
                del kept[k:]
            if index < s - t:
                continue
            assert int(tau[row][index - s + t]) == (kept[-1] if len(kept) == k else s)
            ended = [j for j in range(max(leaves + 1, 0)) if competes[row][j] and index >= int(end[row][j])]
            dropped = [
                j for j in range(max(leaves + 1, 0)) if competes[row][j] and int(rank[row][j]) not in kept
            ]
            assert ended == dropped
    assert np.all(np.diff(tau) <= 0), "a dropped key stays dropped"
    assert np.all(end[~competes] == FOREVER)
    assert np.all((end >= np.arange(s) + window) & (end >= s - t))
    assert np.all((end < s) | (end == FOREVER))


def test_a_worked_example():
    """With two sinks, a window of two and k = 2, the keys that are left at indices 4 to 9 are listed."""
    scores = np.float32([[[0, 0, 0.2, 0.9, 0.1, 0.5, 0.7, 0.3, 0.8, 0.6]]])
    competes = jnp.asarray((np.arange(10) >= 2)[None, None])
    _, end = jax.jit(lambda x: running_topk(ranks(x), k=2, window=2, competes=competes))(scores)
    key = np.arange(10)
    left = [list(key[(key >= 2) & (key + 2 <= i) & (i < np.asarray(end[0, 0]))]) for i in range(4, 10)]
    assert left == [[2], [2, 3], [2, 3], [3, 5], [3, 6], [3, 6]]


def test_ranks_put_equal_scores_in_order_and_nan_last():
    scores = np.float32([1.0, np.nan, 3.0, 1.0, -np.inf, -0.0, 0.0, np.nan, np.inf])
    np.testing.assert_array_equal(jax.jit(ranks)(scores), [2, 7, 1, 3, 6, 4, 5, 8, 0])


@pytest.mark.parametrize("implementation", OTHERS)
@pytest.mark.parametrize("shape", SHAPES)
@few
@given(seed=st.integers(0, 2**16))
def test_implementations_equal_the_reference(implementation, shape, seed):
    check(implementation, SHAPES[shape], seed)


@pytest.mark.parametrize("implementation", OTHERS)
@pytest.mark.thorough
def test_a_long_row_equals_the_reference(implementation):
    """The length is not a power of two, and every implementation has several blocks."""
    check(implementation, (1, 1, 5000, 4500, 100), 0)


@pytest.mark.parametrize("implementation", ["xla", "counts"])
def test_tiles_of_several_rows_equal_the_reference(monkeypatch, implementation):
    """Three of the four rows are processed at once and then the other; in the second case all four are."""
    module = importlib.import_module(f"pallas_kernels.running_topk.{implementation}")
    for rows, numbers in (("three", 3 * 128), ("all", 1 << 24)):
        monkeypatch.setattr(module, "logits_at_once", lambda numbers=numbers: numbers)
        monkeypatch.setitem(IMPLEMENTATIONS, f"{rows} rows", IMPLEMENTATIONS[implementation])
        check(f"{rows} rows", SHAPES["square"], 0)


@pytest.mark.parametrize("shape", ["square", "chunk", "window longer than all"])
def test_counts_are_carried_from_chunk_to_chunk(monkeypatch, shape):
    """Each chunk has one block, and the last one is partly filled."""
    module = importlib.import_module("pallas_kernels.running_topk.counts")
    monkeypatch.setattr(module, "BLOCK", 16)
    monkeypatch.setattr(module, "COUNTS", 1)
    monkeypatch.setitem(IMPLEMENTATIONS, "counts of 16", IMPLEMENTATIONS["counts"])
    for seed in range(4):
        check("counts of 16", SHAPES[shape], seed)


@pytest.mark.parametrize("implementation", TPUS)
def test_k_is_a_number_an_array_or_one_for_each_row(implementation):
    rank, _ = permutations(SHAPES["square"], 0)
    call = compiled(implementation, 7, 128)
    expected = call(rank, k=np.full((2, 2), 9, np.int32))
    for k in (jnp.int32(9), np.int32(9)):
        jax.tree.map(np.testing.assert_array_equal, call(rank, k=jnp.asarray(k)), expected)
    static = functools.partial(running_topk, k=9, window=7, implementation=implementation)
    jax.tree.map(np.testing.assert_array_equal, jax.jit(static)(rank), expected)


@pytest.mark.parametrize("implementation", OTHERS)
@pytest.mark.thorough
def test_on_a_mesh_inside_a_scan(implementation):
    spec = P(("data", "fsdp"), "tensor")
    rank, competes = permutations((4, 4, 70, 70, 5), 0)
    k = jnp.full((4, 4), 9)

    def local(rank, k, competes):
        def step(total, _):
            tau, end = running_topk(rank, k=k, window=5, competes=competes, implementation=implementation)
            return total + tau, end

        return jax.lax.scan(step, jnp.zeros_like(rank), None, length=2)

    mesh = jax.make_mesh(
        (1, 4, 2), ("data", "fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Explicit,) * 3
    )
    with jax.set_mesh(mesh):
        args = [jax.device_put(x, spec) for x in (rank, k, competes)]
        # The interpreter of GPU kernels does not support checked axes. Their lowering below does.
        call = jax.shard_map(local, out_specs=(spec, P(None, *spec)), check_vma=implementation != "gpu")
        total, ends = jax.device_get(jax.jit(call)(*args))
    tau, end = running_topk(rank, k=k, window=5, competes=competes, implementation="reference")
    np.testing.assert_array_equal(total, 2 * tau)
    np.testing.assert_array_equal(ends[1], end)


@pytest.mark.parametrize("implementation", ["xla", "counts"])
def test_memory_stays_far_below_all_pairs(implementation):
    """8192 keys have 64 million pairs."""
    rank = jax.ShapeDtypeStruct((1, 1, 8192), jnp.int32)
    call = functools.partial(running_topk, k=444, window=64, implementation=implementation)
    memory = jax.jit(call).lower(rank).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 8 << 20


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["xla", "counts"])
def test_memory_is_linear_in_the_number_of_keys(implementation):
    """8 rows of a million keys take some tens of bytes per key, about as many as 128K keys."""

    def temporaries(s):
        call = functools.partial(running_topk, k=s // 4, window=256, implementation=implementation)
        memory = jax.jit(call).lower(jax.ShapeDtypeStruct((1, 8, s), jnp.int32)).compile().memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    million = temporaries(1 << 20)
    assert million < 8 * 40 << 20
    assert million < 9 * temporaries(1 << 17)


@pytest.mark.parametrize("s", [1000, 1 << 17])
@pytest.mark.thorough
def test_lowers_for_cuda(s):
    rank = jax.ShapeDtypeStruct((1, 2, s), jnp.int32)
    call = functools.partial(running_topk, k=44, window=64, implementation="gpu")
    assert lower_for_cuda(call, rank).count("xla.gpu.triton") == 1

    def on_shards(rank):
        return jax.shard_map(call, out_specs=P("chip"))(jax.reshard(rank, P("chip")))

    assert lower_for_cuda(on_shards, rank).count("xla.gpu.triton") == 1


def test_every_platform_has_a_default():
    assert FASTEST.keys() == {"cpu", "tpu", "gpu"}
    assert set(FASTEST.values()) <= IMPLEMENTATIONS.keys()


def off_by_one_window(rank, k, competes, window, t):
    return IMPLEMENTATIONS["xla"](rank, k, competes, window + 1, t)


def one_too_many(rank, k, competes, window, t):
    return IMPLEMENTATIONS["xla"](rank, k + 1, competes, window, t)


def all_compete(rank, k, competes, window, t):
    return IMPLEMENTATIONS["xla"](rank, k, jnp.ones_like(competes), window, t)


@pytest.mark.parametrize("bug", [off_by_one_window, one_too_many, all_compete])
def test_planted_bugs_are_noticed(monkeypatch, bug):
    monkeypatch.setitem(IMPLEMENTATIONS, bug.__name__, bug)
    with pytest.raises(AssertionError):
        check(bug.__name__, SHAPES["square"], 0)


@pytest.mark.parametrize("implementation", [*OTHERS, "reference"])
def test_without_keys_there_is_no_threshold(implementation):
    rank = jnp.zeros((1, 2, 0), jnp.int32)
    tau, end = running_topk(rank, k=3, window=2, implementation=implementation)
    assert (tau.shape, end.shape) == (rank.shape, rank.shape)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": jnp.zeros((1, 2, 8), jnp.int16)}, "rank is int16, not int32"),
        ({"rank": jnp.zeros((1, 8), jnp.int32)}, "rank is (1, 8), not [b k s]"),
        ({"k": -1}, "k is -1"),
        ({"k": jnp.zeros((2, 1), int)}, "k is (2, 1), but must be one number or (1, 2)"),
        ({"k": jnp.ones(())}, "k is float32, but must be whole numbers"),
        ({"window": 0}, "window is 0"),
        ({"queries": 9}, "9 queries for 8 keys"),
        ({"queries": 0}, "0 queries for 8 keys"),
        ({"competes": jnp.zeros((1, 2, 7), bool)}, "competes is (1, 2, 7)"),
        ({"implementation": "cuda"}, "'cuda', only xla, counts, reference, tpu, gpu"),
        (
            {"rank": jnp.zeros((1, 1, (1 << 17) + 1), jnp.int32), "implementation": "tpu"},
            "at most 131072 keys, not 131073; implementation='xla' takes any",
        ),
    ],
)
@pytest.mark.usefixtures("shapes_unchecked")
def test_bad_arguments_are_refused_in_one_line(change, message):
    arguments = {"rank": jnp.zeros((1, 2, 8), jnp.int32), "k": 3, "window": 2}
    with pytest.raises(ValueError, match="^running_topk: ") as error:
        running_topk(**arguments | change)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
