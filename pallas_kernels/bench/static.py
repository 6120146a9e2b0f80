"""What the compilers say of the kernels, without hardware: rows for TPUs, and for an H100 where its compiler is."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from pallas_kernels.ahead import ENVIRONMENT, cuda_compiler
from pallas_kernels.bench import bundles, ragged

CHIPS = ("v5e", "v6e")


def rows() -> tuple[list[dict], list[str]]:
    """The rows, and a line for whatever was left out."""
    found, left_out = [], []
    if find_spec("libtpu"):
        for chip in CHIPS:
            found += tpu_rows(chip)
        if not ragged.installed():
            left_out.append("vLLM's decoding on a TPU: left out, tpu-inference is not installed")
    else:
        left_out.append("TPU: left out, compiling for one needs libtpu, which is not installed")
    try:
        found += cuda_rows()
    except FileNotFoundError as missing:
        left_out.append(f"H100: left out, {missing}")
    return found, left_out


def tpu_rows(chip: str, *ops: str) -> list[dict]:
    return _process("static_tpu", "LIBTPU_INIT_ARGS", bundles.flags, chip, *ops)


def cuda_rows() -> list[dict]:
    """FileNotFoundError where the compiler is not installed."""
    cuda_compiler()
    return _process("static_cuda", "XLA_FLAGS", lambda folder: f"--xla_dump_to={folder}")


def _process(module: str, variable: str, flags: Callable[[Path], str], *args: str) -> list[dict]:
    """The rows that a process of its own prints, whose compiler dumps into a folder."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", f"pallas_kernels.bench.{module}", folder, *args],
            env=os.environ | ENVIRONMENT | {variable: flags(Path(folder))},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"{module} {' '.join(args)} failed:\n{done.stderr[-4000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
