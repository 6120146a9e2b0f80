"""Bounds on the kernels that a decoded token launches and the bytes that it writes in a layer, on chips that are not
here.

Each bound is a little above the number when the bound was set. Lower the bound when you lower the number.
"""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from pallas_kernels.ahead import ENVIRONMENT, cuda_compiler

pytestmark = pytest.mark.kernels

MOST = {  # the most kernels and the most KiB written
    "h100": {
        ("full", 1): (24, 645),
        ("full", 8): (26, 1320),
        ("wgkv", 1): (31, 655),
        ("wgkv", 8): (33, 1760),
        ("snapkv", 1): (24, 645),
        ("snapkv", 8): (26, 1320),
    },
    "v5e": {
        ("full", 1): (60, 160),
        ("full", 8): (67, 890),
        ("wgkv", 1): (84, 230),
        ("wgkv", 8): (104, 1060),
        ("snapkv", 1): (60, 160),
        ("snapkv", 8): (67, 890),
    },
}
"""Bounds by policy and number of sequences. For comparison, a layer's weight matrices take 21 MiB."""
TEMPORARIES = 2 << 20
SLICED = 400 << 10
"""Bytes of WG-KV's gates of one layer, which may be sliced out for a batch on an H100. The model's weights may not."""


@pytest.fixture(scope="module", params=MOST)
def reports(request):
    if request.param == "h100":
        try:
            cuda_compiler()
        except FileNotFoundError as missing:
            pytest.skip(str(missing))
    elif importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed")
    command = [sys.executable, "-m", "tests.ahead.ledger", request.param]
    process = subprocess.run(
        command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=600, check=False
    )
    assert process.returncode == 0, process.stderr[-2000:]
    lines = [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]
    return MOST[request.param], {(line["policy"], line["batch"]): line for line in lines}


def test_a_decoded_token_writes_little_and_copies_no_weight(reports):
    most, reported = reports
    assert reported.keys() == most.keys()
    for case, (kernels, kibibytes) in most.items():
        ledger = reported[case]
        assert ledger["kernels"] <= kernels, case
        assert ledger["written"] <= kibibytes << 10, case
        assert ledger["sliced"] <= SLICED, case
        assert ledger["temporaries"] <= TEMPORARIES, case
