"""The command: mistakes in one line each before anything compiles, and what it says of programs."""

import pytest

from kvjax.errors import Doubt, UserError
from kvjax.plan import __main__ as command
from kvjax.plan import figures
from kvjax.plan.chips import CHIPS
from kvjax.plan.program import TEMPORARIES, Figures
from kvjax.plan.search import Bracket
from kvjax.plan.serving import POOL
from kvjax.plan.shapes import known

TRAIN = "train", "--topology", "v5e:2x4", "--mesh", "8", "--window", "8", "--lengths", "64", "--shares", "1"
SERVE = "serve", "--topology", "v5e:2x4", "--mesh", "8"


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["fit"], "plan: expected train, serve, table, got fit"),
        (["train", "--mesh", "8"], "missing: --topology"),
        ([*TRAIN, "--mesh", "4"], "--mesh 4 has 4 devices, --topology v5e:2x4 has 8"),
        ([*TRAIN, "--model", "nobody"], "--model nobody: no such folder here"),
        ([*TRAIN, "--lenghts", "64"], "unknown option --lenghts; the nearest known: --lengths"),
        ([*TRAIN, "--method", "nothing"], "nothing"),
        (
            [*TRAIN, "--mesh", "tensor=16", "--model", "llama-3.1-8b"],
            "does not divide the model's kv heads (8)",
        ),
        ([*SERVE, "--policy", "snapkv"], "snapkv needs a budget: one of ratio, entries"),
        ([*SERVE, "--policy", "wgkv", "--entries", "4"], "of wgkv state --ratio"),
        ([*SERVE, "--policy", "wgkv", "--ratio", "2"], "--ratio must be a finite number"),
        ([*SERVE, "--policy", "nope"], "unknown policy 'nope'"),
        ([*SERVE, "--policy", "kvzip"], "kvzip needs a budget: one of ratio, entries"),
        (
            [*SERVE, "--policy", "kvzip", "--ratio", "0.3", "--set", "when=chunk"],
            "when must be 'prompt', got 'chunk'",
        ),
        (
            [*SERVE, "--policy", "fast_kvzip", "--entries", "4096", "--set", "when=overflow"],
            "when='overflow' takes",
        ),
        (
            [*SERVE, "--policy", "fast_kvzip", "--ratio", "0.3", "--set", "gates=nowhere"],
            "nowhere holds no gates",
        ),
        (
            [*SERVE, "--policy", "adakv", "--eviction", "fast_kvzip:dim=3", "--ratio", "0.3"],
            "no argument 'dim'",
        ),
        ([*SERVE, "--context", "0"], "--context must be a whole number of at least 1"),
        ([*SERVE, "--context", "2000000000"], "--context must be a whole number of at most"),
        ([*SERVE, "--page-size", "0"], "--page-size must be a whole number of at least 1"),
        ([*SERVE, "--set", "x"], "NAME=VALUE"),
        ([*SERVE, "--topology", "v9:8"], "--topology v9:8: expected a chip"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_compiles(args, line, monkeypatch):
    monkeypatch.setattr(command, "compiled", lambda job: pytest.fail("it compiled"))
    with pytest.raises(UserError) as refused:
        command.main(args)
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_compiler_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="compiling for a TPU needs libtpu: pip install 'kvjax\\[tpu\\]'"):
        command.main([*TRAIN])


def test_help_names_the_known_models(capsys):
    command.main(["--help"])
    said = capsys.readouterr().out
    assert all(name in said for name in known())


def test_training_that_does_not_fit_gets_a_length_and_a_mesh(folder, monkeypatch, capsys):
    """Of a device's 15.75 GiB a token takes an eighth of a GiB, and half of it where heads are split over two."""
    jobs = []

    def compiled(job):
        jobs.append(job)
        each = 2**26 if job.mesh == "4x2" else 2**27
        return Figures(
            {"weights": 2**30, TEMPORARIES: each * job.length}, 1e12, 2**30, {}, {"flops": 1.0}, 1.0
        )

    monkeypatch.setattr(command, "compiled", compiled)
    monkeypatch.setattr(command.Topology, "check_compiler", lambda self: None)
    command.main(
        [*TRAIN[:5], "--window", "8", "--lengths", "64", "128", "--shares", "1", "1", "--model", str(folder)]
    )
    said, progress = capsys.readouterr()
    assert "an update of 8 × 128 tokens" in said
    assert "does not fit 15.75 GiB: 1.25 GiB too much" in said
    assert "longest sequence: 104 fits with 14.00 GiB a device, 128 does not" in said
    assert "another mesh: --mesh 4x2 fits, with 9.00 GiB a device" in said
    assert progress.splitlines()[0].startswith("compile 1 of at most 6 ("), (
        "one is of a mesh that splits tokens"
    )
    assert len(progress.splitlines()) == len(jobs) == 3
    assert all(job.arguments == jobs[0].arguments and "--topology" not in job.arguments for job in jobs)


def test_lengths_that_are_tried_are_those_that_the_mesh_splits(folder, monkeypatch, capsys):
    """Of a device's 15.75 GiB weights and a token take one each: 13 would fit, of which two devices have no halves."""
    monkeypatch.setattr(
        command,
        "compiled",
        lambda job: Figures({"weights": 2**30, TEMPORARIES: 2**30 * job.length}, 1e12, 0, {}, {}, 1.0),
    )
    monkeypatch.setattr(command.Topology, "check_compiler", lambda self: None)
    told = ["--window", "8", "--lengths", "64", "--shares", "1", "--model", str(folder)]
    for mesh, fits in (("8", 13), ("fsdp=4,sequence=2", 12)):
        command.main([*TRAIN[:4], mesh, *told])
        assert f"longest sequence: {fits} fits" in capsys.readouterr().out


def test_what_is_read_before_the_first_update_is_compiled_first(folder, monkeypatch, capsys):
    """By Fast KVzip's recipe, of its longest contexts; other targets are not planned."""
    jobs = []

    def compiled(job):
        jobs.append((job.stage, job.length))
        return Figures({"weights": 2**30}, 1e12, 2**30, {}, {"flops": 1.0}, 1.0)

    monkeypatch.setattr(command, "compiled", compiled)
    monkeypatch.setattr(command.Topology, "check_compiler", lambda self: None)
    asked = [*TRAIN[:5], "--no-search", "--method", "fast_kvzip", "--data", "texts", "--model", str(folder)]
    asked += ["--shortest", "100", "--longest", "900", "--joined", "3100"]
    command.main(asked)
    assert jobs[:2] == [("read", 4000), ("repeat", 4000)]
    said, progress = capsys.readouterr()
    assert "repeat, fast_kvzip: contexts of 4000 tokens, a step is a pass over each" in said
    assert progress.startswith("compile 1 of at most 3 (")
    jobs.clear()
    command.main([*asked, "--target", "next_token"])
    assert [stage for stage, _ in jobs] == ["train"]


def test_the_bound_is_that_of_the_slower_of_both():
    slow = Figures({}, 197e12, 819, {}, {}, 0.0)
    assert "1 s or more (products; v5e: 197 TFLOP/s, 819 GB/s)" in figures.step(slow, CHIPS["v5e"])
    fast = Figures({}, 197.0, int(819e9 / 4), {}, {}, 0.0)
    assert "250 ms or more (memory; " in figures.step(fast, CHIPS["v5e"])


def test_brackets_in_words():
    said = "  largest batch: 8 fits with 2.00 KiB a device, 16 does not"
    assert figures.bracket(Bracket(8, 16, 2048), "largest batch") == said
    assert "none that was tried fits, down to 4" in figures.bracket(Bracket(None, 4), "largest batch")
    assert "a device (the model's own longest)" in figures.bracket(Bracket(8, None), "longest", most=8)


def test_serving_fits_where_both_of_its_programs_do(folder, monkeypatch, capsys):
    """Decoding takes twice the 2 MiB a token of a prefill; a mesh that splits heads takes half."""
    jobs = []

    def compiled(job):
        jobs.append(job)
        each = 2**21 << (job.stage == "decode")
        held = job.batch * job.length * each >> (job.mesh == "4x2")
        return Figures({"weights": 2**30, POOL: held}, 1e12, 2**30, {}, {"flops": 1.0}, 1.0)

    monkeypatch.setattr(command, "compiled", compiled)
    monkeypatch.setattr(command.Topology, "check_compiler", lambda self: None)
    command.main([*SERVE, "--model", str(folder), "--context", "512", "--batch", "8", "--new", "8"])
    said = capsys.readouterr().out
    assert "longest context, 8 of them: 416 fits with 14.00 GiB a device, 512 does not" in said
    assert "largest batch of 512 tokens: none that was tried fits, down to 8" in said
    assert "another mesh: --mesh 4x2 fits, with 9.00 GiB a device" in said
    found = [(job.stage, job.length, job.mesh) for job in jobs]
    assert found[:4] == [
        ("prefill", 512, "8"), ("decode", 512, "8"), ("prefill", 416, "8"), ("decode", 416, "8"),
    ]  # fmt: skip
    assert all((job.limit is None) == (job.mesh == "8") for job in jobs)


@pytest.mark.parametrize("named", [("--policy", "kvzip"), ("--policy", "critical_kv", "--eviction", "kvzip")])
def test_what_is_read_again_is_a_program_of_its_own(folder, monkeypatch, capsys, named):
    jobs = []
    one = Figures({"weights": 2**30}, 1e12, 2**30, {}, {"flops": 1.0}, 1.0)
    monkeypatch.setattr(command, "compiled", lambda job: jobs.append(job) or one)
    monkeypatch.setattr(command.Topology, "check_compiler", lambda self: None)
    command.main(
        [*SERVE, "--model", str(folder), "--context", "512", *named, "--ratio", "0.3", "--no-search"]
    )
    assert [job.stage for job in jobs] == ["prefill", "passes", "decode"]
    assert "8 × 512 tokens, a step is a part that is read again" in capsys.readouterr().out


def test_longer_than_the_model_is_for_is_said(folder, monkeypatch):
    monkeypatch.setattr(command, "compiled", lambda job: pytest.fail("it compiled"))
    monkeypatch.setattr(command.Topology, "check_compiler", lambda self: None)
    with (
        pytest.warns(Doubt, match="5,000 tokens are more than the 4,096"),
        pytest.raises(pytest.fail.Exception),
    ):
        command.main([*SERVE, "--model", str(folder), "--context", "5000"])
