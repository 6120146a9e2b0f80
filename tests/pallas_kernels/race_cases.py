"""`python -m tests.pallas_kernels.race_cases OP MODE BUG`: run an op's TPU kernel in the interpreter that simulates
memory spaces and semaphores. Copies are done "eager" or "on_wait". A bug is planted in the source ("none": no bug).

A line of JSON is printed: the worst error against the reference, and whether two accesses raced. `cases/OP.py` has
`BUGS`: name -> (text in the kernel's source, its replacement), and `interpreted(kernel, interpret) -> worst error`,
where `kernel` is the module. Each run is a separate process, since a bug may hang it.
"""

import importlib
import json
import sys
import types
from pathlib import Path

from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu


def source_of(op: str, text: str) -> Path:
    """Return the file of the op's TPU kernels that contains the text, which must occur exactly once."""
    folder = Path(importlib.import_module(f"pallas_kernels.{op}").__path__[0])
    files = [path for path in folder.glob("tpu*.py") for _ in range(path.read_text().count(text))]
    assert len(files) == 1, f"{text!r} occurs {len(files)} times in the TPU kernels of {op}"
    return files[0]


def plant(op: str, kernel: types.ModuleType, bug: tuple[str, str]) -> None:
    """Put the bug into the source of `kernel`, or of a module that it imports."""
    path = source_of(op, bug[0])
    module = importlib.import_module(f"pallas_kernels.{op}.{path.stem}")
    exec(compile(path.read_text().replace(*bug), path, "exec"), module.__dict__)
    if module is not kernel:
        importlib.reload(kernel)


def main(op: str, mode: str, bug: str) -> None:
    cases = importlib.import_module(f"tests.pallas_kernels.cases.{op}")
    kernel = importlib.import_module(f"pallas_kernels.{op}.tpu")
    if bug != "none":
        plant(op, kernel, cases.BUGS[bug])
    params = pltpu.InterpretParams(dma_execution_mode=mode, detect_races=True)
    error = cases.interpreted(kernel, params)
    races = interpret_pallas_call.races
    print(json.dumps({"error": error, "races": races is not None and races.races_found}))


if __name__ == "__main__":
    main(*sys.argv[1:])
