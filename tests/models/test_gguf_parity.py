"""Tests of small GGUF files against transformers' model of the same file. A real file is tested in tests/real."""

import numpy as np
import pytest

from kvjax.mesh import put, use_mesh
from kvjax.models import load_model
from tests.models.cases import CASES, GEMMA3, tokens, weights, write_folder
from tests.models.gguf_cases import write_gguf
from tests.models.pieces import ends

# GGUF files do not state which layers have a window, nor the scale of queries
GEMMA3_GGUF = GEMMA3 | {"num_hidden_layers": 7, "query_pre_attn_scalar": 16, "sliding_window_pattern": 6}
torch = pytest.importorskip("torch", reason="the parity extra is not installed")
pytest.importorskip("accelerate", reason="the parity extra is not installed")


@pytest.mark.parametrize("name", ["llama2", "phi3", "qwen2", "qwen3", "qwen3_moe", "gemma3_gguf"])
def test_logits_match_transformers_for_the_same_file(name, tmp_path):
    """transformers maps names and permutes rows by itself. It gets the config, since it reads neither the head size nor
    the vocabulary size from the file."""
    import transformers

    case = CASES.get(name, GEMMA3_GGUF)
    file = write_gguf(tmp_path / "model.gguf", case, weights(case))
    config = transformers.AutoConfig.from_pretrained(write_folder(tmp_path / "folder", case))
    where = {"gguf_file": file.name, "dtype": torch.float32, "attn_implementation": "eager"}
    twin = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, config=config, **where).eval()
    with torch.no_grad():
        expected = twin(torch.tensor(tokens(), dtype=torch.long)).logits.numpy()
    model = load_model(file)
    with use_mesh(model):
        found = np.asarray(ends(model, put(tokens()))["logits"])
    assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max()
