"""The start of every command: its arguments, its devices, and one line instead of a traceback for errors that a user
can fix.

Importing this imports no jax, so that `--help` and a refused command line answer at once.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import dataclasses
import errno
import glob
import io
import math
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from kvjax.cli.cluster import join_processes
from kvjax.cli.compile_cache import keep_programs
from kvjax.errors import UserError, one_line
from kvjax.plugins import only_named

if TYPE_CHECKING:
    from jax.sharding import Mesh

T = TypeVar("T")

STORAGE = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EROFS, errno.EPERM),
    *(errno.ENAMETOOLONG, errno.ELOOP, errno.EISDIR, errno.ENOTDIR),
}
"""Errors of the operating system about a path or a disk that a user can fix."""
PATIENCE = 10.0
"""Seconds that a process which ends with an error waits for the run's others to end."""
ACCELERATOR_NODES = ("/dev/nvidia[0-9]*", "/dev/accel*", "/dev/vfio/[0-9]*", "/dev/kfd", "/dev/dxg")
"""Device nodes of NVIDIA GPUs, of TPUs (two generations), of AMD GPUs, and of GPUs under WSL."""


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """Devices along each mesh axis: `data` and `fsdp` split the batch, `tensor` splits heads, `sequence` tokens, and
    `replica` the MLP, experts and the vocabulary, beside `tensor`."""

    data: int = 1
    """Devices that split the batch."""
    fsdp: int = 1
    """Devices that split the batch, and weights."""
    tensor: int = 1
    """Devices that split heads."""
    sequence: int = 1
    """Devices that split tokens, and kv heads where whole sequences are looked at."""
    replica: int = 1
    """Devices that hold the same kv heads, where there are more devices than these."""

    @classmethod
    def parse(cls, text: str) -> MeshShape:
        """Parse a mesh: `8` is fsdp=8, `4x2` is fsdp × tensor, and axes can be named: `fsdp=2,tensor=2,sequence=2`."""
        try:
            if "=" in text:
                pairs = [part.split("=") for part in text.split(",")]
                sizes = {name.strip(): int(size) for name, size in pairs}
                if len(sizes) < len(pairs):
                    raise ValueError
            else:
                sizes = dict(zip(("fsdp", "tensor"), map(int, text.split("x")), strict=False))
                if len(sizes) < len(text.split("x")):
                    raise ValueError
            shape = cls(**sizes)
        except (TypeError, ValueError):
            shape = cls(0)
        if min(dataclasses.astuple(shape)) < 1:
            raise UserError(
                f"mesh {text!r}: expected 8 (fsdp), 4x2 (fsdp × tensor) or fsdp=4,tensor=2 (data, fsdp, tensor, "
                "sequence, replica), every number at least 1"
            )
        return shape

    @property
    def count(self) -> int:
        """The number of devices."""
        return math.prod(dataclasses.astuple(self))

    @property
    def batch_shards(self) -> int:
        """The number of parts that a batch is split into."""
        return self.data * self.fsdp

    def for_heads(self, kv_heads: int) -> MeshShape:
        """Return the mesh for a model of so many kv heads: where `tensor` is a multiple of them, the rest of it belongs
        to `replica`."""
        heads = kv_heads // self.sequence
        if heads == 0 or self.tensor % heads:
            return self
        return dataclasses.replace(self, tensor=heads, replica=self.replica * self.tensor // heads)

    def __str__(self) -> str:
        if max(self.data, self.sequence, self.replica) > 1:
            sizes = dataclasses.asdict(self).items()
            return ",".join(f"{axis}={size}" for axis, size in sizes if size > 1)
        return f"{self.fsdp}x{self.tensor}" if self.tensor > 1 else str(self.fsdp)


def parse_command(cls: type[T], args: Sequence[str] | None = None, *, default: T | None = None) -> T:
    """Return the dataclass `cls` from the command line (`sys.argv` if `args` is None), over `default`'s values.

    `--help` prints the fields with their docstrings and leaves. Raises UserError, one line, for anything wrong.
    """
    import tyro

    registry = tyro.constructors.ConstructorRegistry()

    @registry.primitive_rule
    def mesh_shape(info: Any) -> Any:
        if info.type is not MeshShape:
            return None
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs=1,
            metavar="N|FSDPxTENSOR",
            instance_from_str=lambda texts: MeshShape.parse(texts[0]),
            is_instance=lambda value: isinstance(value, MeshShape),
            str_from_instance=lambda shape: [str(shape)],
        )

    complaint = io.StringIO()
    module = sys.modules["__main__"].__spec__
    program = f"python -m {module.name.removesuffix('.__main__')}" if module and args is None else None
    try:
        with registry, contextlib.redirect_stderr(complaint):
            known: dict[str, Any] = {} if default is None else {"default": default}
            return tyro.cli(cls, prog=program, args=args, **known)
    except SystemExit as end:
        if not end.code:
            raise
        raise UserError(_one_line(complaint.getvalue())) from None


def _one_line(box: str) -> str:
    """Return the message in one of tyro's boxes, with the names it offers, without title and frame (of either
    charset)."""
    _, *missing = re.split(r"Missing from .*", box)
    if missing:
        # names are indented by six, what they mean by ten, and after a rule comes advice
        part = re.split("──|---", missing[0].replace("│", " "))[0]
        names = re.findall(r"^ {6}(\S.*?) *$", part, re.MULTILINE)
        return f"missing: {', '.join(names)}; --help says more"
    parts: list[list[str]] = [[]]
    for line in (line.strip("│ ") for line in box.splitlines()):
        if line.startswith(("╭", "╰", "─", "---")):
            parts.append([])
        else:
            parts[-1].append(line)
    _, message, *hints = [" ".join(part).strip() for part in parts]
    offered = [
        word.rstrip(",")
        for hint in hints
        if hint.startswith("Perhaps")
        for word in hint.split()
        if word.startswith("--")
    ]
    message = _in_our_words(message)
    return f"{message}; the nearest known: {', '.join(offered)}" if offered else message


def _in_our_words(message: str) -> str:
    """Return tyro's message about one option in our words: the option, what was expected and what was given, without
    terms of its parser."""
    if unknown := re.fullmatch(r"Unrecognized options: (.*)", message):
        words = unknown[1].split(", ")
        options = [word for word in words if word.startswith("-")]
        return f"unknown option {', '.join(options)}" if options else f"no option takes {', '.join(words)}"
    if missing := re.match(r"Missing value for argument '(--[\w-]+)'", message):
        return f"{missing[1]} needs a value"
    if choice := re.match(
        r"invalid choice '(.*)' for argument '(--[\w-]+)'. Expected one of \((.*)\)", message
    ):
        return f"{choice[2]} must be one of {choice[3].replace(chr(39), '').rstrip(',')}, got {choice[1]!r}"
    wrong = re.match(r"Error parsing (--[\w-]+): (.*)", message)
    if wrong is None:
        return message
    option, why = wrong.groups()
    given = re.search(r"\[('.*?')\]|: ('.*')$", why)
    kind = "whole number" if "int()" in why else "number" if "to float" in why else ""
    if given is None or not (kind or "valid parse" in why):
        own = f"{option[2:]} "
        return f"{option} {why.removeprefix(own)}" if why.startswith(own) else f"{option}: {why}"
    value = given[1] or given[2]
    return f"{option} must be a {kind}, got {value}" if kind else f"{option} does not take {value}"


def start(shape: MeshShape, *, alone: bool = False) -> Mesh:
    """Return a mesh of that shape on this machine's accelerators, or on virtual CPU devices where it has none.

    The first call decides what jax runs on, so it comes before anything else that uses jax.

    alone: this process does not join others that the same launcher has started; else they form one mesh
        (`join_processes`).

    Raises:
        UserError: accelerators are there, but fewer than the mesh needs; or processes that are not used by the mesh or
            do not find each other.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not has_accelerator():
        # without this, an installed libtpu or CUDA plugin complains at length that there is nothing to run on
        os.environ.setdefault("JAX_PLATFORMS", "cpu")

    import jax

    jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS") or None)
    keep_programs()
    launcher, processes = ("", 1) if alone else join_processes(jax)
    _virtual_devices(jax, -(-shape.count // processes))
    devices = jax.devices()
    if len(devices) < shape.count:
        where = (
            "this machine has" if jax.process_count() == 1 else f"the {jax.process_count()} processes have"
        )
        kind = devices[0].platform
        raise UserError(f"--mesh {shape} needs {shape.count} devices, {where} {len(devices)} ({kind})")
    used, every = ({device.process_index for device in some} for some in (devices[: shape.count], devices))
    if used != every:
        raise UserError(
            f"--mesh {shape} takes {shape.count} of the {len(devices)} devices, and none of some of the {len(every)} "
            "processes"
        )

    from kvjax.mesh import make_mesh

    if launcher and jax.process_count() == 1 and threading.current_thread() is threading.main_thread():
        # jax's preemption service, which is for several processes, has taken the signal
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
    if jax.process_index() == 0:
        if launcher:
            print(f"{launcher}: {jax.process_count()} processes, {len(devices)} devices.", file=sys.stderr)
        if shape.count > 1 and devices[0].platform == "cpu":
            print(f"No accelerator is used: {shape.count} virtual CPU devices.", file=sys.stderr)
    return make_mesh(**dataclasses.asdict(shape))


@contextlib.contextmanager
def first_process_prints() -> Iterator[None]:
    """Return a context in which only the first of several processes prints. Errors leave it before they are printed."""
    import jax

    if jax.process_index() == 0:
        yield
        return
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        yield


def start_without_devices() -> Mesh:
    """Return a mesh of one CPU device, whatever this machine has, for work on shapes alone."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    return start(MeshShape(), alone=True)


def has_accelerator() -> bool:
    """Return True if this machine shows a device node of a GPU or a TPU."""
    return any(glob.glob(pattern) for pattern in ACCELERATOR_NODES)


def _virtual_devices(jax: Any, count: int) -> None:
    """Set up at least `count` CPU devices in this process, unless jax has already started or its flags set their
    number."""
    preset = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if preset or jax.config.jax_num_cpu_devices >= count:
        return
    with contextlib.suppress(RuntimeError):  # already started: what there is must do
        jax.config.update("jax_num_cpu_devices", count)


class Termination(KeyboardInterrupt):
    """SIGTERM, which batch systems and `timeout` send before they kill."""


def run_command(main: Callable[[], None]) -> None:
    """Run a command's `main`. An error that a user can fix ends in one line on stderr and exit code 2.

    SIGTERM ends it as the keyboard does, with what it was writing removed. Several processes are an exception: there
    jax's preemption service takes the signal.
    """
    before = signal.signal(signal.SIGTERM, _terminate)
    usual, warnings.formatwarning = warnings.formatwarning, _as_line
    try:
        with _stops_come_again(), only_named(sys.argv[1:]):
            main()
        return
    except UserError as error:
        line, code = f"error: {error}", 2
    except Termination as stop:
        line, code = _said("stopped by SIGTERM", stop), 143
    except KeyboardInterrupt as stop:
        line, code = _said("stopped by the keyboard", stop), 130
    except BrokenPipeError:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # so that the final flush does not fail
        line, code = "", 1
    except Exception as error:
        problem = storage_problem(error)
        if problem is None:
            raise
        line, code = f"error: {one_line(problem)}", 2
    finally:
        signal.signal(signal.SIGTERM, before)
        warnings.formatwarning = usual
    if line:
        print(line, file=sys.stderr)
    if code > 128 or _several_processes():
        # a compilation goes on in a thread of XLA's, which Python waits for, and crashes once Python has ended
        atexit.register(_end_at_once, code)
    sys.exit(code)


def _end_at_once(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    if _several_processes():
        # most errors end all processes; those that this one alone has must not leave the others waiting
        leaving = threading.Thread(target=sys.modules["jax"].distributed.shutdown, daemon=True)
        leaving.start()
        leaving.join(PATIENCE)
    os._exit(code)


def _several_processes() -> bool:
    """Return True if this process has joined others."""
    return "jax" in sys.modules and sys.modules["jax"].distributed.is_initialized()


@contextlib.contextmanager
def _stops_come_again() -> Iterator[None]:
    """Return a context in which a stop that came where Python ignores exceptions, as in callbacks of the garbage
    collector while jax compiles, comes once more a moment later."""
    usual, to_come = sys.unraisablehook, []

    def ignored(what: sys.UnraisableHookArgs) -> None:
        if not issubclass(what.exc_type, KeyboardInterrupt):
            usual(what)
            return
        number = signal.SIGTERM if issubclass(what.exc_type, Termination) else signal.SIGINT
        to_come.append(threading.Timer(0.05, _thread.interrupt_main, (number,)))
        to_come[-1].start()

    sys.unraisablehook = ignored
    try:
        yield
    finally:
        for timer in to_come:
            timer.cancel()
        sys.unraisablehook = usual


def _as_line(message: Warning | str, category: type[Warning], *where: Any) -> str:
    """Return a warning as a command prints it. One that is meant for the user stands alone, without file and line."""
    if category is UserWarning:
        return f"warning: {one_line(str(message))}\n"
    return f"{where[0]}:{where[1]}: {category.__name__}: {one_line(str(message))}\n"


def _said(line: str, stop: KeyboardInterrupt) -> str:
    """Return the line, followed by the command's advice on how to continue, if it gives any."""
    return f"{line}: {stop}" if str(stop) else line


def _terminate(*_: object) -> None:
    raise Termination


def storage_problem(error: BaseException) -> str | None:
    """Return one line for a full disk or a path that cannot be used (`STORAGE`), found anywhere in the chain of causes;
    else None."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in STORAGE:
            # a copy names what it read before what it wrote
            return f"{seen.filename2 or seen.filename or 'the disk'}: {seen.strerror}"
        for number in (errno.ENOSPC, errno.EFBIG):
            # other libraries' words for it
            if os.strerror(number) in str(seen) or f"os_error_code='{number}'" in str(seen):
                if isinstance(seen, OSError) and seen.errno is None:  # of kvjax.files, which names the file
                    return str(seen)
                return f"the disk is full, or a file may not be as large: {os.strerror(number)}"
        seen = seen.__cause__ or seen.__context__
    return None
