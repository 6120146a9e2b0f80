"""Tests of the GPU kernels without a GPU, with XLA's compiler for CUDA and its assembler (the extra `cuda-compiler`).

They run in separate processes, as for TPUs.
"""

import pytest

from tests.pallas_kernels.compiled import CASES, OPS, compiled, require_compiler

pytestmark = pytest.mark.kernels


@pytest.fixture(scope="module", autouse=True)
def packages():
    require_compiler("gpu")


@pytest.mark.parametrize("op", OPS)
def test_compiles_for_an_h100(op):
    reports = compiled(op, "H100")
    assert reports.keys() == CASES[op].COMPILE.keys()
    for name, most in CASES[op].MOST_TEMPORARIES.items():
        assert reports[name]["temporaries"] <= most
        assert reports[name]["largest_copy"] <= most
