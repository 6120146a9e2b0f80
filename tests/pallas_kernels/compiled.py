"""Compile programs and the kernels' cases for chips that are not here, in processes of their own."""

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pallas_kernels.ahead import ENVIRONMENT, cuda_compiler

OPS = sorted(path.stem for path in (Path(__file__).parent / "cases").glob("*.py"))

CASES = {op: importlib.import_module(f"tests.pallas_kernels.cases.{op}") for op in OPS}


def require_compiler(platform: str) -> None:
    """Skip the test if there is no compiler for `tpu` or `gpu`."""
    if platform == "gpu":
        try:
            cuda_compiler()
        except FileNotFoundError as missing:
            pytest.skip(str(missing))
    elif importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed")


def run(module: str, *args: str, timeout: float = 900) -> list[dict]:
    """Run a module and return the JSON objects that it prints, one a line."""
    command = [sys.executable, "-m", module, *args]
    process = subprocess.run(
        command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert process.returncode == 0, process.stderr[-2000:]
    return [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]


def compiled(op: str, chip: str, which: str = "all") -> dict[str, dict]:
    return {report["case"]: report for report in run("tests.pallas_kernels.compile_cases", op, chip, which)}
