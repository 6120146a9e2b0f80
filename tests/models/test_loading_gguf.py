"""Tests of loading GGUF files, against the Hugging Face folders that they are made from."""

import tracemalloc

import jax
import numpy as np
import pytest

from kvjax.mesh import make_mesh
from kvjax.models import load_model, read_config
from kvjax.models.gguf_file import GgufTensor
from tests.models.cases import CASES, IDS, LLAMA, LONGROPE, weights, write_folder
from tests.models.files import WIDE, assert_equal
from tests.models.gguf_cases import quantised, write_gguf

SOURCES = {
    name: CASES[name] | IDS
    for name in ("llama2", "llama3", "llama31", "llama32", "linear", "yarn", "qwen2", "qwen3", "phi3")
} | {
    # llama.cpp writes √(1 + ln 8 / ln 128)
    "longrope": CASES["longrope_long"] | {"rope_scaling": LONGROPE | {"attention_factor": 1.1952286}},
    "llama_biases": CASES["biases"] | IDS | {"hidden_act": "silu"},
    "qwen3_biases": CASES["qwen3_biases"] | IDS | {"hidden_act": "silu"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SOURCES)
def test_gguf_file_loads_like_its_source_folder(name, tmp_path):
    case = SOURCES[name]
    folder = write_folder(tmp_path / "folder", case)
    file = write_gguf(tmp_path / "model.gguf", case, weights(case))
    assert read_config(file) == read_config(folder)
    assert_equal(load_model(file), load_model(folder))


@pytest.mark.mesh
@pytest.mark.parametrize("shape", [{"fsdp": 8}, {"fsdp": 4, "tensor": 2}, {"data": 2, "tensor": 4}], ids=str)
def test_any_mesh_loads_the_same_model_and_reads_every_row_once(shape, tmp_path, monkeypatch):
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


@pytest.mark.slow
def test_host_memory_peaks_near_one_layer(tmp_path):
    """As with safetensors (test_loading.py), tracemalloc sees numpy's memory, and a CPU device keeps the
    embedding's."""
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
    load_model(file)  # this call compiles
    tracemalloc.start()
    load_model(file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < embed + 1.5 * layer < total / 6
