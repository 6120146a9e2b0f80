"""Greedy generation over the full cache gives exactly the tokens of the Hugging Face torch twin."""

from typing import Any

import numpy as np
import pytest

from kvjax.builtin import builtin_model
from kvjax.inference import generate
from kvjax.models import load_model, save_model
from kvjax.sampling_params import SamplingParams
from tests.tiny_models import tiny_model

torch = pytest.importorskip("torch", reason="the parity extra is not installed")


def twin_tokens(folder, prompt, count):
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([prompt.tolist()])
    with torch.no_grad():
        line = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
        )
    return line[0, len(prompt) :].numpy()


@pytest.mark.slow
def test_a_random_model_answers_like_its_twin(tmp_path):
    save_model(tiny_model(), tmp_path / "model")
    model = load_model(tmp_path / "model")
    for length in (1, 40):
        prompt = np.random.default_rng(length).integers(1, 61, length)
        ours = generate(model, [prompt], SamplingParams(max_new_tokens=22), block=7)
        np.testing.assert_array_equal(ours.tokens[0], twin_tokens(tmp_path / "model", prompt, 22))


def test_the_builtin_model_answers_like_its_twin_up_to_the_stop_token():
    from kvjax.tasks import builtin_text

    prompt = builtin_text("evaluate")[:200]
    model = load_model("builtin")
    ours, theirs = (
        generate(model, [prompt], SamplingParams(max_new_tokens=64)),
        twin_tokens(builtin_model(), prompt, 64),
    )
    stops = np.flatnonzero(np.isin(theirs, model.config.eos_ids))
    np.testing.assert_array_equal(ours.tokens[0], theirs[: stops[0]] if stops.size else theirs)
