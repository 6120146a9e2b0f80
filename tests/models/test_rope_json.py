"""Tests of both spellings of rotary embeddings in `config.json`."""

import pytest

from kvjax.models.rope import RopeConfig
from tests.models.cases import CASES, LLAMA, LLAMA3_ROPE

LLAMA3 = RopeConfig(
    type="llama3",
    theta=500000.0,
    factor=8.0,
    original_length=128,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE},
        {"rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE | {"type": "llama3"}},
        {"rope_parameters": LLAMA3_ROPE | {"rope_theta": 500000.0}},
        {"rope_parameters": LLAMA3_ROPE, "rope_theta": 500000},
        {
            "rope_parameters": LLAMA3_ROPE | {"rope_theta": 500000.0},
            "rope_scaling": LLAMA3_ROPE,
            "rope_theta": 500000.0,
        },
        {
            "rope_theta": 500000.0,
            "rope_scaling": {k: v for k, v in LLAMA3_ROPE.items() if k != "original_max_position_embeddings"},
            "original_max_position_embeddings": 128,
        },
    ],
)
def test_every_spelling_is_read(rope, read):
    assert read(LLAMA | rope).rope == LLAMA3


def test_default_rope_in_both_spellings(read):
    plain = RopeConfig(theta=75000.0)
    for rope in (
        {"rope_theta": 75000.0},
        {"rope_theta": 75000.0, "rope_scaling": None},
        {"rope_parameters": {"rope_theta": 75000.0, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 75000.0}},
    ):
        assert read(LLAMA | rope).rope == plain


def test_dynamic_rope_is_fixed_at_the_declared_length(read):
    case = CASES["dynamic"]
    assert read(case).rope.length == 128
    assert read(case, max_length=64).rope.length == 128
    assert read(case, max_length=512).rope.length == 512


def test_longrope_is_fixed_at_one_of_two_lengths(read):
    case = CASES["longrope_long"]
    assert [read(case, max_length=length).rope.length for length in (64, 128, 129, 512)] == [
        128,
        128,
        1024,
        1024,
    ]
    assert read(case).rope == read(case, max_length=512).rope


def test_phi_3_s_names_of_longrope_are_read(read):
    case = CASES["longrope_long"]
    for name in ("su", "yarn"):
        assert read(case | {"rope_scaling": case["rope_scaling"] | {"rope_type": name}}) == read(case)


def test_gpt_oss_without_rope_has_yarn(read):
    """As in transformers."""
    rope = read(CASES["gpt_oss"] | {"rope_scaling": None}).rope
    assert (rope.type, rope.factor, rope.original_length, rope.truncate) == ("yarn", 32.0, 4096, False)


def test_missing_yarn_factor_is_the_ratio_of_lengths(read):
    scaling = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 256}
    assert read(LLAMA | {"rope_scaling": scaling}).rope.factor == 4.0
