"""Tests of the benchmarks, which run at tiny sizes on a CPU, and of their timing and rivals."""

import importlib
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import timing
from pallas_kernels.attention_mass import attention_mass
from pallas_kernels.attention_mass.bench import dense as dense_mass
from pallas_kernels.choose import Target
from pallas_kernels.paged_decode import paged_decode
from pallas_kernels.paged_decode.bench import gathered
from pallas_kernels.running_topk import api, bench
from pallas_kernels.timing import Candidate, Line
from pallas_kernels.vertical_slash import bench as vertical_slash_bench
from pallas_kernels.vertical_slash import ends, vertical_slash

pytestmark = pytest.mark.kernels

TINY = timing.Setting(
    n=4,
    k=2,
    h=32,
    dtype=jnp.float32,
    batch=2,
    inner=2,
    copied=1 << 20,
    matmul=128,
    logits=1 << 30,
    seconds=0.0,
    window=16,
    page=16,
)


OPS = sorted(path.parent.name for path in Path(timing.__file__).parent.glob("*/bench.py"))


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setattr(timing, "CPU", TINY)
    monkeypatch.setattr(timing, "ACCELERATOR", TINY)
    monkeypatch.setattr(timing, "BATCH", 0.0)


def check_rows(rows: list[dict], op: str) -> None:
    for row in rows:
        assert row["op"].startswith(op)
        assert isinstance(row["ms"], float)
        assert row["rate"] > 0
        assert row["rivals"]


@pytest.mark.parametrize("op", OPS)
def test_every_benchmark_runs(op, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(vertical_slash_bench, "has_torch", lambda: False)
    module = importlib.import_module(f"pallas_kernels.{op}.bench")
    rows = module.main(["--tokens", "64", "--json", str(tmp_path / "rows.json")])
    check_rows(rows, op)
    assert all(row["speed-up"] > 0 for row in rows)
    assert json.loads((tmp_path / "rows.json").read_text())["rows"] == rows
    assert capsys.readouterr().out.count("\n| ") == 2 + len(rows)


@pytest.mark.thorough
# torch warns about flex_attention without a compiler, which only machines with a GPU have.
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize("op", OPS)
def test_every_benchmark_runs_as_on_a_gpu(op, monkeypatch):
    """Kernels are interpreted. The rows say that cuDNN is missing, and the benchmark continues."""
    module = importlib.import_module(f"pallas_kernels.{op}.bench")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for used in (module, vertical_slash_bench):
        monkeypatch.setattr(used, "target", lambda: Target("gpu", "another GPU"), raising=False)
    rows = module.main(["--tokens", "64"])
    assert {row["implementation"] for row in rows} >= {"xla" if op == "mlstm" else "gpu"}
    check_rows(rows, op)
    for name, time in (item for row in rows for item in row["rivals"].items()):
        assert isinstance(time, str) == ("cuDNN" in name), (name, time)


def test_a_wrong_kernel_is_not_timed(monkeypatch, capsys):
    right = api.IMPLEMENTATIONS["counts"]
    monkeypatch.setitem(api.IMPLEMENTATIONS, "counts", lambda *args: right(*args) + 1)
    with pytest.raises(SystemExit, match="^not timed: tau and end of 'counts' is off by"):
        bench.main(["--tokens", "64"])
    assert capsys.readouterr().out == ""


def test_errors_are_relative_to_the_norm_of_their_row():
    """An output much smaller than the others is 3% off. Where zeros are expected, any other number is wrong."""
    expected = jnp.asarray([[3.0, 4.0], [0.03, 0.04], [0.0, 0.0]])
    off = expected.at[1, 0].add(0.0015)
    assert timing.error(off, expected, by_row=True) == pytest.approx(0.03)
    assert timing.error(off, expected, by_row=False) == pytest.approx(0.0015 / 4)
    assert timing.error(expected, expected, by_row=True) == 0
    assert timing.error(expected.at[2, 0].add(1e-9), expected, by_row=True) == math.inf
    assert timing.error(expected.at[0, 0].set(jnp.nan), expected, by_row=True) == math.inf
    masked = expected.at[1, 1].set(-jnp.inf)
    assert timing.error(masked, masked, by_row=True) == 0
    assert timing.error(expected, masked, by_row=True) == math.inf


def test_rates_and_speed_up_of_known_times(monkeypatch):
    now = [0.0]

    def advance(seconds):
        now[0] += seconds

    def lasting(seconds):
        return Candidate(lambda: lambda n: advance(n * seconds), 6e12 * seconds)

    def broken():
        raise RuntimeError("RESOURCE_EXHAUSTED: 80 GiB\nand more")

    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    large, fast = Candidate(broken, 1.0), lasting(1.5)
    rivals = {"slow": lasting(2.0), "fast": fast, "large": large}
    lines = [
        Line("a", "xla", lasting(0.5), rivals, "TFLOP/s", "copy"),
        Line("b", "xla", large, {"fast": fast}, "TFLOP/s", "fast"),
        Line("c", "xla", fast, {}, "TFLOP/s", "fast"),
    ]
    timed, failed, without_rivals = timing.rows("op", lines, {"copy": 8e12}, 0.0)
    assert timed["ms"] == pytest.approx(500)
    assert timed["rate"] == pytest.approx(6)
    assert timed["of the bound"] == pytest.approx(0.75)
    assert (timed["best rival"], timed["its ms"]) == ("fast", pytest.approx(1500))
    assert timed["speed-up"] == pytest.approx(3)
    assert timed["rivals"]["large"] == "out of memory"
    assert (failed["ms"], failed["rate"], failed["bound"]) == ("out of memory", None, pytest.approx(6))
    assert (without_rivals["rate"], without_rivals["bound"], without_rivals["speed-up"]) == (
        pytest.approx(6),
        None,
        None,
    )


def close(actual, expected):
    np.testing.assert_allclose(np.asarray(actual), np.asarray(expected), atol=1e-5)


@pytest.fixture
def attention():
    """Return q, k, v, end and the output that they should give."""
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v = (jax.random.normal(key, (1, n, 600, 16)) for key, n in zip(keys[:3], (4, 2, 2), strict=True))
    end = ends(jax.random.bernoulli(keys[3], 0.3, (1, 2, 600)), 7)
    return q, k, v, end, vertical_slash(q, k, v, end, window=7, implementation="reference")[0]


def test_the_dense_rival_is_causal_attention(attention):
    q, k, v = attention[:3]
    expected = vertical_slash(q, k, v, window=1, implementation="reference")[0].swapaxes(1, 2)
    close(vertical_slash_bench.blockwise(*(x.swapaxes(1, 2) for x in (q, k, v))), expected)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_torch_rivals_see_the_same_keys(attention):
    torch = pytest.importorskip("torch")
    *arrays, expected = attention
    for rival in vertical_slash_bench.TORCH_MASKED.values():
        close(rival(torch, *map(torch.from_dlpack, arrays))(), expected)


def test_gathered_pages_are_the_same_attention():
    """Local windows and lengths end within a page."""
    b, n, k, h, page, columns, ring_pages = 2, 4, 2, 16, 8, 6, 2
    keys = jax.random.split(jax.random.key(0), 5)
    q, *new = (jax.random.normal(key, (b, x, 1, h)) for key, x in zip(keys[:3], (n, k, k), strict=True))
    pool = jax.random.normal(keys[3], (b * k * columns, page, 2 * h))
    table = jax.random.permutation(keys[4], b * k * columns).reshape(b, k, columns).astype(jnp.int32)
    args = q, pool, table, jnp.array([[0, 19], [32, 8]]), jnp.array([16, 3])
    new = tuple(new)
    expected = paged_decode(*args, new=new, ring_pages=ring_pages, implementation="reference")[0]
    close(gathered(*args, new, ring_pages=ring_pages), expected)


@pytest.mark.parametrize(("over", "group", "offset"), [("logsumexp", "max", 5), ("sum", "mean", 0)])
def test_dense_mass_is_the_same_mass(over, group, offset):
    q, k = (jax.random.normal(jax.random.key(n), (1, n, t, 16)) for n, t in ((4, 20), (2, 50)))
    lse = jnp.full((1, 4, 20), 3.0) if offset else None
    options = {"over": over, "offset": offset}
    expected = attention_mass(q, k, lse=lse, group=group, implementation="reference", **options)
    close(dense_mass(q, k, lse, **options), expected)
