"""Tests of GGUF files: quantisations match llama.cpp's, and faulty files are refused."""

import os
import re
import struct
import sys

import gguf
import jax
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from kvjax.errors import UserError
from kvjax.mesh import make_mesh
from kvjax.models import load_model, read_config
from kvjax.models.gguf_file import FLOATS, QUANTISATIONS
from tests.models.cases import LLAMA, weights, write_folder
from tests.models.files import assert_equal
from tests.models.gguf_cases import permute, quantised, write_gguf
from tests.models.refusals import error_in


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_quantisations_match_llama_cpp(architecture, tmp_path):
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
            # sorting inverts llama.cpp's order
            rows = permute(np.arange(len(expected[name])), heads)
            expected[name] = expected[name][np.argsort(rows)]
    file = write_gguf(tmp_path / "model.gguf", case, tensors, kinds)
    model = load_model(file)
    assert model.dtype == np.float32
    assert_equal(model, load_model(write_folder(tmp_path / "folder", case, expected)))
    with jax.set_mesh(make_mesh(fsdp=4, tensor=2)):
        assert_equal(load_model(file), model)


def test_dtype_is_that_of_the_embedding(tmp_path):
    tensors = weights(LLAMA)
    embed = "model.embed_tokens.weight"
    for name, dtype in (("F16", "float16"), ("BF16", "bfloat16")):
        file = write_gguf(tmp_path / f"{name}.gguf", LLAMA, tensors, {embed: quantised(name, tensors[embed])})
        assert {w.dtype.name for w in jax.tree.leaves(load_model(file))} == {dtype}
    assert {w.dtype.name for w in jax.tree.leaves(load_model(file, "float32"))} == {"float32"}


def test_unsupported_or_missing_tensors_are_refused(tmp_path):
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
        f"the weights do not match its config; missing: {gate}; unexpected: blk.9.attn_q.weight"
    )
    short = tensors | {"model.layers.1.self_attn.k_proj.weight": np.ones((24, 40), np.float32)}
    assert "misshapen: model.layers.1.self_attn.k_proj.weight is (24, 40), expected (24, 48)" in error_in(
        write_gguf(file, LLAMA, short)
    )
    del tensors["model.embed_tokens.weight"]
    assert error_in(write_gguf(file, LLAMA, tensors)) == "the tensor token_embd.weight is missing"


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def pair(name: str, kind: int, layout: str = "", *values: int | float) -> bytes:
    """Return a metadata pair of the given type, with its value packed by `layout`."""
    return text(name) + struct.pack("<I" + layout, kind, *values)


def tensor(name: str, *shape: int, kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


LATER_PART = [pair("split.no", 2, "H", 1), pair("split.count", 2, "H", 3)]
HOSTILE = {
    "nested arrays": ([pair("a", 9, "IQ" * 3000, *[9, 1] * 3000)], [], "an array of arrays"),
    "empty arrays": ([pair("a", 9, "IQ", 9, 2**60)], [], "an array of arrays"),
    "many values": ([pair("a", 9, "IQ", 8, 2**60)], [], "an array of 1152921504606846976 values"),
    "a long string": ([pair("a", 8, "Q", 2**62)], [], "it may be cut off"),
    "an unknown type": ([pair("a", 77, "I", 1)], [], "a value of type 77"),
    "a key twice": ([pair("a", 4, "I", 1)] * 2, [], "the key 'a' is there twice"),
    "a tensor twice": ([], [tensor("t", 8)] * 2, "the tensor 't' is there twice"),
    "many axes": ([], [tensor("t", *[2**63] * 100_000)], "the tensor 't' has 100000 axes, expected 1 to 4"),
    "no axes": ([], [tensor("t")], "the tensor 't' has 0 axes"),
    "an empty axis": ([], [tensor("t", 8, 0)], r"'t' cannot have shape \(0, 8\) in F32"),
    "huge axes": ([], [tensor("t", *[2**63] * 4)], "it may be cut off"),
    "broken blocks": ([], [tensor("t", 31, 2, kind=8)], r"'t' cannot have shape \(2, 31\) in Q8_0"),
    "a far offset": ([], [tensor("t", 8, offset=2**63)], "it may be cut off"),
    "a crooked offset": ([], [tensor("t", 8, offset=4)], "in F32 at offset 4"),
    "overlapping": ([], [tensor("t", 9), tensor("u", 8, offset=32)], "the tensors 't' and 'u' overlap"),
    "alignment": (
        [pair("general.alignment", 5, "i", -1)],
        [],
        "general.alignment must be a power of two, got -1",
    ),
    "a projector": ([pair("general.type", 8) + text("mmproj")], [], "the projector of a multimodal model"),
    "a vocabulary": ([], [], "token_embd.weight is missing, it has only a vocabulary"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers_are_refused(name, tmp_path):
    """They are refused without work that is out of proportion to the file's size."""
    pairs, tensors, message = HOSTILE[name]
    needed = (
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "attention.head_count",
        "block_count",
    )
    required = [
        pair("general.architecture", 8) + text("llama"),
        *(pair(f"llama.{x}", 4, "I", 8) for x in needed),
    ]
    assert re.search(message, refusal_of(tmp_path, [*required, *pairs], tensors))


def test_later_part_of_a_split_file_is_refused(tmp_path):
    assert refusal_of(tmp_path, LATER_PART, []).startswith(
        "is part 2 of 3 of a split GGUF file: merge the parts"
    )


def test_counts_beyond_the_file_are_refused(tmp_path):
    for counts, message in (
        ((0, 2**63), "the key '' is there twice"),
        ((2**63, 1), "the tensor '' has 0 axes"),
    ):
        assert message in refusal_of(tmp_path, [pair("general.name", 8) + text("x")], [], counts)


def refusal_of(
    folder, pairs: list[bytes], tensors: list[bytes], counts: tuple[int, int] | None = None
) -> str:
    """Return the error for a file with these metadata and tensors, without the file's name."""
    file = folder / "model.gguf"
    tensor_count, pair_count = counts or (len(tensors), len(pairs))
    header = b"GGUF" + struct.pack("<IQQ", 3, tensor_count, pair_count)
    file.write_bytes(header + b"".join([*pairs, *tensors]) + bytes(200))
    return error_in(file)


def test_pipe_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "model.gguf")
    with pytest.raises(UserError, match=r"model\.gguf: is a pipe or a device, expected a file$"):
        read_config(tmp_path / "model.gguf")


@pytest.mark.parametrize("kept", [0, 3, 4, 30, 700, -1])
def test_truncated_file_is_refused(kept, tmp_path):
    file = write_gguf(tmp_path / "model.gguf", LLAMA, weights(LLAMA))
    file.write_bytes(file.read_bytes()[:kept])
    messages = {0: "cannot be read as a GGUF file", 3: "not a GGUF file"}
    assert error_in(file).startswith(messages.get(kept, "not a whole GGUF file, it may be cut off"))


def test_other_files_are_refused(tmp_path, monkeypatch):
    file = tmp_path / "model.gguf"
    with pytest.raises(UserError, match=r"model\.gguf: no such file$"):
        load_model(file)
    for begin, message in {
        b"PK\x03\x04 and so on": "not a GGUF file, it does not begin with GGUF",
        b"version https://git-lfs.github.com/spec/v1\n": "a Git LFS pointer, not the GGUF file itself",
        b"\n<!DOCTYPE html>": "a web page, not a GGUF file: download the file again",
        b"GGUF\x00\x00\x00\x03": "is a big-endian GGUF file, only little-endian ones are supported",
        b"GGUF\x01\x00\x00\x00": "GGUF version 1 is not supported, only 2 and 3",
    }.items():
        file.write_bytes(begin)
        assert error_in(file).startswith(message)
    write_gguf(file, LLAMA, weights(LLAMA))
    for module in [name for name in sys.modules if name.split(".")[0] == "gguf"]:
        monkeypatch.setitem(sys.modules, module, None)
    assert error_in(file) == ("GGUF files need the package gguf, which is not installed: pip install gguf")
