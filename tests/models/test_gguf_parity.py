"""Tests of GGUF files against transformers' model of the same file. Small files are here, a real one is in
tests/real."""

import numpy as np
import pytest

from kvjax.mesh import put, use_mesh
from kvjax.models import load_model
from tests.models.cases import CASES, GEMMA3, tokens, weights, write_folder
from tests.models.gguf_cases import write_gguf
from tests.models.pieces import ends

# such files do not say which layers have a window, nor the scale of queries
OF_GEMMA = GEMMA3 | {"num_hidden_layers": 7, "query_pre_attn_scalar": 16, "sliding_window_pattern": 6}
torch = pytest.importorskip("torch", reason="the parity extra is not installed")


@pytest.mark.parametrize("name", ["llama2", "phi3", "qwen2", "qwen3", "qwen3_moe", "gemma3_gguf"])
def test_logits_are_those_of_transformers_for_the_same_file(name, tmp_path):
    """transformers uses its own names and permutations. Its config is given, for it reads no head size and no
    vocabulary size."""
    import transformers

    case = CASES.get(name, OF_GEMMA)
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
