"""Tests of the TPU kernels without a TPU, with the real compiler and with an interpreter that detects races.

All run in separate processes, since libtpu slows a process down and prints, and a planted bug may hang.
"""

import importlib
import importlib.util
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from pallas_kernels.ahead import TPUS
from tests.pallas_kernels.compiled import CASES, OPS, compiled, run
from tests.pallas_kernels.race_cases import source_of

pytestmark = pytest.mark.kernels

MODES = "eager", "on_wait"
"""The time at which an interpreted copy happens: its start, or the wait for it."""
WITH_LIBTPU = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")


def raced(op: str, mode: str) -> dict:
    return run("tests.pallas_kernels.race_cases", op, mode, "none", timeout=120)[0]


def noticed(op: str, bug: str) -> bool:
    """Return True if some mode gives a wrong value, a race, an error or no end."""
    for mode in MODES:
        try:
            (report,) = run("tests.pallas_kernels.race_cases", op, mode, bug, timeout=40)
        except (AssertionError, subprocess.TimeoutExpired):
            return True
        if report["races"] or not report["error"] < 1e-3:
            return True
    return False


@pytest.fixture(scope="module")
def outcome(request):
    """Return a function that gives the result of a test's process. The processes of all selected tests run in parallel,
    one per core."""
    jobs = {
        "test_compiles_for_a_tpu": compiled,
        "test_memory_for_long_prompts": compiled,
        "test_copies_and_reads_do_not_race": raced,
        "test_a_planted_bug_is_noticed": noticed,
    }
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        running = {
            item.name: pool.submit(jobs[item.originalname], **item.callspec.params)
            for item in request.session.items
            if item.module is request.module
        }
        yield lambda test: running[test.node.name].result()


CHIPS = [("v5e", "bounded"), *((chip, "all" if chip == "v5e" else "bounded") for chip in TPUS)]
"""Chips, and the cases that are compiled for them. Only the first, the shapes in use, runs by default."""


@WITH_LIBTPU
@pytest.mark.parametrize(
    ("chip", "which"), [CHIPS[0], *(pytest.param(*x, marks=pytest.mark.thorough) for x in CHIPS[1:])]
)
@pytest.mark.parametrize("op", OPS)
def test_compiles_for_a_tpu(op, chip, which, outcome, request):
    reports, cases = outcome(request), CASES[op]
    assert reports.keys() == (cases.COMPILE if which == "all" else cases.MOST_TEMPORARIES).keys()
    for name, most in CASES[op].MOST_TEMPORARIES.items():
        assert reports[name]["temporaries"] <= most
        assert reports[name]["largest_copy"] <= most


@WITH_LIBTPU
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("op", "chip", "which"),
    [
        ("running_topk", "v5e", "1048576 keys in counts"),
        ("vertical_slash", "v5e", "prefill of 400000"),
        ("vertical_slash", "v5p", "prefill of 1048576"),
    ],
)
def test_memory_for_long_prompts(op, chip, which, outcome, request):
    report, most = outcome(request)[which], CASES[op].MOST_OF_LONG[which]
    assert report["temporaries"] <= most
    assert report["largest_copy"] <= most


@pytest.mark.parametrize("mode", [pytest.param("eager", marks=pytest.mark.thorough), "on_wait"])
@pytest.mark.parametrize(
    "op", [pytest.param(x, marks=pytest.mark.thorough if x in ("mlstm", "running_topk") else ()) for x in OPS]
)
def test_copies_and_reads_do_not_race(op, mode, outcome, request):
    report = outcome(request)
    assert report["error"] < 1e-5
    assert not report["races"]


@pytest.mark.thorough
@pytest.mark.parametrize(("op", "bug"), [(op, bug) for op in OPS for bug in CASES[op].BUGS])
def test_a_planted_bug_is_noticed(op, bug, outcome, request):
    source_of(op, CASES[op].BUGS[bug][0])
    assert outcome(request)
