"""Tests of the Hopper kernel of `paged_decode`, in the interpreter of Mosaic GPU and lowered for a GPU that is not
here."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams
from jax.sharding import PartitionSpec as P

from pallas_kernels.ahead import lower_for_cuda
from pallas_kernels.paged_decode import Append, hopper, paged_decode, paged_decode_append, stream_k
from tests.pallas_kernels.closeness import assert_attention_close
from tests.pallas_kernels.interpreted import INTERPRETED
from tests.pallas_kernels.paged import cache, compiled

pytestmark = pytest.mark.thorough

# b, n, k, t, h, page, columns, ring pages; lengths of the rings and of the retained entries; multiprocessors
CASES = {
    "every sort of length, small pages": ((3, 2, 1, 2, 64, 16, 26, 2), (5, 0, 32), (384, 0, 129), 2),
    "a row for several programs, more tiles than fit": ((1, 2, 1, 1, 128, 64, 12, 2), (100,), (600,), 2),
    "pages of several tiles, more queries than rows": ((1, 16, 1, 5, 256, 256, 2, 1), (130,), (200,), 3),
    "pages that fill no tile": ((1, 4, 1, 4, 64, 24, 7, 1), (24,), (130,), 1),
    "neither ring nor new keys, more programs than tiles": ((1, 2, 2, 1, 64, 128, 2, 0), None, (0, 129), 3),
}


def check(monkeypatch, shape, ring_length, length, programs, outside=False):
    """Check values and races. Unused entries hold NaN, and unused columns lie beyond the pool. If `outside`, some used
    columns do, too, and their nearest pages hold numbers. Without lengths of rings there are no new keys either."""
    monkeypatch.setattr(stream_k, "MULTIPROCESSORS", programs)
    ring, ring_pages = ring_length is not None, shape[-1]
    arguments = cache(shape, ring_length if ring else [0] * shape[0], length, 0, jnp.bfloat16)
    q, pool, table, length, lengths, new, _ = arguments
    if outside:
        table = table.at[0, 0, ring_pages].set(-7).at[0, 0, 0].set(len(pool) + 1000)
        pool = pool.at[jnp.array([0, -1])].set(1)
    expected = compiled("reference", ring_pages, ring, ring)(q, pool, table, *arguments[3:])
    params = InterpretGPUParams(detect_races=True)
    form = functools.partial(hopper.hopper, interpret=params, machine=INTERPRETED)

    @jax.jit
    def call(q, pool, table, length, lengths, new):
        lengths, new = (lengths, new) if ring else (None, None)
        return form(q, pool, table, length, lengths, ring_pages, new, None, None, q.dtype)

    *out, _ = call(q, pool, table, length, lengths, new)
    jax.block_until_ready(out)
    assert_attention_close(out, expected)
    assert not interpret_pallas_call.get_races().races_found


@pytest.mark.parametrize("case", CASES)
def test_values_are_right_and_nothing_races(monkeypatch, case):
    check(monkeypatch, *CASES[case])


def test_columns_outside_the_pool_read_its_nearest_page(monkeypatch):
    check(monkeypatch, (1, 1, 1, 1, 64, 32, 4, 1), (32,), (70,), 1, outside=True)


def test_a_planted_bug_is_noticed(monkeypatch):
    monkeypatch.setattr(hopper, "MASKED", 0.0)
    with pytest.raises(AssertionError):
        check(monkeypatch, *CASES["pages that fill no tile"])


call = functools.partial(paged_decode, ring_pages=2, implementation="hopper")


def with_new(q, pool, table, length, ring_length, k, v):
    return call(q, pool, table, length, ring_length, new=(k, v))


def on_a_mesh(*x):
    return jax.shard_map(with_new, in_specs=P(), out_specs=P())(*x)


def in_a_scan(q, pool, table, length, ring_length, k, v):
    def step(carry, _):
        pool, length = carry
        page = pool.shape[1]
        at = jnp.take_along_axis(table, 2 + length[..., None] // page, 2)[..., 0]
        append = Append(table[..., 0] * page + length % page, at * page + length % page)
        stored = q, pool, table, length, ring_length
        *out, pool = paged_decode_append(
            *stored, ring_pages=2, new=(k, v), append=append, implementation="hopper"
        )
        return (pool, length + 1), out

    return jax.lax.scan(step, (pool, length), None, length=3)


def shapes(n, k, t, h, page, dtype=jnp.bfloat16):
    b, columns = 3, 9
    sizes = [(b, n, t, h), (256, page, 2 * h), (b, k, columns), (b, k), (b,), (b, k, t, h), (b, k, t, h)]
    dtypes = [dtype] * 2 + [jnp.int32] * 3 + [dtype] * 2
    return [jax.ShapeDtypeStruct(*x) for x in zip(sizes, dtypes, strict=True)]


@pytest.mark.parametrize(
    ("function", "case"),
    [
        (with_new, (32, 2, 8, 64, 16)),
        (on_a_mesh, (8, 2, 1, 128, 64)),
        (in_a_scan, (4, 4, 1, 256, 256)),
        (with_new, (4, 2, 100, 128, 16)),
    ],
)
def test_lowers_for_a_gpu(function, case):
    assert "mosaic_gpu" in lower_for_cuda(function, *shapes(*case))


@pytest.mark.parametrize(
    ("case", "kind", "message"),
    [
        ((2, 1, 1, 96, 16), "NVIDIA H100 80GB HBM3", "head_dim 64, 128, 256, not 96"),
        ((2, 1, 1, 64, 16, jnp.float32), "NVIDIA H100 80GB HBM3", "bfloat16, not float32"),
        ((2, 1, 1, 64, 12), "NVIDIA H100 80GB HBM3", "pages of a multiple of 8 entries, not 12"),
        ((2, 1, 1, 64, 16), "NVIDIA A100-SXM4-40GB", "H100 or H200, not NVIDIA A100"),
    ],
)
def test_unsupported_arguments_are_refused_in_one_line(case, kind, message):
    with pytest.raises(ValueError, match="^paged_decode: implementation 'hopper' takes ") as error:
        lower_for_cuda(with_new, *shapes(*case), kind=kind)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
