"""The start of every command: its arguments, its devices, and errors that a user can fix, which end in one line instead
of a traceback.

Importing this module does not import jax, so that `--help` and errors of the command line come at once.
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

STORAGE_ERRORS = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EROFS, errno.EPERM),
    *(errno.ENAMETOOLONG, errno.ELOOP, errno.EISDIR, errno.ENOTDIR),
}
"""The operating system's errors about a path or a disk that a user can fix."""
SHUTDOWN_SECONDS = 10.0
"""The time that a process which ends with an error waits for the other processes of its run to end."""
ACCELERATOR_NODES = ("/dev/nvidia[0-9]*", "/dev/accel*", "/dev/vfio/[0-9]*", "/dev/kfd", "/dev/dxg")
"""Device nodes of NVIDIA GPUs, of TPUs (two generations), of AMD GPUs, and of GPUs under WSL."""


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """The number of devices along each mesh axis. `data` and `fsdp` split the batch, `tensor` splits heads, `sequence`
    splits tokens, and `replica` together with `tensor` splits the MLP, experts and the vocabulary."""

    data: int = 1
    """Devices that split the batch."""
    fsdp: int = 1
    """Devices that split the batch, and weights."""
    tensor: int = 1
    """Devices that split heads."""
    sequence: int = 1
    """Devices that split tokens, and kv heads where an operation needs whole sequences."""
    replica: int = 1
    """Devices that hold the same kv heads, for meshes with more devices than kv heads."""

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
        """Return the mesh for a model with this number of kv heads. If `tensor` is a multiple of it, the quotient goes
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
    """Return the dataclass `cls` with the values of the command line (`sys.argv` if `args` is None). `default` has the
    values of missing options.

    `--help` prints the fields with their docstrings and exits. Raises UserError for anything wrong.
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

    output = io.StringIO()
    module = sys.modules["__main__"].__spec__
    program = f"python -m {module.name.removesuffix('.__main__')}" if module and args is None else None
    try:
        with registry, contextlib.redirect_stderr(output):
            options: dict[str, Any] = {} if default is None else {"default": default}
            return tyro.cli(cls, prog=program, args=args, **options)
    except SystemExit as exit_:
        if not exit_.code:
            raise
        raise UserError(_one_line(output.getvalue())) from None


def _one_line(box: str) -> str:
    """Return the message in a box that tyro printed, with the options it suggests, without title and frame (in Unicode
    or ASCII)."""
    _, *missing = re.split(r"Missing from .*", box)
    if missing:
        # names are indented by six spaces and their descriptions by ten; advice follows after a rule
        section = re.split("──|---", missing[0].replace("│", " "))[0]
        names = re.findall(r"^ {6}(\S.*?) *$", section, re.MULTILINE)
        return f"missing: {', '.join(names)}; --help says more"
    parts: list[list[str]] = [[]]
    for line in (line.strip("│ ") for line in box.splitlines()):
        if line.startswith(("╭", "╰", "─", "---")):
            parts.append([])
        else:
            parts[-1].append(line)
    _, message, *hints = [" ".join(part).strip() for part in parts]
    suggested = [
        word.rstrip(",")
        for hint in hints
        if hint.startswith("Perhaps")
        for word in hint.split()
        if word.startswith("--")
    ]
    message = _reworded(message)
    return f"{message}; the nearest known: {', '.join(suggested)}" if suggested else message


def _reworded(message: str) -> str:
    """Return tyro's message about an option in the form of kvjax's messages: what was expected and what was given."""
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
    values = re.search(r"\[('.*?')\]|: ('.*')$", why)
    kind = "whole number" if "int()" in why else "number" if "to float" in why else ""
    if values is None or not (kind or "valid parse" in why):
        name = f"{option[2:]} "
        return f"{option} {why.removeprefix(name)}" if why.startswith(name) else f"{option}: {why}"
    value = values[1] or values[2]
    return f"{option} must be a {kind}, got {value}" if kind else f"{option} does not take {value}"


def start(shape: MeshShape, *, alone: bool = False) -> Mesh:
    """Return a mesh of that shape on this machine's accelerators, or on virtual CPU devices if it has none.

    The first call determines what jax runs on, so it must come before anything else that uses jax.

    Args:
        alone: do not join other processes of the same launcher. By default they form one mesh (`join_processes`).

    Raises:
        UserError: there are too few accelerators, the mesh uses no device of some process, or processes do not find
            each other.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not has_accelerator():
        # otherwise an installed libtpu or CUDA plugin prints long messages about the missing devices
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
    mesh_devices = devices[: shape.count]
    used, present = ({device.process_index for device in group} for group in (mesh_devices, devices))
    if used != present:
        raise UserError(
            f"--mesh {shape} uses {shape.count} of the {len(devices)} devices, and no device of some of the "
            f"{len(present)} processes"
        )

    from kvjax.mesh import make_mesh

    if launcher and jax.process_count() == 1 and threading.current_thread() is threading.main_thread():
        # jax's preemption service, meant for several processes, has taken the signal: install the handler again
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
    if jax.process_index() == 0:
        if launcher:
            print(f"{launcher}: {jax.process_count()} processes, {len(devices)} devices.", file=sys.stderr)
        if shape.count > 1 and devices[0].platform == "cpu":
            print(f"No accelerator is used: {shape.count} virtual CPU devices.", file=sys.stderr)
    return make_mesh(**dataclasses.asdict(shape))


@contextlib.contextmanager
def first_process_prints() -> Iterator[None]:
    """Return a context in which only the first of several processes prints. Errors are printed outside of it."""
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
    """Return a mesh of one CPU device on any machine, for work on shapes alone."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    return start(MeshShape(), alone=True)


def has_accelerator() -> bool:
    """Return True if this machine has a device node of a GPU or a TPU."""
    return any(glob.glob(pattern) for pattern in ACCELERATOR_NODES)


def _virtual_devices(jax: Any, count: int) -> None:
    """Set up at least `count` CPU devices in this process, unless jax has already started or its flags set the
    number."""
    preset = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if preset or jax.config.jax_num_cpu_devices >= count:
        return
    with contextlib.suppress(RuntimeError):  # already started
        jax.config.update("jax_num_cpu_devices", count)


class Termination(KeyboardInterrupt):
    """SIGTERM, which batch systems and `timeout` send before SIGKILL."""


def run_command(main: Callable[[], None]) -> None:
    """Run a command's `main`. An error that a user can fix ends in one line on stderr and exit code 2.

    SIGTERM ends it like Ctrl-C, and partial files are removed. With several processes, jax's preemption service handles
    the signal instead.
    """
    old_handler = signal.signal(signal.SIGTERM, _terminate)
    old_format, warnings.formatwarning = warnings.formatwarning, _as_line
    try:
        with _repeated_stops(), only_named(sys.argv[1:]):
            main()
        return
    except UserError as error:
        line, code = f"error: {error}", 2
    except Termination as stop:
        line, code = _with_advice("stopped by SIGTERM", stop), 143
    except KeyboardInterrupt as stop:
        line, code = _with_advice("stopped by the keyboard", stop), 130
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
        signal.signal(signal.SIGTERM, old_handler)
        warnings.formatwarning = old_format
    if line:
        print(line, file=sys.stderr)
    if code > 128 or _several_processes():
        # a running compilation goes on in a thread of XLA, which would crash after Python's end
        atexit.register(_exit_at_once, code)
    sys.exit(code)


def _exit_at_once(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    if _several_processes():
        # most errors end all processes; an error of this one alone must not leave the others waiting
        shutdown = threading.Thread(target=sys.modules["jax"].distributed.shutdown, daemon=True)
        shutdown.start()
        shutdown.join(SHUTDOWN_SECONDS)
    os._exit(code)


def _several_processes() -> bool:
    """Return True if this process has joined others."""
    return "jax" in sys.modules and sys.modules["jax"].distributed.is_initialized()


@contextlib.contextmanager
def _repeated_stops() -> Iterator[None]:
    """Return a context that repeats an interrupt a moment later if Python has ignored it. Python ignores exceptions in
    callbacks of the garbage collector, which may run while jax compiles."""
    old_hook, timers = sys.unraisablehook, []

    def repeat(ignored: sys.UnraisableHookArgs) -> None:
        if not issubclass(ignored.exc_type, KeyboardInterrupt):
            old_hook(ignored)
            return
        number = signal.SIGTERM if issubclass(ignored.exc_type, Termination) else signal.SIGINT
        timers.append(threading.Timer(0.05, _thread.interrupt_main, (number,)))
        timers[-1].start()

    sys.unraisablehook = repeat
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()
        sys.unraisablehook = old_hook


def _as_line(message: Warning | str, category: type[Warning], *where: Any) -> str:
    """Return a warning in the form in which commands print it. A warning for the user has no file and line."""
    if category is UserWarning:
        return f"warning: {one_line(str(message))}\n"
    return f"{where[0]}:{where[1]}: {category.__name__}: {one_line(str(message))}\n"


def _with_advice(line: str, stop: KeyboardInterrupt) -> str:
    """Return the line, followed by the interrupted command's advice on how to continue, if any."""
    return f"{line}: {stop}" if str(stop) else line


def _terminate(*_: object) -> None:
    raise Termination


def storage_problem(error: BaseException) -> str | None:
    """Return one line for a full disk or an unusable path (`STORAGE_ERRORS`) anywhere in the chain of causes; None if
    there is neither."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in STORAGE_ERRORS:
            # after a failed copy, filename is the source and filename2 the target
            return f"{cause.filename2 or cause.filename or 'the disk'}: {cause.strerror}"
        for number in (errno.ENOSPC, errno.EFBIG):
            # other libraries have only a text
            if os.strerror(number) in str(cause) or f"os_error_code='{number}'" in str(cause):
                if (
                    isinstance(cause, OSError) and cause.errno is None
                ):  # raised in kvjax.files, with the file's name
                    return str(cause)
                return f"the disk is full, or a file may not be as large: {os.strerror(number)}"
        cause = cause.__cause__ or cause.__context__
    return None
