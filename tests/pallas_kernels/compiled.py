"""Compile the kernels' cases for chips that are not here."""

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

from pallas_kernels.ahead import ENVIRONMENT

OPS = sorted(path.stem for path in (Path(__file__).parent / "cases").glob("*.py"))

CASES = {op: importlib.import_module(f"tests.pallas_kernels.cases.{op}") for op in OPS}


def run(module: str, *args: str, timeout: float) -> list[dict]:
    command = [sys.executable, "-m", f"tests.pallas_kernels.{module}", *args]
    process = subprocess.run(
        command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert process.returncode == 0, process.stderr[-2000:]
    return [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]


def compiled(op: str, chip: str, which: str = "all") -> dict[str, dict]:
    return {report["case"]: report for report in run("compile_cases", op, chip, which, timeout=900)}
