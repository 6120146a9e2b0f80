"""Tests of parsing command lines, meshes, and the ends of commands."""

import dataclasses
import errno
import signal
import subprocess
import sys
from typing import Annotated, Literal

import pytest
import tyro

from kvjax.cli import launch
from kvjax.cli.launch import MeshShape, Termination, parse_command, run_command, start
from kvjax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Options:
    """Options for these tests."""

    mesh: MeshShape = MeshShape()
    steps: int = 3
    kind: Literal["one", "two"] = "one"
    rate: float | None = None
    lengths: tuple[int, ...] = (8,)


@dataclasses.dataclass(frozen=True)
class Needed:
    """Options without defaults, for these tests."""

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SOURCE")]
    """A thing whose description takes more than one line of a terminal, which is about eighty characters wide."""
    steps: int
    """Number of steps."""


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("1", (1, 1, 1, 1, 1)),
        ("8", (1, 8, 1, 1, 1)),
        ("4x2", (1, 4, 2, 1, 1)),
        ("1x8", (1, 1, 8, 1, 1)),
        ("tensor=4", (1, 1, 4, 1, 1)),
        ("fsdp=4,tensor=2", (1, 4, 2, 1, 1)),
        ("data=2, fsdp=2,tensor=2", (2, 2, 2, 1, 1)),
        ("sequence=4", (1, 1, 1, 4, 1)),
        ("fsdp=2,tensor=2,sequence=2", (1, 2, 2, 2, 1)),
        ("tensor=4,replica=2", (1, 1, 4, 1, 2)),
    ],
)
def test_mesh_shape_is_read_and_written(text, shape):
    parsed = MeshShape.parse(text)
    assert dataclasses.astuple(parsed) == shape
    assert MeshShape.parse(str(parsed)) == parsed


@pytest.mark.parametrize(
    "text", ["0", "-1", "4x0", "4x2x1", "x", "", "fsdp=0", "fsdp=2,fsdp=2", "pods=2", "sequence=0", "1.5"]
)
def test_faulty_mesh_is_refused(text):
    with pytest.raises(
        UserError,
        match=r"expected 8 .*4x2 .*\(data, fsdp, tensor, sequence, replica\), every number at least 1",
    ) as error:
        MeshShape.parse(text)
    assert repr(text) in str(error.value)


def test_command_line_overrides_the_default():
    options = parse_command(Options, ["--mesh", "4x2"], default=Options(steps=7))
    assert options == Options(MeshShape(1, 4, 2), 7)


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["--mesh", "0"], ["--mesh '0': expected 8 (fsdp), 4x2", "at least 1"]),
        (["--stepz", "3"], ["unknown option --stepz; the nearest known: --steps"]),
        (["--steps", "many"], ["--steps must be a whole number, got 'many'"]),
        (["--rate", "high"], ["--rate must be a number, got 'high'"]),
        (["--lengths", "8", "x"], ["--lengths does not take '8', 'x'"]),
        (["--kind", "three"], ["--kind must be one of one, two, got 'three'"]),
        (["--steps"], ["--steps needs a value"]),
        (["more"], ["no option takes more"]),
    ],
)
def test_faulty_command_line_raises_one_line(args, parts, capsys):
    with pytest.raises(UserError) as error:
        parse_command(Options, args)
    line = str(error.value)
    assert all(part in line for part in parts), line
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ([], "missing: SOURCE, --steps INT; --help says more"),
        (["it"], "missing: --steps INT; --help says more"),
    ],
)
def test_missing_arguments_are_named(args, line):
    with pytest.raises(UserError) as error:
        parse_command(Needed, args)
    assert str(error.value) == line


def test_help_prints_the_defaults_and_exits(capsys):
    with pytest.raises(SystemExit) as caught:
        parse_command(Options, ["--help"], default=Options(steps=7))
    assert not caught.value.code
    assert "(default: 7)" in capsys.readouterr().out


@pytest.fixture
def keep_running(monkeypatch):
    """Prevent `run_command` from registering an exit of the test process."""
    monkeypatch.setattr(launch.atexit, "register", lambda *_: None)


@pytest.mark.parametrize(
    ("raised", "code", "line"),
    [
        (UserError("no such\nfolder"), 2, "error: no such folder\n"),
        (
            OSError(errno.ENOSPC, "No space left on device", "out/x"),
            2,
            "error: out/x: No space left on device\n",
        ),
        (PermissionError(errno.EACCES, "Permission denied", "out"), 2, "error: out: Permission denied\n"),
        (ValueError("write failed [No space left on device]"), 2, "error: the disk is full"),
        (ValueError("OUT_OF_RANGE: x [os_error_code='27']"), 2, "error: the disk is full, or a file may not"),
        (OSError("x: could not be written (File too large (os error 27))"), 2, "error: x: could not"),
        (OSError(errno.EFBIG, "File too large", "out"), 2, "error: out: File too large\n"),
        (OSError(errno.ENOSPC, "No space", "from", None, "to"), 2, "error: to: No space\n"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "x" * 5000), 2, "error: xxx"),
        (UserError("a\x1b[31m"), 2, "error: a\\x1b[31m\n"),
        (KeyboardInterrupt(), 130, "stopped by the keyboard\n"),
        (KeyboardInterrupt("say so"), 130, "stopped by the keyboard: say so\n"),
        (Termination("say so"), 143, "stopped by SIGTERM: say so\n"),
    ],
)
@pytest.mark.usefixtures("keep_running")
def test_errors_that_users_can_fix_end_in_one_line(raised, code, line, capsys):
    def main():
        raise raised

    with pytest.raises(SystemExit) as caught:
        run_command(main)
    assert caught.value.code == code
    shown = capsys.readouterr().err
    assert shown.startswith(line)
    assert shown.count("\n") == 1
    assert len(shown) < 500


@pytest.mark.usefixtures("keep_running")
def test_sigterm_ends_in_one_line_after_cleanup(capsys):
    handler, cleaned_up = signal.getsignal(signal.SIGTERM), []

    def main():
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            cleaned_up.append(True)

    # otherwise an unhandled signal would end the tests
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with pytest.raises(SystemExit) as caught:
            run_command(main)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert caught.value.code == 143
    assert capsys.readouterr().err == "stopped by SIGTERM\n"
    assert cleaned_up == [True]


def test_full_disk_is_found_behind_another_error(capsys):
    def main():
        try:
            raise OSError(errno.ENOSPC, "No space left on device", "state")
        except OSError as error:
            raise RuntimeError("the checkpoint failed") from error

    with pytest.raises(SystemExit):
        run_command(main)
    assert capsys.readouterr().err == "error: state: No space left on device\n"


def test_other_errors_keep_their_traceback():
    with pytest.raises(ZeroDivisionError):
        run_command(lambda: 1 // 0)


def test_start_makes_a_mesh_of_virtual_devices_and_reports_it(capsys):
    mesh = start(MeshShape(data=2, fsdp=2, tensor=2))
    assert dict(mesh.shape) == {"data": 2, "fsdp": 2, "tensor": 2, "sequence": 1, "replica": 1}
    assert capsys.readouterr().err.splitlines() == ["No accelerator is used: 8 virtual CPU devices."]


def test_start_refuses_a_mesh_with_too_many_devices():
    with pytest.raises(UserError, match="--mesh 4x4 needs 16 devices, this machine has 8"):
        start(MeshShape(fsdp=4, tensor=4))


def test_accelerator_is_found_by_its_device_node(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "ACCELERATOR_NODES", (str(tmp_path / "accel*"),))
    assert not launch.has_accelerator()
    (tmp_path / "accel0").touch()
    assert launch.has_accelerator()


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_stop_is_not_lost_where_python_ignores_exceptions(name, code):
    """Python ignores exceptions in callbacks of the garbage collector, which jax uses while it compiles."""
    command = f"""
import atexit, gc, signal, time
from kvjax.cli.launch import run_command

def collected(phase, info):
    if phase == "start" and len(raised_in) < 2:
        raised_in.append(phase)
        signal.raise_signal(signal.{name})

def main():
    atexit.register(print, "XLA is waited for")
    gc.callbacks.append(collected)
    for _ in range(1000):
        gc.collect()
        time.sleep(0.01)
    print("not stopped", raised_in)

raised_in = []
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests may run where it is ignored
run_command(main)
"""
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True)
    assert done.stdout == ""
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("stopped by")
