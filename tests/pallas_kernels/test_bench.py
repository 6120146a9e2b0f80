"""The benchmark, run through at tiny sizes on a CPU with interpreted kernels, and its readers of compilers' output."""

import dataclasses
import functools
import importlib.util
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention_mass import attention_mass
from pallas_kernels.bench import __main__ as bench
from pallas_kernels.bench import correctness, issued, mlstm, ragged, rivals, static, torch_rivals
from pallas_kernels.bench.attention_mass import dense as dense_mass
from pallas_kernels.bench.bundles import Tile, read
from pallas_kernels.bench.cycles import estimated_cycles, issued_cycles
from pallas_kernels.bench.issued import Program
from pallas_kernels.bench.job import Job, Line, Task, rows
from pallas_kernels.bench.setting import GPU
from pallas_kernels.bench.timing import Candidate
from pallas_kernels.paged_decode import api, paged_decode
from pallas_kernels.vertical_slash import ends, vertical_slash

TINY = dataclasses.replace(
    GPU,
    checked=("gpu",),
    dtype=jnp.float32,
    n=4,
    k=2,
    h=32,
    window=16,
    page=16,
    prefill=(128,),
    kept=(0.25,),
    training=(128,),
    decode=((1, 128),),
    mass=(128,),
    observation=(128,),
    topk=(128,),
    mlstm=(128,),
    mask=128,
    inner=2,
    copied=1 << 20,
    matmul=128,
    batch=0.0,
    seconds=0.0,
)
FIELDS = {
    *("op", "shape", "implementation", "seconds", "rate", "unit", "bound", "bound_name", "fraction"),
    *("rival", "rival_seconds", "speed_up", "others", "error"),
}


# torch wants a compiler for flex_attention, which is there where there is a GPU.
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.thorough
def test_the_whole_gpu_path(tmp_path, capsys):
    bench.measure(TINY, tmp_path / "rows.json")
    content = json.loads((tmp_path / "rows.json").read_text())
    assert {"device", "date", "python", "jax", "seed", "checks", "bounds", "rows"} <= content.keys()
    assert content["left_out"] == 0
    assert {row["op"] for row in content["rows"]} == {
        *("vertical_slash", "vertical_slash, backward", "paged_decode", "running_topk", "attention_mass"),
    }
    for row in content["rows"]:
        assert row.keys() == FIELDS
        assert row["error"] is None
        assert row["seconds"] > 0
        for name, time in row["others"].items():
            # There is no cuDNN here, which the rows say and which stops nothing.
            assert isinstance(time, str) == ("cuDNN" in name), (name, time)
    table = capsys.readouterr().out
    assert table.count("\n| ") == 4 + len(content["checks"]) + len(content["rows"])
    assert "cuDNN is not detected" in table


@pytest.mark.thorough
def test_a_wrong_result_stops_it(monkeypatch, tmp_path, capsys):
    right = api.IMPLEMENTATIONS["xla"]
    monkeypatch.setitem(
        api.IMPLEMENTATIONS, "xla", lambda *args: jax.tree.map(lambda x: x * 1.001, right(*args))
    )
    with pytest.raises(correctness.Wrong, match="paged_decode of 2 tokens, float32: o of 'xla' is off by"):
        bench.measure(
            dataclasses.replace(TINY, implementation="xla", checked=("gpu", "xla")), tmp_path / "rows.json"
        )
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "rows.json").exists()


def test_an_output_is_measured_against_its_own_query():
    """One that is small beside the others is 3% off; where zeros are expected anything else is wrong."""
    expected = jnp.asarray([[3.0, 4.0], [0.03, 0.04], [0.0, 0.0]])
    assert correctness._error_of_queries(expected.at[1, 0].add(0.0015), expected) == pytest.approx(0.03)
    assert correctness._error_of_queries(expected, expected) == 0
    assert correctness._error_of_queries(expected.at[2, 0].add(1e-9), expected) == math.inf
    assert correctness._error_of_queries(expected.at[0, 0].set(jnp.nan), expected) == math.inf


def test_no_gpu_is_one_line(capsys):
    with pytest.raises(SystemExit) as stopped:
        bench.main([])
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no GPU here, only cpu" in line


def test_rates_and_speed_up_of_known_times(monkeypatch):
    def sleepless(seconds):
        return Candidate(lambda: lambda n: clock.advance(n * seconds), 6e12 * seconds)

    class clock:
        now = 0.0

        @classmethod
        def advance(cls, seconds):
            cls.now += seconds

    def broken():
        raise RuntimeError("RESOURCE_EXHAUSTED: 80 GiB\nand more")

    monkeypatch.setattr("time.perf_counter", lambda: clock.now)
    candidates = {
        "ours": sleepless(0.5),
        "slow": sleepless(2.0),
        "fast": sleepless(1.5),
        "large": Candidate(broken, 1.0),
    }
    lines = [
        Line("a", "ours", {"slow": "slow", "quick": "fast", "large": "large"}, "TFLOP/s", "copy"),
        Line("b", "large", {"quick": "fast"}, "TFLOP/s", "fast"),
    ]
    found, failed = rows(Task("op", "", lambda: Job(candidates, lines)), {"copy": 8e12}, TINY)
    assert found["seconds"] == pytest.approx(0.5)
    assert found["rate"] == pytest.approx(6)
    assert found["fraction"] == pytest.approx(0.75)
    assert (found["rival"], found["speed_up"]) == ("quick", pytest.approx(3))
    assert found["others"]["large"] == "out of memory"
    (unmade,) = rows(Task("op", "c", broken), {}, TINY)
    assert (unmade["op"], unmade["shape"], unmade["error"]) == ("op", "c", "out of memory")
    assert (failed["error"], failed["seconds"], failed["bound"]) == ("out of memory", None, pytest.approx(6))


def close(actual, expected):
    np.testing.assert_allclose(np.asarray(actual), np.asarray(expected), atol=1e-5)


@pytest.fixture
def attention():
    """q, k, v, end and the output they should give."""
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v = (jax.random.normal(key, (1, n, 600, 16)) for key, n in zip(keys[:3], (4, 2, 2), strict=True))
    end = ends(jax.random.bernoulli(keys[3], 0.3, (1, 2, 600)), 7)
    return q, k, v, end, vertical_slash(q, k, v, end, window=7, implementation="reference")[0]


def test_dense_rivals_are_causal_attention(attention):
    q, k, v = attention[:3]
    expected = vertical_slash(q, k, v, window=1, implementation="reference")[0].swapaxes(1, 2)
    for rival in (rivals.blockwise, rivals.whole):
        close(rival(*(x.swapaxes(1, 2) for x in (q, k, v))), expected)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_torch_rivals_see_the_same_keys(attention):
    torch = pytest.importorskip("torch")
    *arrays, expected = attention
    for rival in torch_rivals.MASKED.values():
        close(rival(*map(torch.from_dlpack, arrays))(), expected)


def test_gathered_pages_are_the_same_attention():
    """Rings and lengths that end within a page."""
    b, n, k, h, page, columns, ring_pages = 2, 4, 2, 16, 8, 6, 2
    keys = jax.random.split(jax.random.key(0), 5)
    q, *new = (jax.random.normal(key, (b, x, 1, h)) for key, x in zip(keys[:3], (n, k, k), strict=True))
    pool = jax.random.normal(keys[3], (b * k * columns, page, 2 * h))
    table = jax.random.permutation(keys[4], b * k * columns).reshape(b, k, columns).astype(jnp.int32)
    args = q, pool, table, jnp.array([[0, 19], [32, 8]]), jnp.array([16, 3])
    new = tuple(new)
    expected = paged_decode(*args, new=new, ring_pages=ring_pages, implementation="reference")[0]
    close(rivals.gathered_decode(*args, new, ring_pages=ring_pages), expected)


@pytest.mark.parametrize(("over", "group", "offset"), [("logsumexp", "max", 5), ("sum", "mean", 0)])
def test_dense_mass_is_the_same_mass(over, group, offset):
    q, k = (jax.random.normal(jax.random.key(n), (1, n, t, 16)) for n, t in ((4, 20), (2, 50)))
    lse = jnp.full((1, 4, 20), 3.0) if offset else None
    options = {"over": over, "offset": offset}
    expected = attention_mass(q, k, lse=lse, group=group, implementation="reference", **options)
    close(dense_mass(q, k, lse, **options), expected)


@pytest.mark.thorough
def test_an_mlstm_is_timed_beside_all_pairs():
    setting = dataclasses.replace(TINY, implementation="xla")
    key = jax.random.key(0)
    found = [
        row for task in mlstm.jobs(setting, key) for row in rows(task, {"matrix product": 1e12}, setting)
    ]
    assert [row["op"] for row in found] == ["mlstm", "mlstm, backward"]
    for row in found:
        assert (row["error"], row["implementation"], row["rival"]) == (None, "xla", "all pairs")
        assert row["seconds"] > 0
    (case,) = (x for x in correctness._cases(key) if str(x) == "mlstm, float32")
    found, expected = (jax.jit(functools.partial(case.call, x))(*case.args) for x in ("tpu", "reference"))
    for mine, theirs in zip(found, expected, strict=True):
        assert correctness._error(mine, theirs) <= case.limit(mine)


DUMP = """
     0   :  { %1 = vadd }
   0x1 LB: > { %2 = dma.hbm_to_vmem ;; %3 = dma.hbm_to_vmem }
   0x2   : > { %4 = sadd }
   0x3 PF: > { %5 = vmatmul ;; %6 = vmatmul }
   0x4   : > { %7 = vadd }
   0x5   :  {}
   0x6 LB: >> { %8 = sld }
   0x7   : > { %9 = sbr.rel }
   0x8 PF: > { %10 = vadd }
"""


def test_bundles_are_read(tmp_path):
    (tmp_path / "17-kernel.1-03-final_bundles.txt").write_text(DUMP)
    (tmp_path / "17-kernel.1-02-schedule-analysis_final_bundles.txt").write_text("")
    used = "\n".join(f"1 {spills}" for spills in (7, 0, 0, 2, 3, 0, 0, 0, 0))
    (tmp_path / "17-kernel.1-01-final_hlo-static-per-bundle-utilization.txt").write_text(
        f"== CAPACITY:\nMXU, VSTORE:SPILL\n 4 1\n== UTILIZATION:\n{used}\n"
    )
    kernel = read(tmp_path, "kernel")
    assert kernel.tiles() == [Tile(2, 5)]
    # bundles 1 to 5 and 8, and 6 and 7 ten times
    assert kernel.loop(depth=1, turns=10) == 6 + 20


LISTING = """
     0   :  { %s9_s0 = inlined_call_operand.vmem [shape: s32[8], index: 0, kind: input] /* operand 0 */ }
   0x1   :  { %s8_s1 = sshll.u32 %s9_s0, 4 /* to granules */  ;;  %s7_s1 = int_to_ptr.vmem [resolvable:$true] %s8_s1 }
   0x2   :  { %6 = dma.vmem_to_smem /*vmem=*/%s7_s1, /*size_in_granules=*/1, /*smem=*/[#allocation4], [#allocation9] }
   0x3   :  { %s5_s2 = smov 0  ;;  %s11_s6 = smov 4294967295 }
   0x4 LB: > { %s4_s3 = sld [smem:[#allocation4 + $0x2]]  ;;  %s1_s2 = sphi %s5_s2, %s3_s2 } /* Start region 7 */
   0x5   : > { %s3_s2 = sadd.s32 1, %s1_s2  ;;  %s2_s5 = smov %s1_s2 }
   0x6   : > { %p2_p1 = scmp.ge.s32.totalorder %s3_s2, %s4_s3  ;;  %p4_p2 = scmp.lt.s32.totalorder %s11_s6, 0 }
   0x7   : > { %13 = sbr.rel (!%p2_p1) target = $region7 }
   0x8   : > { %14 = sst [smem:[#allocation1_spill]] %s2_s5  ;;  %s4_s3 = smov (%p4_p2, %s4_s3), 7 }
   0x9   :  {}
   0xa   :  {}
   0xb   :  { %15 = vst [vmem:[#allocation2]] %v1_v0 }
   0xc   :  { %s16_s4 = sld [smem:[#allocation1_spill]] (%p2_p1) }
   0xd   :  { %p17_p3 = scmp.ne.s32.totalorder %s16_s4, 4 }
   0xe   :  { %18 = sbr.rel (%p17_p3) target = $region9 }
   0xf   :  {}
  0x10   :  {}
  0x11   :  {}
  0x12   :  {}
  0x13   :  { %19 = vadd }
  0x14 PF: { %20 = vadd } /* Start/End empty region 9 */
"""
"""A loop of as many turns as the operand's third word, and a bundle that is issued after five of them alone."""


@pytest.mark.parametrize("turns", [1, 5, 6])
def test_bundles_that_are_issued(turns):
    counts = Program(LISTING).issued({0: np.array([9, 9, turns, 9, 9, 9, 9, 9])})
    assert counts.tolist() == [1] * 4 + [turns] * 8 + [1] * 7 + [int(turns == 5), 1]


def test_a_branch_behind_the_last_label_goes_to_the_exit():
    text = "   0x0   :  { %1 = sbr.rel target = $region5 }\n" + 6 * "   0x1   :  {}\n" + "   0x8 PF:  {} "
    counts = Program(f"{text}/* exit bundle: %f = f32[] */").issued({})
    assert counts.tolist() == [1] * 5 + [0, 0, 1]
    with pytest.raises(LookupError, match="a branch to what is not in the listing: "):
        Program(text)


def test_a_program_without_end_is_refused(monkeypatch):
    monkeypatch.setattr(issued, "MOST", 1000)
    with pytest.raises(LookupError, match="has not ended after 1000 bundles"):
        Program(LISTING).issued({0: np.full(8, 10**6)})
    with pytest.raises(LookupError, match="an operation that is not known: %s1_s1 = sinvented 3"):
        Program("   0x1   :  { %s1_s1 = sinvented 3 }")


PROGRAM = """HloModule jit_f

%condition (x: s32[]) -> pred[] {
  %constant.1 = s32[] constant(5)
  ROOT %lt = pred[] compare(%x, %constant.1), direction=LT
}

%body (x: s32[]) -> s32[] {
  ROOT %fusion.1 = s32[] fusion(%x), backend_config={"estimated_cycles":"100"}
}

ENTRY %main (x: s32[]) -> s32[] {
  %fusion.2 = s32[] fusion(%x), backend_config={"estimated_cycles":"7"}
  %scatter = s32[] fusion(%x), backend_config={"estimated_cycles":"9223372036854775807"}
  ROOT %while = s32[] while(%fusion.2), condition=%condition, body=%body
}
"""


def test_cycles_count_loops():
    assert estimated_cycles(PROGRAM) == 507


def test_cycles_by_what_is_issued(tmp_path):
    """A listing is better than an estimate, unless numbers in vectors decide where it goes."""
    for name in ("fusion.1", "scatter"):
        (tmp_path / f"17-{name}-03-final_bundles.txt").write_text(LISTING)
        (tmp_path / f"17-{name}-02-schedule-analysis_final_bundles.txt").write_text("")
    unknown = "   0x1   :  { %s1_s1 = spop.drf %3 }"
    (tmp_path / "17-fusion.2-03-final_bundles.txt").write_text(unknown)
    # with one turn, five times in the loop and once for the scatter
    assert issued_cycles(PROGRAM, tmp_path) == 5 * 20 + 20 + 7


@pytest.mark.thorough
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
@pytest.mark.parametrize("chip", static.CHIPS)
def test_no_tile_is_heavier_than_splash_attention_s_at_its_best(chip):
    """By more than 2%; the forward pass's full tile on v6e is lighter."""
    found = [x for x in static.tpu_rows(chip, "vertical_slash") if x["rival"] == "splash attention"]
    assert len(found) == 3 * 2
    for row in found:
        assert row["bundles"] <= row["whole"] <= 1.02 * row["rival_whole"]
    if chip == "v6e":
        (full,) = (x for x in found if x["op"] == "vertical_slash forward, full tile")
        assert full["whole"] <= 0.95 * full["rival_whole"]


@pytest.mark.thorough
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_decoding_waits_for_memory_alone():
    """In a long row, all that is issued counted; at pages of 64 for half of the time. A row of 300, with its beginning
    and end, takes less than twice as long there."""
    found = static.tpu_rows("v6e", "paged_decode")
    found = [row for row in found if row["rival"] == "HBM"]
    long = [row for row in found if "512 keys" in row["op"]]
    assert len(found) == 2 * len(long) == 12
    for row in long:
        assert row["bundles"] <= row["whole"] < row["rival_bundles"]
        if "page 16" not in row["op"]:
            assert row["whole"] < 0.5 * row["rival_bundles"]
    for row in found:
        if row not in long and "page 16" not in row["op"]:
            assert row["bundles"] < row["whole"] < 2 * row["rival_bundles"]
    assert all(row["temp_bytes"] == 0 for row in found)


@pytest.mark.thorough
@pytest.mark.skipif(not ragged.installed(), reason="tpu-inference is not installed")
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_decoding_stands_beside_vllm_s():
    """Whose kernel takes more for heads apart, and by itself as much as its tiles and what is around them."""
    found = [row for row in static.tpu_rows("v6e", "paged_decode") if "vLLM" in row["rival"]]
    assert len(found) == 2 * 2 * 3
    for row in found:
        assert row["rival_bundles"] < row["rival_whole"]
        if "apart" in row["rival"]:
            assert row["whole"] < row["rival_whole"]


@pytest.mark.thorough
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_running_topk_is_a_twentieth_of_a_long_row_s_attention():
    """Sorts and gathers counted; and memory is linear."""
    found = {row["op"]: row for row in static.tpu_rows("v5e", "running_topk")}
    for s in (1 << 17, 1 << 20):
        row = found[f"running_topk in counts, a key of {s}"]
        assert row["bundles"] < row["rival_bundles"]
        assert row["temp_bytes"] < 32 * 8 * s
