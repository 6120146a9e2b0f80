"""Tests of kvjax's own programs, compiled for chips that are not here: four v5e chips or four H100s, with fsdp 2 ×
tensor 2."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from pallas_kernels.ahead import ENVIRONMENT, cuda_compiler
from tests.ahead.compile_programs import HEAD_DIMS, SPLIT, TRAINED

pytestmark = pytest.mark.kernels


@pytest.fixture(scope="module", params=["tpu", "gpu"])
def platform(request):
    if request.param == "tpu" and importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed")
    if request.param == "gpu":
        try:
            cuda_compiler()
        except FileNotFoundError as missing:
            pytest.skip(str(missing))
    return request.param


ALL = [pytest.param(x, marks=() if x == TRAINED else pytest.mark.thorough) for x in HEAD_DIMS]


@pytest.fixture(scope="module")
def which(request):
    """Return "all" if a selected test needs all programs, else "few"."""
    asked = (item for item in request.session.items if item.module is request.module)
    return "all" if any(item.get_closest_marker("thorough") for item in asked) else "few"


@pytest.fixture(scope="module")
def reports(platform, which):
    command = [sys.executable, "-m", "tests.ahead.compile_programs", platform, which]
    done = subprocess.run(
        command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["program"]: line for line in lines}


def test_every_attention_is_a_kernel(reports, platform, which):
    kernels = {name: set(report["kernels"]) for name, report in reports.items()}
    decode = {"paged_decode", "paged_decode_append" if platform == "tpu" else "paged_decode_merge"}
    forward = "vertical_slash" if platform == "tpu" else "vertical_slash_hopper"
    wanted = {
        "training": {forward, "vertical_slash_dq", "vertical_slash_dkv"},
        "prefill": {forward, "far_list"} if platform == "tpu" else {forward},
        "decode": decode,
        "decode, int8 entries": decode,
        "branches": set(),
        "compaction": {"attention_mass"},
    }
    if which == "all":
        wanted |= {"decode, counted and chosen": decode | {"attention_mass"}, "decode, compacting": decode}
    assert kernels == {
        f"{name}, head_dim {head_dim}": own
        for name, own in wanted.items()
        for head_dim in (HEAD_DIMS if which == "all" else (TRAINED,))
        if head_dim == TRAINED or name not in ("training", "decode, compacting")
    } | ({SPLIT: wanted["training"]} if which == "all" else {})


@pytest.mark.parametrize("head_dim", ALL)
@pytest.mark.parametrize("program", ["decode", "decode, int8 entries", "branches", "compaction"])
def test_nothing_of_the_pool_is_copied(reports, program, head_dim):
    """Each program needs few temporaries. For decoding on a GPU they are the weights of a layer, gathered from their
    shards; on a TPU these are not counted. For branches they are the pages that are copied. For compaction they are a
    layer's entries and a score for each of all entries, whatever the head_dim."""
    report = reports[f"{program}, head_dim {head_dim}"]
    assert report["temporaries"] < (5 << 20) + (8 << 20) * head_dim // 64
    assert not report["large_copies"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "program",
    [
        *(f"decode, counted and chosen, head_dim {x}" for x in HEAD_DIMS),
        f"decode, compacting, head_dim {TRAINED}",
    ],
)
def test_numbers_of_entries_are_copied_at_most_on_the_way_in_and_out(reports, program):
    """The numbers take 32 MiB, or 16 MiB at head_dim 128, where a TPU pads 16 numbers to 128. The pool of 2 GiB
    is not copied."""
    decode = reports[program]
    assert decode["temporaries"] < 150 << 20
    # a compaction takes and returns them, too, and separates the layers of the waiting tokens, whose ring is not copied
    assert len(decode["large_copies"]) <= (6 if "compacting" in program else 2)
    assert max(decode["large_copies"], default=0) <= 32 << 20


@pytest.mark.parametrize("head_dim", ALL)
def test_prefill_needs_little_beside_the_pool(reports, head_dim):
    """A device's pool is 2 GiB, and prefill copies 128 MiB of its entries at a time."""
    assert reports[f"prefill, head_dim {head_dim}"]["temporaries"] < (160 + head_dim) << 20


@pytest.mark.parametrize(
    "program", [f"training, head_dim {TRAINED}", pytest.param(SPLIT, marks=pytest.mark.thorough)]
)
def test_training_holds_no_matrix_of_logits(reports, program):
    """The logits of one sequence of 2,048 tokens and a device's 8 query heads would take 128 MiB in float32."""
    assert reports[program]["temporaries"] < 128 << 20


@pytest.mark.thorough
def test_tokens_that_are_split_change_places_with_heads(reports):
    """In each of four layers, q, k, v and o are exchanged for the teacher, for the student's forward pass and for its
    gradient, and all but o where the layer is computed again."""
    assert reports[SPLIT]["exchanges"]["all-to-all"] >= 4 * (4 + 4 + 3 + 4)
