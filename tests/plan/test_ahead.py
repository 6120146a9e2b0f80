"""Compiling for a TPU that is not here, in a process of its own."""

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
from kvjax.models.config import config_json
from kvjax.models.json_file import write_json
from kvjax.plan import ahead
from kvjax.plan.ahead import Job, compiled
from kvjax.plan.serving import TABLES, ServeConfig, Serving

libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
JOB = Job("decode", "v5e:2x2", ("--topology", "v5e:2x2"), "4", 64, batch=8)


@pytest.fixture(scope="module")
def mesh():
    """As many devices as a job's."""
    return make_mesh(fsdp=4)


@pytest.mark.thorough
@libtpu
def test_training_on_four_chips(folder, shape):
    arguments = "--model", str(folder), "--window", "32", "--lengths", "128", "--shares", "1"
    found = compiled(Job("train", "v5e:2x2", arguments, "2x2", 128))
    c = shape
    layer = 2 * c.width * c.head_dim * (c.num_heads + c.num_kv_heads) + 3 * c.width * c.mlp_width
    split = c.num_layers * layer // 4 + c.vocab_size * c.width // 4
    norms = c.num_layers * 2 * (c.width + c.head_dim) + c.width
    assert found.parts["weights"] == 2 * (split + norms)
    assert found.collectives["all-gather"]["count"] >= 7 * c.num_layers
    # forwards as teacher, as student and once more for the backward pass (but the last product), and backwards to what
    # a layer was given; the gates twice forwards, and backwards to their weights and inputs
    hidden = int(1.5 * c.head_dim)
    gates = c.num_kv_heads * (2 * c.head_dim * hidden + hidden)
    products = 4 * layer - c.mlp_width * c.width + 4 * gates
    assert found.flops == 2 * products * c.num_layers * 2 * 128 / 4
    assert not found.refused


@libtpu
def test_what_the_process_finds_wrong_is_one_line(folder):
    with pytest.raises(UserError, match="^--topology v5e:3x7: the compiler knows no such slice"):
        compiled(Job("decode", "v5e:3x7", ("--topology", "v5e:3x7", "--model", str(folder)), "21", 64))


@libtpu
def test_what_a_kernel_refuses_is_said(shape, tmp_path):
    """JAX ends its tracebacks with a remark on itself. And a slice may be of one chip."""
    write_json(tmp_path / "config.json", config_json(dataclasses.replace(shape, head_dim=16), "bfloat16"))
    arguments = "--topology", "v5e:1x1", "--model", str(tmp_path)
    with pytest.raises(
        UserError, match=r"^prefill, 4 × 64 tokens, --mesh 1 on v5e:1x1: .*takes head_dim .* not 16;"
    ) as wrong:
        compiled(Job("prefill", "v5e:1x1", arguments, "1", 64, batch=4))
    assert "internal frames" not in str(wrong.value)


@libtpu
def test_pages_are_those_of_the_chips(folder, mesh, shape):
    """64 tokens on a TPU, as many as a page was published with for what selects pages, and what is stated."""

    def tables(*options):
        arguments = "--topology", "v5e:2x2", "--model", str(folder), *options
        return compiled(dataclasses.replace(JOB, arguments=arguments, length=1024, limit=1)).parts[TABLES]

    def of(page_size, selection=None):
        told = ServeConfig("", context=1024, batch=8, page_size=page_size, selection=selection)
        with jax.set_mesh(mesh):
            tables = dict(Serving(told, shape, "bfloat16", mesh).decode().parts)[TABLES]
        leaves = jax.tree.leaves(tables)
        return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)

    selects = "quest:tokens=64"
    assert of(16) != of(64)
    assert tables() == of(64)
    assert tables("--page-size", "16") == of(16) == of(None)
    assert tables("--selection", selects) == of(16, selects)


def test_an_exception_s_message_is_the_answer(monkeypatch, capsys):
    def fail(job):
        raise RuntimeError("INTERNAL: the\nkernel")

    monkeypatch.setattr(ahead, "run", fail)
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(dataclasses.asdict(JOB))))
    ahead.main()
    answer = {"wrong": "decode, 8 × 64 tokens, --mesh 4 on v5e:2x2: RuntimeError: INTERNAL: the kernel"}
    assert json.loads(capsys.readouterr().out) == answer


@pytest.mark.parametrize(
    ("code", "said", "line"),
    [
        (-9, "W1124 a warning", r"was killed \(SIGKILL\): this machine may have too little memory"),
        (-6, "F1124 10:00 Check failed: x\n*** trace\n@ 0x1", "ended with SIGABRT, and said: F1124 .*: x$"),
        (1, "No module named 'jax'\n\n", "ended with exit code 1, and said: No module named 'jax'$"),
        (1, "", "ended with exit code 1, and said: nothing$"),
    ],
)
def test_a_process_that_gives_no_answer(code, said, line, monkeypatch):
    ended = subprocess.CompletedProcess([], code, stdout="", stderr=said)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: ended)
    with pytest.raises(UserError, match=line):
        compiled(JOB)
