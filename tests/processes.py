"""Programs in several processes of one run, each with one CPU device."""

import os
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
TRAIN = """
from kvjax.cli.launch import run_command
from kvjax.train.__main__ import main

run_command(main)
"""


def run_processes(code, *args, count=2, exit_code=0):
    """Run Python code in `count` processes of one run, check their exit code, and return the stdout and the stderr of
    each."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    env = os.environ | {
        "PYTHONPATH": str(ROOT),
        "JAX_NUM_CPU_DEVICES": "1",
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_NUM_PROCESSES": str(count),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, *args],
            env=env | {"JAX_PROCESS_ID": str(index)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(count)
    ]
    try:
        with ThreadPoolExecutor(count) as pool:  # a full pipe of one must not block the others
            outputs = pool.map(lambda process: process.communicate(timeout=200), processes)
            printed, errors = zip(*outputs, strict=True)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [exit_code] * count, errors
    # Gloo also prints, in the middle of lines
    return [re.sub(r"\[Gloo\].*\n", "", text) for text in printed], errors
