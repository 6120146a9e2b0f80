"""Tests of compiling for chips that are not here, in a separate process."""

import dataclasses
import importlib.util
import io
import json
import math
import subprocess

import jax
import pytest

from kvjax.errors import UserError
from kvjax.mesh import make_mesh
from kvjax.plan import ahead
from kvjax.plan.ahead import CHIPS, GPU_SHARE, Job, Topology, compile_job
from kvjax.plan.programs import TABLES, WEIGHTS, ServeConfig, Serving

pytestmark = pytest.mark.slow

libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
JOB = Job("decode", ("--mesh", "4", "--batch", "8"), 64, topology="v5e:2x2")


@pytest.mark.parametrize(
    ("text", "chip", "count"), [("v5e:2x4", "v5e", 8), ("v5p:2x2x1", "v5p", 4), ("h100:8", "h100", 8)]
)
def test_a_slice_is_parsed_as_a_chip_and_a_count(text, chip, count):
    topology = Topology.parse(text)
    assert (topology.chip, topology.count) == (chip, count)
    assert topology.platform == ("cuda" if chip == "h100" else "tpu")


@pytest.mark.parametrize("text", ["v5e", "v5e:", "v5e:2x4x1", "v5p:8", "h100:2x4", "a100:8", "v5e:0x4"])
def test_an_unknown_slice_is_refused_in_one_line(text):
    with pytest.raises(UserError, match=f"^--topology {text}: .*(expected a chip|slices of)"):
        Topology.parse(text)


def test_only_a_share_of_a_gpu_is_usable(monkeypatch):
    monkeypatch.delenv(GPU_SHARE, raising=False)
    assert Topology.parse("h100:8").usable == CHIPS["h100"] * 3 // 4
    monkeypatch.setenv(GPU_SHARE, "0.5")
    assert Topology.parse("h100:8").usable == CHIPS["h100"] // 2
    assert Topology.parse("v5e:2x4").usable == 15.75 * 2**30


def test_a_missing_compiler_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="compiling for a TPU needs libtpu: pip install 'kvjax\\[tpu\\]'"):
        Topology.parse("v5e:2x4").check_compiler()


def weight_bytes(c):
    """Return the bytes of 16-bit weights on each of four chips, with fsdp 2 × tensor 2 or fsdp 4."""
    layer = 2 * c.width * c.head_dim * (c.num_heads + c.num_kv_heads) + 3 * c.width * c.mlp_width
    norms = c.num_layers * 2 * (c.width + c.head_dim) + c.width
    return 2 * (c.num_layers * layer // 4 + c.vocab_size * c.width // 4 + norms)


@libtpu
def test_training_on_four_chips(folder, shape):
    arguments = "--model", str(folder), "--mesh", "2x2", "--window", "32", "--lengths", "64", "--shares", "1"
    memory = compile_job(Job("train", arguments, 128, topology="v5e:2x2"))
    assert memory.parts[WEIGHTS] == weight_bytes(shape)
    assert memory.parts["batch"] == 4 * 128 + 4, "the job's length, and a step"
    assert not memory.refused


@libtpu
@pytest.mark.parametrize("stage", ["prefill", "decode"])
def test_serving_on_four_chips(folder, shape, stage):
    """Pages hold 64 tokens, as on TPUs."""
    arguments = "--model", str(folder), "--mesh", "4", "--batch", "8", "--context", "64"
    memory = compile_job(Job(stage, arguments, 1024, topology="v5e:2x2"))
    assert memory.parts[WEIGHTS] == weight_bytes(shape)
    mesh = make_mesh(fsdp=4)
    with jax.set_mesh(mesh):
        options = ServeConfig(context=1024, batch=8)
        tables = getattr(Serving(options, shape, "bfloat16", mesh), stage)().parts[TABLES]
    small_page_bytes = sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tables)
    )
    assert memory.parts[TABLES] < small_page_bytes, "the planned pages have 64 tokens"
    assert not memory.refused


@pytest.mark.thorough
@libtpu
def test_an_error_of_the_process_is_one_line(folder):
    with pytest.raises(UserError, match="^--topology v5e:3x7: the compiler knows no such slice"):
        compile_job(Job("decode", ("--model", str(folder), "--mesh", "21"), 64, topology="v5e:3x7"))


def test_the_process_replies_with_the_message_of_an_exception(monkeypatch, capsys):
    def fail(job):
        raise RuntimeError("INTERNAL: the\nkernel")

    monkeypatch.setattr("kvjax.plan.programs.mesh_of", fail)
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(dataclasses.asdict(JOB))))
    ahead.main()
    reply = {"error": "decode, 64 tokens, on v5e:2x2: RuntimeError: INTERNAL: the kernel"}
    assert json.loads(capsys.readouterr().out) == reply


@pytest.mark.parametrize(
    ("code", "stderr", "line"),
    [
        (-9, "W1124 a warning", r"was killed \(SIGKILL\): this machine may have too little memory"),
        (-6, "F1124 10:00 Check failed: x\n*** trace\n@ 0x1", "ended with SIGABRT and printed: F1124 .*: x$"),
        (1, "No module named 'jax'\n\n", "ended with exit code 1 and printed: No module named 'jax'$"),
        (1, "", "ended with exit code 1 and printed: nothing$"),
    ],
)
def test_a_process_that_gives_no_reply_is_described(code, stderr, line, monkeypatch):
    process = subprocess.CompletedProcess([], code, stdout="", stderr=stderr)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: process)
    with pytest.raises(UserError, match=line):
        compile_job(JOB)
