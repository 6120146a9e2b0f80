"""Tests of kvjax's own programs, compiled for four v5e chips or four H100s that are not here, with fsdp 2 × tensor
2."""

import pytest

from tests.ahead.compile_programs import HEAD_DIMS, SPLIT, TRAINED
from tests.pallas_kernels.compiled import require_compiler, run

pytestmark = pytest.mark.kernels


@pytest.fixture(scope="module", params=["tpu", "gpu"])
def platform(request):
    require_compiler(request.param)
    return request.param


ALL = [pytest.param(x, marks=() if x == TRAINED else pytest.mark.thorough) for x in HEAD_DIMS]


@pytest.fixture(scope="module")
def which(request):
    """Return "all" if a selected test needs all programs, else "few"."""
    asked = (item for item in request.session.items if item.module is request.module)
    return "all" if any(item.get_closest_marker("thorough") for item in asked) else "few"


@pytest.fixture(scope="module")
def reports(platform, which):
    return {line["program"]: line for line in run("tests.ahead.compile_programs", platform, which)}


def test_attention_runs_in_kernels(reports, platform, which):
    kernels = {name: set(report["kernels"]) for name, report in reports.items()}
    decode = {"paged_decode", "paged_decode_append" if platform == "tpu" else "paged_decode_merge"}
    forward = "vertical_slash" if platform == "tpu" else "vertical_slash_hopper"
    expected = {
        "training": {forward, "vertical_slash_dq", "vertical_slash_dkv"},
        "prefill": {forward, "far_list"} if platform == "tpu" else {forward},
        "decode": decode,
        "decode, int8 entries": decode,
        "forks": set(),
        "compaction": {"attention_mass"},
    }
    if which == "all":
        expected |= {
            "decode, counts and selection": decode | {"attention_mass"},
            "decode, compactions": decode,
        }
    assert kernels == {
        f"{name}, head_dim {head_dim}": names
        for name, names in expected.items()
        for head_dim in (HEAD_DIMS if which == "all" else (TRAINED,))
        if head_dim == TRAINED or name not in ("training", "decode, compactions")
    } | ({SPLIT: expected["training"]} if which == "all" else {})


@pytest.mark.parametrize("head_dim", ALL)
@pytest.mark.parametrize("program", ["decode", "decode, int8 entries", "forks", "compaction"])
def test_the_pool_is_not_copied(reports, program, head_dim):
    """Each program needs few temporaries. In decoding on a GPU they are the weights of a layer, gathered from their
    shards; on a TPU these are not counted. In forks they are the copied pages. In compaction they are a layer's entries
    and a score for every entry, whatever the head_dim."""
    report = reports[f"{program}, head_dim {head_dim}"]
    assert report["temporaries"] < (5 << 20) + (8 << 20) * head_dim // 64
    assert not report["large_copies"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "program",
    [
        *(f"decode, counts and selection, head_dim {x}" for x in HEAD_DIMS),
        f"decode, compactions, head_dim {TRAINED}",
    ],
)
def test_entry_metadata_is_copied_at_most_on_entry_and_exit(reports, program):
    """The metadata take 32 MiB, or 16 MiB at head_dim 128, where a TPU pads 16 numbers to 128. The pool of 2 GiB is
    not copied."""
    decode = reports[program]
    assert decode["temporaries"] < 150 << 20
    # A compaction also takes and returns them, and separates the layers of the waiting tokens. The window is not
    # copied.
    assert len(decode["large_copies"]) <= (6 if "compactions" in program else 2)
    assert max(decode["large_copies"], default=0) <= 32 << 20


@pytest.mark.parametrize("head_dim", ALL)
def test_prefill_needs_little_memory_besides_the_pool(reports, head_dim):
    """A device's pool is 2 GiB, and prefill copies 128 MiB of its entries at a time."""
    assert reports[f"prefill, head_dim {head_dim}"]["temporaries"] < (160 + head_dim) << 20


@pytest.mark.parametrize(
    "program", [f"training, head_dim {TRAINED}", pytest.param(SPLIT, marks=pytest.mark.thorough)]
)
def test_training_stores_no_matrix_of_logits(reports, program):
    """The logits of one sequence of 2,048 tokens and a device's 8 query heads would take 128 MiB in float32."""
    assert reports[program]["temporaries"] < 128 << 20


@pytest.mark.thorough
def test_split_tokens_are_exchanged_for_split_heads(reports):
    """In each of four layers, q, k, v and o are exchanged for the teacher, for the student's forward pass and for its
    gradient. When the layer is recomputed, all but o are exchanged again."""
    assert reports[SPLIT]["exchanges"]["all-to-all"] >= 4 * (4 + 4 + 3 + 4)
