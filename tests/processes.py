"""Programs in two processes of one run, each with one CPU device."""

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


def run_two_processes(code, *args, ends=0):
    """Run Python code in two processes, which end with an exit code. Returns what each printed, and what each said on
    stderr."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    env = os.environ | {
        "PYTHONPATH": str(ROOT),
        "JAX_NUM_CPU_DEVICES": "1",
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_NUM_PROCESSES": "2",
    }
    both = [
        subprocess.Popen(
            [sys.executable, "-c", code, *args],
            env=env | {"JAX_PROCESS_ID": str(index)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        with ThreadPoolExecutor() as pool:  # a full pipe of one must not hold the other
            printed, said = zip(*pool.map(lambda one: one.communicate(timeout=200), both), strict=True)
    finally:
        for process in both:
            process.kill()
            process.wait()
    assert [process.returncode for process in both] == [ends, ends], said
    # the network prints, too, in the middle of lines
    return [re.sub(r"\[Gloo\].*\n", "", text) for text in printed], said
