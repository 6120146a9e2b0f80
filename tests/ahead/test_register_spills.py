"""Tests that Triton kernels spill few registers on an H100, as counted by CUDA's assembler without a GPU."""

import os
import re
import subprocess
import sys

import pytest

from pallas_kernels.ahead import ENVIRONMENT, cuda_compiler

pytestmark = pytest.mark.kernels

KERNELS = {
    "attention_mass": {"attention_mass"},
    # vertical_slash handles the cases with many query tokens
    "paged_decode": {"paged_decode", "paged_decode_merge", "vertical_slash"},
    "running_topk": {"running_topk"},
    "vertical_slash": {"vertical_slash_dq", "vertical_slash_dkv"},
}
"""Kernels in the compiled cases of each op."""
MOST = {"vertical_slash_dkv": 300}
"""Bytes that a kernel may spill. With 4 warps it is twice as fast on an H100 as with 8 warps, which spill nothing."""


@pytest.mark.parametrize("op", KERNELS)
def test_no_kernel_spills_registers(op, tmp_path):
    try:
        assembler = cuda_compiler()
    except FileNotFoundError as missing:
        pytest.skip(str(missing))
    command = [sys.executable, "-m", "tests.pallas_kernels.compile_cases", op, "H100", "bounded"]
    environment = os.environ | ENVIRONMENT | {"XLA_FLAGS": f"--xla_dump_to={tmp_path}"}
    subprocess.run(command, env=environment, capture_output=True, check=True)
    spilled: dict[str, int] = {}
    for path in tmp_path.glob("*.ptx"):
        names = KERNELS[op] & set(re.findall(r"\.entry (\w+)", path.read_text()))
        command = [assembler, "-v", "-arch=sm_90a", path, "-o", path.with_suffix(".cubin")]
        for name in names:
            report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
            spills = sum(map(int, re.findall(r"(\d+) bytes spill stores", report)))
            spilled[name] = max(spills, spilled.get(name, 0))
    assert spilled.keys() == KERNELS[op]
    assert all(spills <= MOST.get(name, 0) for name, spills in spilled.items()), spilled
