"""Test the numbers of a run's steps: in its file, on a terminal and in tensorboard."""

import json
import time

import jax.numpy as jnp
import pytest

from kvjax.train import metrics as module
from kvjax.train.metrics import FINITE, Metrics, NotFiniteError


def run(folder, *, steps=range(3), total=3, first=0, **changes):
    with Metrics(folder, total=total, first=first, shown={"loss": ".2f"}, **changes) as metrics:
        for step in steps:
            metrics.step(step, {"loss": jnp.float32(step / 2), "other": jnp.float32(1)}, tokens=10)


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_every_step_is_written_and_the_first_and_last_are_shown(tmp_path, capsys):
    run(tmp_path)
    assert [(line["step"], line["loss"], line["other"]) for line in lines(tmp_path)] == [
        (0, 0, 1),
        (1, 0.5, 1),
        (2, 1, 1),
    ]
    shown = capsys.readouterr().err.splitlines()
    assert [line.split("  ")[:2] for line in shown] == [["step 1/3", "loss 0.00"], ["step 3/3", "loss 1.00"]]
    assert "\x1b" not in "".join(shown)


def test_values_are_read_once_the_next_step_is_queued(tmp_path):
    with Metrics(tmp_path, total=3, first=0, shown={}) as metrics:
        metrics.step(0, {"loss": jnp.float32(0)}, tokens=1)
        assert lines(tmp_path) == []
        metrics.step(1, {"loss": jnp.float32(1)}, tokens=1)
        assert [line["step"] for line in lines(tmp_path)] == [0]
    assert [line["step"] for line in lines(tmp_path)] == [0, 1]


def test_a_flush_writes_the_pending_step_once(tmp_path):
    with Metrics(tmp_path, total=3, first=0, shown={}) as metrics:
        metrics.step(0, {"loss": jnp.float32(0)}, tokens=1)
        metrics.flush()
        assert [line["step"] for line in lines(tmp_path)] == [0]
        metrics.flush()
    assert [line["step"] for line in lines(tmp_path)] == [0]


def test_a_note_has_its_own_line_after_its_step(tmp_path):
    with Metrics(tmp_path, total=3, first=0, shown={}) as metrics:
        metrics.step(0, {"loss": jnp.float32(0.5)}, tokens=1)
        metrics.note(0, "validation", {"distillation": 0.25})
    first, second = lines(tmp_path)
    assert (first["step"], first["loss"]) == (0, 0.5)
    assert (second["step"], second["validation"]) == (0, {"distillation": 0.25})
    run(tmp_path, steps=range(1), total=3, first=0)
    assert len(lines(tmp_path)) == 1, "a run from step 0 drops the notes of step 0, too"


@pytest.mark.parametrize("quiet", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_stops_every_process(tmp_path, value, quiet):
    with Metrics(tmp_path, total=3, first=0, shown={}, quiet=quiet) as metrics:
        metrics.step(0, {"loss": jnp.float32(1)}, tokens=1)
        metrics.step(1, {"loss": jnp.float32(value)}, tokens=1)
        with pytest.raises(NotFiniteError, match=f"step 2: loss is {value}"):
            metrics.flush()
    assert quiet or [line["step"] for line in lines(tmp_path)] == [0]


@pytest.mark.parametrize("quiet", [False, True])
def test_a_gradient_that_is_not_finite_stops_every_process(tmp_path, quiet):
    with Metrics(tmp_path, total=3, first=0, shown={}, quiet=quiet) as metrics:
        metrics.step(0, {"loss": jnp.float32(1), FINITE: jnp.bool_(True)}, tokens=1)
        metrics.step(1, {"loss": jnp.float32(1), FINITE: jnp.bool_(False)}, tokens=1)
        with pytest.raises(NotFiniteError, match="step 2: the gradient is not finite"):
            metrics.flush()
    assert quiet or [line.keys() & {"loss", FINITE} for line in lines(tmp_path)] == [{"loss"}]


def test_a_resumed_run_drops_later_lines_of_the_killed_run(tmp_path):
    run(tmp_path, steps=range(5), total=8)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')  # the line in which the run was killed
    run(tmp_path, steps=range(3, 8), total=8, first=3)
    assert [line["step"] for line in lines(tmp_path)] == list(range(8))


def test_lines_have_speed_and_time_left(tmp_path, monkeypatch, capsys):
    clock = iter(range(0, 1000, 2))
    monkeypatch.setattr(module.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(module, "LINE_SECONDS", 0)
    run(tmp_path, steps=range(3), total=40)
    assert lines(tmp_path)[-1]["tokens_per_second"] == 5
    assert capsys.readouterr().err.splitlines()[-1] == "step 3/40  loss 1.00  5 tokens/s  1:14 left"


@pytest.mark.parametrize(("first", "total", "count"), [(0, 12, 1), (5, 16, 1), (0, 10, 0), (0, 9, 0)])
def test_after_ten_steps_a_run_says_when_it_ends(first, total, count, tmp_path, monkeypatch, capsys):
    """Each step takes two seconds, and is timed when the next one has begun."""
    clock = iter(range(0, 1000, 2))
    monkeypatch.setattr(module.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(module.time, "time", lambda: 1e9)
    run(tmp_path, steps=range(first, total), total=total, first=first)
    estimates = [line for line in capsys.readouterr().err.splitlines() if line.startswith("after")]
    left = 2 * (total - first - 10)
    end = time.strftime("%Y-%m-%d %H:%M", time.localtime(1e9 + left))
    assert estimates == count * [f"after 10 steps: 0:{left:02} left, it ends about {end}"]


def test_a_terminal_gets_a_bar(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with Metrics(tmp_path, total=3, first=0, shown={"loss": ".2f"}) as metrics:
        metrics.step(0, {"loss": jnp.float32(1.5)}, tokens=10)
        metrics.step(1, {"loss": jnp.float32(2.5)}, tokens=10)
        metrics.say("above [the] bar")
        time.sleep(0.2)
    shown = capsys.readouterr().err
    assert "above [the] bar" in shown
    assert "2/3" in shown
    assert "loss 2.50" in shown


def test_only_the_first_process_writes(tmp_path, capsys):
    run(tmp_path, quiet=True)
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr().err == ""


def test_tensorboard_gets_the_same_numbers(tmp_path):
    pytest.importorskip("tensorboardX")
    run(tmp_path, tensorboard=True)
    assert [path.name.startswith("events") for path in (tmp_path / "tensorboard").iterdir()] == [True]


def test_tensorboard_drops_the_steps_that_a_killed_run_left(tmp_path):
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    run(tmp_path, steps=[2], first=2, tensorboard=True)
    (file,) = (tmp_path / "tensorboard").iterdir()
    rest, events = file.read_bytes(), []
    while rest:  # a record is its size in 8 bytes, a checksum in 4, the event and another checksum in 4
        size = int.from_bytes(rest[:8], "little")
        events.append(event_pb2.Event.FromString(rest[12 : 12 + size]))
        rest = rest[16 + size :]
    starts = [event.step for event in events if event.session_log.status == event_pb2.SessionLog.START]
    assert starts == [2]
