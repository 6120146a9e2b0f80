"""Training runs in two processes."""

import os
import socket
import subprocess
import sys

from tests.train.killed import ROOT

MAIN = """
import sys
from kvjax.cli.launch import run_command
from kvjax.train.__main__ import main

run_command(main)
"""


def run_two_processes(*args, code=0, before=""):
    """`kvjax.train` in two processes with a device each, which both end with an exit code; what each said.

    before: code that both run first.
    """
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
            [sys.executable, "-c", before + MAIN, *args],
            env=env | {"JAX_PROCESS_ID": str(index)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        said = [process.communicate(timeout=200)[1] for process in both]
    finally:
        for process in both:
            process.kill()
            process.wait()
    assert [process.returncode for process in both] == [code, code], said
    return said
