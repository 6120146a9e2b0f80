"""Tests of gpt-oss's experts in MXFP4: the format, and files of both forms."""

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from kvjax.errors import UserError
from kvjax.models import load_model
from kvjax.models.mxfp4 import decode
from tests.models.cases import CASES, weights, write_folder
from tests.models.files import assert_equal

WIDE = CASES["gpt_oss"] | {"hidden_size": 64, "intermediate_size": 32, "num_attention_heads": 4}
QUANTISED = WIDE | {"quantization_config": {"quant_method": "mxfp4"}}


def test_decode_matches_a_worked_example():
    """0x21 is 0.5 and then 1; 0xF9 is −0.5 and then −6. An exponent of 128 doubles, one of 126 halves."""
    blocks = np.zeros((2, 16), np.uint8)
    blocks[0, :2] = 0x21, 0xF9
    blocks[1, 15] = 0x7F
    found = decode(blocks, np.array([128, 126], np.uint8))
    assert found.shape == (64,)
    np.testing.assert_array_equal(found[:4], [1, 2, -1, -12])
    np.testing.assert_array_equal(found[4:32], 0)
    np.testing.assert_array_equal(found[62:], [-3, 3])


def in_blocks():
    """Return the weights of a model with its experts in MXFP4, and the same weights with these as numbers."""
    rng, plain, packed = np.random.default_rng(0), weights(WIDE), {}
    for name, x in list(plain.items()):
        if not name.endswith(("gate_up_proj", "down_proj")):
            packed[name] = x
            continue
        experts, inputs, outputs = x.shape
        blocks = rng.integers(0, 256, (experts, outputs, inputs // 32, 16), dtype=np.uint8)
        scales = rng.integers(118, 124, (experts, outputs, inputs // 32), dtype=np.uint8)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = np.ascontiguousarray(decode(blocks, scales).swapaxes(1, 2))
    return packed, plain


def test_mxfp4_experts_match_their_decoded_weights(tmp_path):
    packed, plain = in_blocks()
    found = load_model(write_folder(tmp_path / "packed", QUANTISED, packed))
    assert_equal(found, load_model(write_folder(tmp_path / "plain", WIDE, plain)))


def test_a_tensor_of_very_many_experts_is_refused(tmp_path):
    plain = weights(WIDE) | {"model.layers.0.mlp.experts.gate_up_proj_bias": np.zeros((2**20, 1), np.uint8)}
    with pytest.raises(UserError, match="gate_up_proj_bias has 1,048,576 experts, expected at most 4,096"):
        load_model(write_folder(tmp_path, WIDE, plain))


@pytest.mark.parametrize("change", ["shape", "kind", "missing"])
def test_faulty_blocks_are_refused(change, tmp_path):
    packed, _ = in_blocks()
    name = "model.layers.1.mlp.experts.down_proj"
    if change == "shape":
        packed[f"{name}_scales"] = packed[f"{name}_scales"][:, :-1]
    elif change == "kind":
        packed[f"{name}_blocks"] = packed[f"{name}_blocks"].astype(np.float32)
    else:
        del packed[f"{name}_scales"]
    folder = write_folder(tmp_path / "folder", QUANTISED, {})
    save_file({name: np.ascontiguousarray(x) for name, x in packed.items()}, folder / "model.safetensors")
    with pytest.raises(UserError, match="is not MXFP4|is there without its scales"):
        load_model(folder)


def test_other_quantisations_are_refused(tmp_path):
    other = WIDE | {"quantization_config": {"quant_method": "awq"}}
    with pytest.raises(UserError, match="quantized weights"):
        load_model(write_folder(tmp_path / "folder", other, {}))


def test_mxfp4_numbers_are_exact_in_bfloat16():
    every = decode(np.arange(256, dtype=np.uint8).reshape(16, 16), np.full(16, 130, np.uint8))
    np.testing.assert_array_equal(every.astype(ml_dtypes.bfloat16).astype(np.float32), every)
