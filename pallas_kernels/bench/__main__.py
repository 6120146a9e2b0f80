"""Check the ops, time them against the best alternatives, and print the tables of docs/benchmarks.md."""

import argparse
import dataclasses
import os
import sys
import time
from pathlib import Path

import jax

from pallas_kernels.bench import (
    attention_mass,
    mlstm,
    paged_decode,
    report,
    running_topk,
    static,
    torch_rivals,
    vertical_slash,
)
from pallas_kernels.bench.bounds import bounds
from pallas_kernels.bench.correctness import Wrong, check
from pallas_kernels.bench.job import Task, rows
from pallas_kernels.bench.offered import OFFERED
from pallas_kernels.bench.setting import CPU, GPU, Setting

SETTINGS = {"gpu": GPU, "cpu": CPU}
OPS = {
    "vertical_slash": vertical_slash,
    "paged_decode": paged_decode,
    "running_topk": running_topk,
    "attention_mass": attention_mass,
    "mlstm": mlstm,
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.bench", description=__doc__)
    parser.add_argument("--static", action="store_true", help="what the compilers say, without hardware")
    parser.add_argument("--platform", choices=SETTINGS, default="gpu", help="where to measure")
    parser.add_argument(
        "--implementation",
        choices=sorted(frozenset().union(*OFFERED.values())),
        help="what is timed instead of the platform's own, and beside it",
    )
    parser.add_argument("--json", type=Path, help="write the rows here as well")
    options = parser.parse_args(arguments)
    if options.static:
        return show_static(options.json)
    # torch shares the memory; read when JAX first uses the device
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    if options.platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
    elif jax.default_backend() != "gpu":
        print(
            f"jax has no GPU here, only {jax.default_backend()}: try --platform cpu or --static",
            file=sys.stderr,
        )
        sys.exit(2)
    setting = SETTINGS[options.platform]
    chosen, own = options.implementation, setting.implementation
    if chosen not in (None, own):
        setting = dataclasses.replace(setting, implementation=chosen, beside=(own,), checked=(chosen, own))
    try:
        measure(setting, options.json)
    except Wrong as wrong:
        sys.exit(f"not measured, since a result is wrong: {wrong}")


def show_static(json: Path | None) -> None:
    found, left_out = static.rows()
    where = report.where("No hardware")
    print(f"{report.heading(where)}\n\n{report.table(report.STATIC, found)}")
    print("".join(f"\n{line}." for line in left_out))
    if json is not None:
        report.write(json, where | {"rows": found, "left_out": left_out})


def measure(setting: Setting, json: Path | None) -> dict:
    """Check everything, then time everything, and print it."""
    began = time.monotonic()
    seed = time.time_ns() % 2**31
    key = jax.random.key(seed)
    checks = check(setting.checked, key)
    reached = bounds(setting, key)
    found, left_out = [], 0
    for task in tasks(setting, key):
        if time.monotonic() - began > setting.limit:
            left_out += 1
        else:
            found += rows(task, reached, setting)
            torch_rivals.release()
            print(f"{time.monotonic() - began:.0f} s: {task.op}, {task.shape}", file=sys.stderr)
    where = report.where(report.device())
    content = where | {"seed": seed, "checks": checks, "bounds": reached, "rows": found, "left_out": left_out}
    print(f"{report.heading(where)}\n\n{report.checks(checks)}\n\n{report.times(found)}")
    if left_out:
        print(f"\n{left_out} groups of rows were not begun within {setting.limit:.0f} s.")
    if json is not None:
        report.write(json, content)
    return content


def tasks(setting: Setting, key: jax.Array) -> list[Task]:
    """In turns, so that every op has its first rows early."""
    ops = [op.jobs(setting, key) for name, op in OPS.items() if setting.implementation in OFFERED[name]]
    return [jobs[i] for i in range(max(map(len, ops))) for jobs in ops if i < len(jobs)]


if __name__ == "__main__":
    main()
