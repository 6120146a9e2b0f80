"""Tensors of GGUF files: every quantisation against llama.cpp's own, and files that are refused."""

import sys

import gguf
import jax
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from kvjax.errors import UserError
from kvjax.mesh import make_mesh
from kvjax.models import load_model
from kvjax.models.gguf_file import FLOATS, QUANTISATIONS
from tests.models.cases import LLAMA, weights, write_folder
from tests.models.files import assert_equal
from tests.models.gguf_cases import permute, quantised, write_gguf
from tests.models.refusals import error_in


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_every_quantisation_is_llama_cpps(architecture, tmp_path):
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 64}
    case = LLAMA | sizes | {"model_type": architecture}
    tensors = weights(case)
    matrices = [name for name, x in tensors.items() if x.ndim == 2 and "layers" in name]
    names = (*FLOATS, *QUANTISATIONS)
    # the first layer's q and k, which are permuted, are quantised
    order = names[3:] + names[:3]
    kinds = {name: quantised(order[i % len(order)], tensors[name]) for i, name in enumerate(sorted(matrices))}
    assert {kind.name for kind, _ in kinds.values()} == set(names)
    expected = dict(tensors)
    for name, (kind, raw) in kinds.items():
        expected[name] = gguf.quants.dequantize(raw, kind)
        heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
        if architecture == "llama" and heads:
            # the inverse of llama.cpp's order, by sorting
            rows = permute(np.arange(len(expected[name])), heads)
            expected[name] = expected[name][np.argsort(rows)]
    file = write_gguf(tmp_path / "model.gguf", case, tensors, kinds)
    model = load_model(file)
    assert model.embed.dtype == np.float32
    assert_equal(model, load_model(write_folder(tmp_path / "folder", case, expected)))
    with jax.set_mesh(make_mesh(fsdp=4, tensor=2)):
        assert_equal(load_model(file), model)


def test_dtypes(tmp_path):
    tensors = weights(LLAMA)
    embed = "model.embed_tokens.weight"
    for name, dtype in (("F16", "float16"), ("BF16", "bfloat16")):
        file = write_gguf(tmp_path / f"{name}.gguf", LLAMA, tensors, {embed: quantised(name, tensors[embed])})
        assert {w.dtype.name for w in jax.tree.leaves(load_model(file))} == {dtype}
    assert {w.dtype.name for w in jax.tree.leaves(load_model(file, "float32"))} == {"float32"}


def test_tensors_that_are_refused(tmp_path):
    file = tmp_path / "model.gguf"
    tensors = weights(LLAMA)
    gate = "model.layers.0.mlp.gate_proj.weight"
    kinds = {
        gate: (Kind.IQ4_NL, np.zeros((80, 36), np.uint8)),
        "model.norm.weight": (Kind.I8, np.zeros(48, np.int8)),
    }
    message = error_in(write_gguf(file, LLAMA | {"hidden_size": 64}, tensors, kinds))
    assert message.startswith(
        "I8 (output_norm.weight), IQ4_NL (blk.0.ffn_gate.weight) is not supported, only F32,"
    )

    missing = {name: x for name, x in tensors.items() if name != gate}
    message = error_in(write_gguf(file, LLAMA, missing, more={"blk.9.attn_q": np.ones((48, 48), np.float32)}))
    assert message == (
        f"the weights are not those of its config; missing: {gate}; unexpected: blk.9.attn_q.weight"
    )
    short = tensors | {"model.layers.1.self_attn.k_proj.weight": np.ones((24, 40), np.float32)}
    assert "misshapen: model.layers.1.self_attn.k_proj.weight is (24, 40), expected (24, 48)" in error_in(
        write_gguf(file, LLAMA, short)
    )
    del tensors["model.embed_tokens.weight"]
    assert error_in(write_gguf(file, LLAMA, tensors)) == "the tensor token_embd.weight is missing"


@pytest.mark.parametrize("kept", [0, 3, 4, 30, 700, -1])
def test_a_cut_file_is_named(kept, tmp_path):
    file = write_gguf(tmp_path / "model.gguf", LLAMA, weights(LLAMA))
    file.write_bytes(file.read_bytes()[:kept])
    said = {0: "cannot be read as a GGUF file", 3: "not a GGUF file"}
    assert error_in(file).startswith(said.get(kept, "not a whole GGUF file, it may be cut off"))


def test_files_that_are_no_gguf(tmp_path, monkeypatch):
    file = tmp_path / "model.gguf"
    with pytest.raises(UserError, match=r"model\.gguf: no such file$"):
        load_model(file)
    file.write_bytes(b"PK\x03\x04 and so on")
    assert error_in(file) == "not a GGUF file, it does not begin with GGUF"
    file.write_bytes(b"GGUF\x00\x00\x00\x03")
    assert error_in(file).startswith("GGUF version 50331648 is not supported, only 2 and 3 (little-endian)")
    write_gguf(file, LLAMA, weights(LLAMA))
    for module in [name for name in sys.modules if name.split(".")[0] == "gguf"]:
        monkeypatch.setitem(sys.modules, module, None)
    assert error_in(file) == ("GGUF files need the package gguf, which is not installed: pip install gguf")
