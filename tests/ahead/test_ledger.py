"""Bounds on the kernels that a decoded token launches and the bytes that it writes in a layer, on chips that are not
here.

Each bound is a little above the number when the bound was set. Lower the bound when you lower the number.
"""

import pytest

from tests.pallas_kernels.compiled import require_compiler, run

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
    require_compiler("gpu" if request.param == "h100" else "tpu")
    lines = run("tests.ahead.ledger", request.param)
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
