"""`python -m tests.pallas_kernels.compile_cases OP CHIP WHICH`: compile an op's cases for a TPU or a GPU that is not
here.

A line of JSON is printed for each: its name, the bytes of its temporaries, and the largest copy in the program.
An op's cases are `COMPILE` in `cases/OP.py`: name -> (function, arguments, arguments to donate). WHICH is `all`;
`bounded`, for the cases with a bound on temporaries, which are the shapes in use; or the name of a case of `LONG`.
"""

import functools
import importlib
import json
import re
import sys

from pallas_kernels.ahead import compile_for_cuda, compile_for_tpu

WIDTH = {"f32": 4, "s32": 4, "u32": 4, "bf16": 2, "pred": 1, "s8": 1, "u8": 1}


def copies(program: str) -> list[int]:
    """Return the bytes of each array that the optimised program copies."""
    sizes = []
    for dtype, shape in re.findall(r"= \(?(\w+)\[([\d,]*)\]\S* (?:copy|copy-start)\(", program):
        size = WIDTH.get(dtype, 8)
        for n in shape.split(",") if shape else []:
            size *= int(n)
        sizes.append(size)
    return sizes


def main(op: str, chip: str, which: str) -> None:
    cases = importlib.import_module(f"tests.pallas_kernels.cases.{op}")
    compile_ = compile_for_cuda if chip == "H100" else functools.partial(compile_for_tpu, chip)
    chosen = {"all": list(cases.COMPILE), "bounded": list(cases.MOST_TEMPORARIES)}
    for name in chosen.get(which, [which]):
        function, args, donate = (cases.COMPILE if which in chosen else cases.LONG)[name]
        compiled = compile_(function, *args, donate=donate)
        memory = compiled.memory_analysis()
        report = {
            "case": name,
            "temporaries": memory.temp_size_in_bytes,
            "largest_copy": max(copies(compiled.as_text()), default=0),
        }
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
