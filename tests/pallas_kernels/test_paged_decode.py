"""Tests of `paged_decode`: the definition, every implementation against it, and bugs that must be noticed."""

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
from pallas_kernels.bits import as_bits
from pallas_kernels.paged_decode import Append, api, chunked, paged_decode, paged_decode_append
from pallas_kernels.paged_decode.api import IMPLEMENTATIONS
from pallas_kernels.paged_decode.selection import scattered_to_front, sorted_to_front
from pallas_kernels.vertical_slash import vertical_slash
from tests.pallas_kernels.closeness import assert_attention_close
from tests.pallas_kernels.paged import OTHERS, SHAPES, TPUS, biased, cache, compiled

few = settings(max_examples=6, deadline=None, derandomize=True, database=None)

ALL, NOT_ON_TPU = OTHERS, ["xla", "gpu"]
CASES = [  # shape, with a ring, with new, with selected pages
    pytest.param(implementation, shape, *rest, marks=pytest.mark.thorough if "tiles" in shape else ())
    for shape, *rest, implementations in [
        ("one", True, True, False, ALL),
        ("several tiles", True, True, False, ALL),
        ("many tiles", True, True, False, ["tpu"]),
        ("no ring", False, True, True, ALL),
        ("page of one", True, False, True, NOT_ON_TPU),
        ("chunk", False, False, False, ALL),
    ]
    for implementation in implementations
]


def draw_lengths(data, shape):
    """Draw the lengths of the rings and of the retained entries: 0, 1, about a page, everything, or any number."""
    b, _, k, _, _, page, columns, ring_pages = shape

    def length(largest):
        named = {0, 1, page - 1, page, page + 1, largest}
        return st.sampled_from(sorted(x for x in named if x <= largest)) | st.integers(0, largest)

    ring = data.draw(st.lists(length(ring_pages * page), min_size=b, max_size=b))
    return ring, data.draw(st.lists(length((columns - ring_pages) * page), min_size=b * k, max_size=b * k))


def check(
    implementation, shape, ring_length, length, seed, ring=True, new=True, chosen=False, dtype=jnp.float32
):
    arguments = cache(shape, ring_length, length, seed, dtype)
    options = shape[-1], ring, new, chosen
    expected = compiled("reference", *options)(*arguments)
    assert_attention_close(compiled(implementation, *options)(*arguments), expected)


def test_reference_equals_the_formula():
    b, n, k, t, h, page, columns, ring_pages = shape = (2, 4, 2, 2, 3, 2, 4, 2)
    *arguments, _ = cache(shape, [3, 0], [0, 3, 0, 4], 0)
    q, pool, page_table, length, ring_length, new = jax.device_get(arguments)
    pages = np.random.default_rng(0).random((b, k, columns - ring_pages)) < 0.5
    plane = np.asarray(biased(ring_pages, pool, page_table, length))
    for ring, with_new, chosen, bias in (
        (True, True, False, None),
        (False, False, False, None),
        (True, False, True, None),
        (True, True, True, plane),
        (False, False, False, np.where(plane > -np.inf, -np.inf, plane)),
    ):
        call = compiled("reference", ring_pages, ring, with_new, chosen)
        o, lse = map(np.asarray, call(*arguments, pages, bias))
        for row, head, i in np.ndindex(b, n, t):
            kv = head // (n // k)
            places = [*range(int(ring_length[row]) if ring else 0)]
            places += [
                ring_pages * page + x
                for x in range(int(length[row, kv]))
                if not chosen or pages[row, kv, x // page]
            ]
            at = [(page_table[row, kv, x // page], x % page) for x in places]
            entries = [pool[x] for x in at]
            if with_new:
                entries += [np.concatenate([x[row, kv, j] for x in new]) for j in range(i + 1)]
            logits = [float(np.dot(q[row, head, i], x[:h])) / math.sqrt(h) for x in entries]
            if bias is not None:
                logits = [
                    x + float(bias[at[j]]) if j < len(at) and places[j] >= ring_pages * page else x
                    for j, x in enumerate(logits)
                ]
            total = np.exp(logits).sum()
            expected = sum((np.exp(x) * e[h:] for x, e in zip(logits, entries, strict=True)), np.zeros(h))
            np.testing.assert_allclose(o[row, head, i], expected / (total or 1), atol=1e-6)
            np.testing.assert_allclose(lse[row, head, i], np.log(total) if total else -np.inf, atol=1e-6)


@pytest.mark.parametrize(("implementation", "shape", "ring", "new", "chosen"), CASES)
@few
@given(data=st.data(), seed=st.integers(0, 2**16))
def test_any_lengths_equal_the_reference(implementation, shape, ring, new, chosen, data, seed):
    check(implementation, SHAPES[shape], *draw_lengths(data, SHAPES[shape]), seed, ring, new, chosen)


def test_partly_filled_blocks_equal_the_reference():
    """A TPU computes 4, 6, 8 or all of a block's 16 pages. Lengths are at all of these limits, and some pages are
    full."""
    ring, length = np.array([0, 37]), np.array([[1, 256, 257, 1023], [320, 384, 449, 0]])
    for stored in (length, length[::-1, ::-1] // 64 * 64):
        check("tpu", SHAPES["parts"], ring, stored, 0)


@pytest.mark.parametrize("implementation", OTHERS)
def test_indices_are_clipped_and_rows_do_not_mix(implementation):
    """Columns outside the pool read its nearest page, lengths end with the columns, and a NaN stored by one row does
    not reach other rows."""
    shape = SHAPES["one"]
    b, _, k, _, _, page, columns, ring_pages = shape
    arguments = jax.device_get(cache(shape, [3, 0, 32], [112] * 6, 0))
    q, pool, table, _, ring_length, new, pages = jax.tree.map(np.array, arguments)
    table[:, 0, 3], table[:, 0, 4] = -7, len(pool) + 1000
    bias = np.random.default_rng(0).standard_normal(pool.shape[:2], np.float32)
    pool = np.nan_to_num(pool)
    pool[table[1, 1, 5], 2] = np.nan
    length = np.array([[1000, 40], [0, 112], [-3, 3]], np.int32)
    clipped = np.clip(table, 0, len(pool) - 1), np.clip(length, 0, (columns - ring_pages) * page)
    expected = compiled("reference", ring_pages, True, True)(q, pool, *clipped, ring_length, new, pages, bias)
    actual = compiled(implementation, ring_pages, True, True)(
        q, pool, table, length, np.array([*ring_length[:2], 99], np.int32), new, pages, bias
    )
    others = np.arange(b * k) != 1 * k + 1

    def without_nan_row(pair):
        return tuple(np.asarray(x).reshape(b * k, -1, *x.shape[2:])[others] for x in pair)

    assert_attention_close(without_nan_row(actual), without_nan_row(expected))


def test_both_orderings_of_selected_pages_agree():
    rng = np.random.default_rng(0)
    chosen, table = rng.random((2, 3, 11)) < 0.4, rng.permutation(66).reshape(2, 3, 11).astype(np.int32)
    scattered, sorted_ = (
        np.asarray(jax.jit(f)(chosen, table)) for f in (scattered_to_front, sorted_to_front)
    )
    front = np.arange(11) < chosen.sum(-1, keepdims=True)
    np.testing.assert_array_equal(scattered[front], sorted_[front])


HEADS = [  # dtype, head_dim, query heads per kv head, tokens, page
    (jnp.bfloat16, 32, 1, 1, 16),
    (jnp.float32, 64, 3, 8, 256),
    (jnp.bfloat16, 96, 4, 2, 16),
    (jnp.bfloat16, 128, 8, 8, 64),
    (jnp.float32, 256, 8, 1, 128),
]


@pytest.mark.parametrize(("dtype", "h", "g", "t", "page"), HEADS)
@pytest.mark.thorough
def test_lowers_for_cuda(dtype, h, g, t, page):
    b, k, columns = 2, 4, 32
    shapes = [(b, k * g, t, h), (256, page, 2 * h), (b, k, columns), (b, k), (b,), (b, k, t, h)]
    dtypes = [dtype, dtype, *[jnp.int32] * 3, dtype]
    *args, pair = (jax.ShapeDtypeStruct(*x) for x in zip(shapes, dtypes, strict=True))
    pages = jax.ShapeDtypeStruct((b, k, columns - 2), bool)
    bias = jax.ShapeDtypeStruct((256, page), jnp.float32)
    call = compiled("gpu", 2, True, True, True)

    def on_shards(*args):
        args = jax.tree.map(lambda x: jax.reshard(x, P("chip", *(None,) * (x.ndim - 1))), args)
        return jax.shard_map(call, out_specs=P("chip"))(*args)

    for f in (call, on_shards):
        for rest in ((), (bias,)):
            assert lower_for_cuda(f, *args, (pair, pair), pages, *rest).count("xla.gpu.triton") == 2


@pytest.mark.parametrize("implementation", OTHERS)
def test_bfloat16_equals_the_reference(implementation):
    shape = SHAPES["one"]
    check(implementation, shape, [0, 5, 32], [0, 112, 3, 0, 17, 16], 0, chosen=True, dtype=jnp.bfloat16)


def test_rows_with_many_queries_are_tiled_on_a_gpu():
    """80 query heads of one kv head and four tokens have a padded output of 512 × 64 numbers, which is tiled. That of
    one token is not."""

    def shape(t):
        return (1, 80, 1, t, 64, 8, 6, 2)

    def is_tiled(t):
        call = compiled("gpu", 2, True, True)
        return "paged_decode" not in str(jax.make_jaxpr(call)(*cache(shape(t), [9], [27], 0)))

    assert is_tiled(4)
    assert not is_tiled(1)
    check("gpu", shape(4), [9], [27], 0)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_bits_are_read_as_floats_of_the_queries_dtype(implementation, dtype):
    q, pool, *rest = cache((1, 2, 1, 3, 32, 8, 4, 1), [5], [17], 0, dtype)[:5]
    bias = biased(1, pool, *rest[:2])
    call = jax.jit(functools.partial(paged_decode, ring_pages=1, bias=bias, implementation=implementation))
    for bits, floats in zip(call(q, as_bits(pool), *rest), call(q, pool, *rest), strict=True):
        np.testing.assert_array_equal(bits, floats)
    with pytest.raises(ValueError, match="the bits are those of 16-bit floats, not of float32"):
        paged_decode(q.astype(jnp.float32), as_bits(pool), *rest, ring_pages=1, implementation=implementation)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", TPUS)
@pytest.mark.parametrize("t", [1, 9])
def test_the_narrow_output_is_the_rounded_float32_output(implementation, t):
    arguments = cache((1, 2, 1, t, 32, 8, 4, 1), [5], [17], 0, jnp.bfloat16)[:5]
    call = functools.partial(paged_decode, ring_pages=1, implementation=implementation)
    (exact, _), (rounded, _) = (
        jax.device_get(jax.jit(functools.partial(call, dtype=x))(*arguments)) for x in (jnp.float32, None)
    )
    assert (exact.dtype, rounded.dtype) == (jnp.float32, jnp.bfloat16)
    np.testing.assert_array_equal(exact.astype(jnp.bfloat16), rounded)
    assert (exact != rounded).any()


@pytest.mark.parametrize("implementation", [*OTHERS, "reference"])
@pytest.mark.parametrize("pages", [0, 6])
def test_a_table_without_columns_stores_nothing(implementation, pages):
    """The tokens see each other if they are given in `new`, else nothing."""
    rng = np.random.default_rng(0)
    q, *new = (rng.standard_normal((1, n, 3, 32), np.float32) for n in (4, 2, 2))
    nothing = np.ones((pages, 8, 64), np.float32), np.zeros((1, 2, 0), np.int32), np.ones((1, 2), np.int32)
    call = jax.jit(functools.partial(paged_decode, implementation=implementation))
    causal = jax.jit(functools.partial(vertical_slash, window=1, implementation="reference"))
    assert_attention_close(call(q, *nothing, new=tuple(new)), causal(q, *new))
    assert_attention_close(call(q, *nothing), (np.zeros_like(q), np.full((1, 4, 3), -np.inf, np.float32)))


@pytest.mark.parametrize("implementation", [*OTHERS, "reference"])
def test_without_queries_there_is_no_output(implementation):
    stored = jnp.ones((6, 8, 64)), jnp.zeros((1, 2, 3), jnp.int32), jnp.ones((1, 2), jnp.int32)
    o, lse = paged_decode(jnp.zeros((1, 4, 0, 32)), *stored, implementation=implementation)
    assert (o.shape, lse.shape) == ((1, 4, 0, 32), (1, 4, 0))


@pytest.mark.parametrize("implementation", TPUS)
@pytest.mark.parametrize(("values", "most"), [("random", 3e-3), ("two constants", 2e-4)])
def test_many_tokens_over_a_long_context_are_rounded_once(implementation, values, most, monkeypatch):
    """There are 128 parts of 64 entries, like the 128 parts of 32,768 of four million entries. An output that is
    rounded to bfloat16 after each part is off by 1%, and by 10% if the second half's share is always less than half a
    unit in the last place."""
    monkeypatch.setattr(chunked, "ENTRIES", (64, 64))
    t, h, page, columns = 16, 32, 16, 512
    rng = np.random.default_rng(0)
    q, key, value = (rng.normal(size=x) for x in ((1, 1, t, h), (columns, page, h), (columns, page, h)))
    if values == "two constants":
        key[columns // 2 :] = key[: columns // 2]  # The output is then 1.125, which bfloat16 represents.
        value[: columns // 2], value[columns // 2 :] = 1, 1.25
    arguments = (
        jnp.asarray(q, jnp.bfloat16),
        jnp.asarray(np.concatenate([key, value], -1), jnp.bfloat16),
        jnp.arange(columns, dtype=jnp.int32)[None, None],
        jnp.full((1, 1), columns * page, jnp.int32),
    )
    exact = functools.partial(paged_decode, dtype=jnp.float32, implementation="reference")
    expected, _ = jax.jit(exact)(*arguments)
    o, _ = jax.jit(functools.partial(paged_decode, implementation=implementation))(*arguments)
    assert o.dtype == jnp.bfloat16
    error = np.abs(np.asarray(o, np.float32) - np.asarray(expected)).mean()
    assert error <= most * np.abs(expected).mean()


@pytest.mark.parametrize(
    "implementation", [pytest.param(x, marks=pytest.mark.thorough if x == "tpu" else ()) for x in OTHERS]
)
def test_a_scan_on_a_mesh_does_not_copy_the_pool(implementation):
    """Each step attends, writes one entry and moves one; the pool is never copied.

    Interpreted kernels get fewer shards, since the interpreter's threads wait for each other. The general interpreter,
    which runs the GPU kernels, does not know over which axes of the mesh an array varies.
    """
    sizes = (1, 4, 2) if implementation == "xla" else (1, 1, 2)
    b, n, k, h, page, columns, ring_pages, steps = 4, 8, 4, 32, 8, 6, 1, 3
    shards, spec, pools = math.prod(sizes), P(("data", "fsdp"), "tensor"), P(("data", "fsdp", "tensor"))
    rng = np.random.default_rng(0)
    per_shard = 512
    pool = jnp.asarray(rng.normal(size=(shards * per_shard, page, 2 * h)), jnp.float32)
    # No two rows of a shard share a page.
    table = rng.permutation(per_shard)[: b * k * columns].reshape(b, k, columns)
    table = jnp.asarray(table, jnp.int32)
    length = jnp.asarray(rng.integers(0, (columns - ring_pages) * page - steps, (b, k)), jnp.int32)
    ring_length = jnp.asarray([0, 3, 7, 8], jnp.int32)
    bias = jnp.asarray(rng.normal(size=pool.shape[:2]), jnp.float32)
    q, *new = (jnp.asarray(rng.normal(size=(b, x, 1, h)), jnp.float32) for x in (n, k, k))

    def local(implementation, q, pool, table, length, ring_length, k, v, bias):
        def step(carry, _):
            q, pool, length = carry
            at = jnp.take_along_axis(table, ring_pages + length[..., None] // page, 2)[..., 0]
            append = Append(table[..., 0] * page + length % page, at * page + length % page)
            *out, pool = paged_decode_append(
                q,
                pool,
                table,
                length,
                ring_length,
                ring_pages=ring_pages,
                new=(k, v),
                append=append,
                bias=bias,
                implementation=implementation,
            )
            return (q + out[0], pool, length + 1), tuple(out)

        (_, pool, _), out = jax.lax.scan(step, (q, pool, length), None, length=steps)
        return pool, out

    def run(implementation):
        sharded = jax.shard_map(
            functools.partial(local, implementation),
            out_specs=(pools, P(None, *spec)),
            check_vma=implementation != "gpu",
        )
        return jax.jit(sharded, donate_argnums=1).lower(*arguments()).compile()

    def arguments():
        specs = (spec, pools, spec, spec, P(("data", "fsdp")), spec, spec, pools)
        # These are copies, since the pool is donated.
        return [
            jax.device_put(np.array(x), s)
            for x, s in zip((q, pool, table, length, ring_length, *new, bias), specs, strict=True)
        ]

    axes, kinds = ("data", "fsdp", "tensor"), (jax.sharding.AxisType.Explicit,) * 3
    mesh = jax.make_mesh(sizes, axes, axis_types=kinds, devices=jax.devices()[:shards])
    with jax.set_mesh(mesh):
        program = run(implementation)
        actual_pool, actual = jax.device_get(program(*arguments()))
        expected_pool, expected = jax.device_get(run("reference")(*arguments()))
    np.testing.assert_array_equal(actual_pool, expected_pool)
    for i in range(steps):
        assert_attention_close(*jax.tree.map(lambda x: x[i], (actual, expected)))  # noqa: B023
    memory = program.memory_analysis()
    assert memory is not None
    # The other implementations are interpreted here. Their compiled programs are tested elsewhere.
    if implementation == "xla":
        assert memory.temp_size_in_bytes < pool.nbytes / shards / 2


def wrong_page(q, pool, page_table, *rest):
    return IMPLEMENTATIONS["xla"](q, pool, page_table.at[0, 0, 2].set(page_table[0, 1, 2]), *rest)


def one_entry_more(q, pool, page_table, length, *rest):
    return IMPLEMENTATIONS["xla"](q, pool, page_table, length + 1, *rest)


def ring_taken_for_full(q, pool, page_table, length, ring_length, ring_pages, *rest):
    full = jnp.full_like(ring_length, ring_pages * pool.shape[1])
    return IMPLEMENTATIONS["xla"](q, pool, page_table, length, full, ring_pages, *rest)


def new_not_seen(q, pool, page_table, length, ring_length, ring_pages, new, *rest):
    return IMPLEMENTATIONS["xla"](q, pool, page_table, length, ring_length, ring_pages, None, *rest)


@pytest.mark.parametrize("bug", [wrong_page, one_entry_more, ring_taken_for_full, new_not_seen])
def test_planted_bugs_are_noticed(monkeypatch, bug):
    monkeypatch.setitem(IMPLEMENTATIONS, bug.__name__, bug)
    with pytest.raises(AssertionError):
        check(bug.__name__, SHAPES["one"], [0, 5, 32], [40, 111, 3, 0, 17, 16], 0)


def test_an_ignored_selection_is_noticed(monkeypatch):
    monkeypatch.setattr(api, "compact", lambda pages, page_table, length, page: (page_table, length))
    monkeypatch.setitem(IMPLEMENTATIONS, "all pages", IMPLEMENTATIONS["xla"])
    with pytest.raises(AssertionError):
        check("all pages", SHAPES["one"], [0, 5, 32], [40, 111, 3, 0, 17, 16], 0, chosen=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"implementation": "triton"}, "'triton', only xla, tpu, gpu, hopper, reference"),
        ({"q": jnp.zeros((1, 3, 1, 8))}, "3 query heads are not a multiple of 2"),
        ({"pool": jnp.zeros((6, 4, 8))}, "pool is (6, 4, 8), but head_dim 8 needs [pages, page, 16]"),
        ({"ring_pages": 4}, "4 ring pages in a page table of 3 columns"),
        ({"length": jnp.zeros((2, 2), int)}, "length (2, 2)"),
        ({"ring_length": jnp.zeros(2, int)}, "ring_length is (2,), but there are 1 sequences"),
        ({"new": (jnp.zeros((1, 2, 2, 8)), jnp.zeros((1, 2, 1, 8)))}, "new is [(1, 2, 2, 8), (1, 2, 1, 8)]"),
        (
            {"pages": jnp.zeros((1, 2, 4), bool)},
            "pages is (1, 2, 4), but the table has (1, 2, 3) global pages",
        ),
        ({"bias": jnp.zeros((6, 3))}, "bias is float32 (6, 3), but pool (6, 4, 16) needs float32 (6, 4)"),
        ({"bias": jnp.zeros((6, 4), jnp.bfloat16)}, "bias is bfloat16 (6, 4)"),
        ({"implementation": "gpu"}, "head_dim 32, 64, 96, 128, 256, not 8; implementation='xla' takes any"),
        ({"pool": jnp.zeros((0, 4, 16))}, "pool (0, 4, 16) holds no entry, but page_table has 3 columns"),
        ({"pool": jnp.zeros((6, 0, 16))}, "pool (6, 0, 16) holds no entry, but page_table has 3 columns"),
        ({"length": jnp.zeros((1, 2))}, "length is float32, but must be whole numbers"),
        ({"page_table": jnp.zeros((1, 2, 3), bool)}, "page_table is bool, but must be whole numbers"),
        ({"ring_length": jnp.zeros(1), "ring_pages": 1}, "ring_length is float32, but must be whole numbers"),
    ],
)
@pytest.mark.usefixtures("shapes_unchecked")
def test_bad_arguments_are_refused_in_one_line(change, message):
    good = {
        "q": jnp.zeros((1, 4, 1, 8)),
        "pool": jnp.zeros((6, 4, 16)),
        "page_table": jnp.zeros((1, 2, 3), int),
        "length": jnp.zeros((1, 2), int),
    }
    with pytest.raises(ValueError, match="^paged_decode: ") as error:
        paged_decode(**good | change)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("implementation", "change", "message"),
    [
        ("hopper", {"bias": jnp.zeros((6, 8))}, "takes no bias; implementation='xla' takes any"),
        ("gpu", {"q": jnp.zeros((1, 4, 1, 32), jnp.bfloat16)}, "pool of q's dtype bfloat16, not float32"),
        ("gpu", {"q": jnp.zeros((1, 4, 1, 32), jnp.float16)}, "float32 or bfloat16, not float16"),
        ("tpu", {"pool": jnp.zeros((6, 4, 64))}, "pages of a multiple of 8 entries, not 4"),
        (
            "tpu",
            {"q": jnp.zeros((1, 4, 9, 80)), "pool": jnp.zeros((6, 8, 160))},
            "head_dim 32, 64, 96, 128, 256, not 80",
        ),
        (
            "gpu",
            {"q": jnp.zeros((1, 4, 9, 80)), "pool": jnp.zeros((6, 8, 160))},
            "head_dim 32, 64, 96, 128, 256, not 80",
        ),
        (
            "tpu",
            {"q": jnp.zeros((1, 4, 9, 32)), "pool": jnp.zeros((6, 4, 64))},
            "a multiple of 8 entries, not 4",
        ),
        (
            "tpu",
            {"q": jnp.zeros((1, 260, 4, 32))},
            "at most 512 queries of a kv head, tokens × query heads, at this page size, not 520",
        ),
        (
            "tpu",
            {"pool": jnp.zeros((1, 4104, 64))},
            "least common multiple with 128 is at most 2048, not 4104",
        ),
        (
            "tpu",
            {"pool": jnp.zeros((6, 24, 64)), "bias": jnp.zeros((6, 24))},
            "a bias or scales of pages of a divisor or a multiple of 128 entries, not 24",
        ),
        ("tpu", {"page_table": jnp.zeros((1, 2, 50000), int)}, "at most 49152 columns of pages, not 50000"),
    ],
)
def test_unsupported_arguments_are_refused_in_one_line(implementation, change, message):
    good = {
        "q": jnp.zeros((1, 4, 1, 32)),
        "pool": jnp.zeros((6, 8, 64)),
        "page_table": jnp.zeros((1, 2, 3), int),
        "length": jnp.zeros((1, 2), int),
    }
    with pytest.raises(ValueError, match="^paged_decode: ") as error:
        paged_decode(**good | change, implementation=implementation)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
