"""Tests of the command: mistakes are refused in one line before anything compiles, and the output names what fits and
the longest length that does."""

import pytest

from kvjax.errors import UserError
from kvjax.models import shapes
from kvjax.plan import __main__ as command
from kvjax.plan.ahead import TEMPORARIES, Memory, Topology
from kvjax.plan.programs import POOL

TRAIN = "train", "--topology", "v5e:2x4", "--mesh", "8", "--window", "8", "--lengths", "64", "--shares", "1"
SERVE = "serve", "--topology", "v5e:2x4", "--mesh", "8"


@pytest.fixture
def compiles(monkeypatch):
    """Return the list of compiled jobs, and a list to which a test adds the function that gives their memory."""
    jobs, memory_of = [], []

    def compile_job(job):
        jobs.append(job)
        return memory_of[0](job)

    monkeypatch.setattr(command, "compile_job", compile_job)
    monkeypatch.setattr(Topology, "check_compiler", lambda self: None)
    return jobs, memory_of


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["fit"], "plan: expected train, serve, got fit"),
        ([*TRAIN, "--mesh", "4"], "--mesh 4 has 4 devices, --topology v5e:2x4 has 8"),
        ([*TRAIN, "--model", "nobody"], "--model nobody: no such folder and no known shape"),
        ([*TRAIN, "--lenghts", "64"], "unknown option --lenghts; the nearest known: --lengths"),
        (
            [*TRAIN, "--mesh", "tensor=12", "--model", "llama-3.1-8b"],
            "does not divide the model's kv heads (8)",
        ),
        ([*SERVE, "--policy", "snapkv"], "snapkv needs a budget: one of ratio, entries"),
        ([*SERVE, "--policy", "wgkv:rate=2"], "wgkv: rate must be a table of numbers from 0 to 1"),
        ([*SERVE, "--policy", "nope"], "unknown method 'nope'"),
        ([*SERVE, "--policy", "kvzip"], "kvzip needs a budget: one of ratio, entries"),
        (
            [*SERVE, "--policy", "fast_kvzip:ratio=0.3,gates=nowhere"],
            "nowhere holds no gates",
        ),
        ([*SERVE, "--context", "0"], "--context must be a whole number of at least 1"),
        ([*SERVE, "--context", "2000000000"], "--context must be a whole number of at most"),
        ([*SERVE, "--topology", "v9:8"], "--topology v9:8: expected a chip"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_compiles(args, line, monkeypatch):
    monkeypatch.setattr(command, "compile_job", lambda job: pytest.fail("it compiled"))
    with pytest.raises(UserError) as refused:
        command.main(args)
    assert line in str(refused.value)


def test_help_names_the_known_models(capsys):
    command.main(["--help"])
    out = capsys.readouterr().out
    assert all(name in out for name in shapes.known_shapes())


def test_training_that_does_not_fit_searches_for_a_length_that_does(folder, compiles, capsys):
    """A token takes an eighth of a GiB of a device's 15.75 GiB, and the weights take one GiB."""
    jobs, memory_of = compiles
    memory_of.append(lambda job: Memory({"weights": 2**30, TEMPORARIES: 2**27 * job.length}))
    options = [*TRAIN[:5], "--window", "8", "--lengths", "64", "128", "--shares", "1", "1"]
    command.main([*options, "--model", str(folder)])
    out, progress = capsys.readouterr()
    assert "an update of 8 × 128 tokens" in out
    assert "does not fit 15.75 GiB: 1.25 GiB too much" in out
    assert "longest sequence: 104 fits with 14.00 GiB a device, 128 does not" in out
    assert [job.length for job in jobs] == [128, 104]
    assert len(progress.splitlines()) == 2


@pytest.mark.parametrize(("mesh", "fits"), [("8", 13), ("fsdp=4,sequence=2", 12)])
def test_the_search_tries_only_lengths_that_the_mesh_divides(folder, compiles, capsys, mesh, fits):
    """The weights take one GiB of a device's 15.75 GiB, and each token takes one more."""
    compiles[1].append(lambda job: Memory({"weights": 2**30, TEMPORARIES: 2**30 * job.length}))
    options = ["--window", "8", "--lengths", "64", "--shares", "1", "--model", str(folder)]
    command.main([*TRAIN[:4], mesh, *options])
    assert f"longest sequence: {fits} fits" in capsys.readouterr().out


def test_serving_fits_only_if_both_programs_fit(folder, compiles, capsys):
    """A prefill takes 2 MiB per token in each of 8 sequences, and decoding takes twice as much."""
    jobs, memory_of = compiles
    memory_of.append(
        lambda job: Memory({"weights": 2**30, POOL: 8 * job.length << 21 + (job.stage == "decode")})
    )
    command.main([*SERVE, "--model", str(folder), "--context", "512", "--batch", "8", "--new", "8"])
    out = capsys.readouterr().out
    assert "longest context, 8 of them: 416 fits with 14.00 GiB a device, 512 does not" in out
    assert [(job.stage, job.length) for job in jobs] == [
        ("prefill", 512), ("decode", 512), ("prefill", 416), ("decode", 416),
    ]  # fmt: skip


def test_a_context_beyond_the_models_length_warns(folder, compiles):
    compiles[1].append(lambda job: pytest.fail("it compiled"))
    with (
        pytest.warns(UserWarning, match="5,000 tokens are more than the 4,096"),
        pytest.raises(pytest.fail.Exception),
    ):
        command.main([*SERVE, "--model", str(folder), "--context", "5000"])


def line(length, refuse_above=1 << 60):
    """Return a memory of 1,000 bytes and 10 for each token. If it is refused, only the 1,000 bytes are known."""
    refused = length > refuse_above
    return Memory({"weights": 1000, TEMPORARIES: 0 if refused else 10 * length}, "no" if refused else "")


@pytest.mark.parametrize(
    ("first", "usable", "options", "fits", "tries"),
    [
        (64, 10_010, {}, 832, 1),
        (5000, 10_010, {}, 832, 1),
        (820, 10_010, {}, 820, 0),
        (64, 1 << 40, {"longest_length": 500}, 500, 1),
        (600, 1 << 40, {"longest_length": 500}, 600, 0),
        (9, 10_010, {"multiple": 9}, 828, 1),
        (64, 900, {}, None, 0),
    ],
)
def test_the_search_extrapolates_to_the_limit(first, usable, options, fits, tries):
    """The search aims at 95% of the usable memory with rounded lengths, and tries none above `longest_length`."""
    measured = {first: line(first)}
    command.search(line, measured, usable, (TEMPORARIES,), **{"longest_length": 1 << 20} | options)
    assert command.bracket(measured, usable)[0] == fits
    assert len(measured) == 1 + tries


def test_the_search_halves_lengths_refused_without_a_number():
    measured = {4096: line(4096, 1500)}
    command.search(lambda length: line(length, 1500), measured, 1 << 40, (TEMPORARIES,), 1 << 20)
    assert command.bracket(measured, 1 << 40) == (1024, 1536)


def test_without_a_topology_this_machines_devices_are_used(folder, tmp_path, monkeypatch, capsys):
    """No weights are read, and no folder is made."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kvjax.cache.device_bytes", lambda: 1 << 20)
    options = ["--mesh", "4", "--window", "8", "--lengths", "64", "--shares", "1", "--data", "nowhere"]
    command.main(["train", "--no-search", "--model", str(folder), *options, "--dtype", "float32"])
    out = capsys.readouterr().out
    assert "on this machine, mesh 4: 4 devices of 1.00 MiB usable" in out
    for words in ("an update of 4 × 64 tokens", "weights", "trained parameters", "optimizer", "activations"):
        assert words in out
    assert "does not fit 1.00 MiB" in out
    assert not list(tmp_path.iterdir())
