"""Tests of a GGUF file with the commands in sequence: gates are trained for it, and used as the run's output says."""

import dataclasses
import json
import shlex

import numpy as np
import pytest

from kvjax import generate
from kvjax.errors import UserError
from kvjax.evaluate import __main__ as evaluate
from kvjax.evaluate.config import parse as parse_evaluate
from kvjax.evaluate.gates import choose_default_policies
from kvjax.evaluate.run import Evaluation
from kvjax.evaluate.sized_tasks import sized_tasks
from kvjax.evaluate.sizing import pairs
from kvjax.mesh import make_mesh
from kvjax.models import load_model
from kvjax.policies.admission.wgkv import save_gates
from kvjax.tasks import heldout_files
from kvjax.train import __main__ as train
from kvjax.train import held_out_report
from kvjax.train.recipe import Validation
from kvjax.train.recipes.wgkv import WriteGates
from kvjax.train.run import RunOutput
from tests.models.cases import LLAMA, weights
from tests.models.gguf_cases import write_gguf
from tests.tasks.model_tokenizers import smol_tokenizer
from tests.tiny_models import tiny_gates


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return a random llama of two layers with a chat template, in a path with a space."""
    smol = smol_tokenizer()
    tokenizer = json.loads(smol.backend_tokenizer.to_str())
    tokens = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].__getitem__)
    special = {token["content"] for token in tokenizer["added_tokens"]}
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in tokenizer["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": smol.bos_token_id,
        "tokenizer.ggml.eos_token_id": smol.eos_token_id,
        "tokenizer.chat_template": smol.chat_template,
    }
    config = LLAMA | {"vocab_size": len(tokens), "num_hidden_layers": 2, "max_position_embeddings": 4096}
    folder = tmp_path_factory.mktemp("a model")
    return write_gguf(folder / "tiny.gguf", config, weights(config), metadata=metadata)


def printed_arguments(output, prefix):
    """Return the arguments of a command that a run prints. FILE and FOLDER in them are still to be replaced."""
    (line,) = (line for line in output.splitlines() if line.startswith(prefix))
    return shlex.split(line.removeprefix(prefix))


@pytest.mark.thorough
def test_gates_for_a_gguf_are_trained_used_and_compared(model, tmp_path, capsys, monkeypatch):
    run, text = tmp_path / "a run", tmp_path / "text.txt"
    text.write_text("\n\n".join(heldout_files().values()))
    args = [
        "--model", str(model), "--data", str(text), "--window", "16", "--sequences", "2", "--validation", "1",
        "--tasks", "vt", "--out", str(run),
    ]  # fmt: skip
    with pytest.raises(UserError, match="vt: 64 tokens are too few"):
        train.main([*args, "--lengths", "64"])
    monkeypatch.setitem(held_out_report.SAMPLES, "default", 2)
    monkeypatch.setitem(held_out_report.MAX_PREDICTED, "default", 32)
    train.main([*args, "--lengths", "1100"])
    output = capsys.readouterr().out
    report = (run / "report.md").read_text()
    assert "| held-out text | full | 1.000 | 1.000 | 100.0% |" in report
    assert "use them: python -m kvjax.generate " in report
    assert "hard_distillation" in report
    rows = json.loads((run / "report.json").read_text())["rows"]
    assert [row["task"] for row in rows] == 9 * ["held-out text"] + 9 * ["vt"]
    assert len({row["policy"] for row in rows} - {"full", "wgkv:tau=0.1"}) == 7
    assert (run / "heads.png").is_file()
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 3, "two steps and their validation"

    text.write_text("def main(")
    use = printed_arguments(output, "use them: python -m kvjax.generate ")
    use[use.index("FILE")] = str(text)
    generate.main([*use, "--max-new-tokens", "2"])
    assert "wgkv: " in capsys.readouterr().err

    compare = printed_arguments(output, "compare them: python -m kvjax.evaluate ")
    compare[compare.index("FOLDER")] = str(tmp_path / "compared")
    fewest = [
        "--samples",
        "1",
        "--context",
        "512",
        "--batch",
        "1",
        "--chunk",
        "512",
        "--tasks",
        "niah_single_1",
    ]
    evaluate.main([*compare, *fewest, "--policies", "wgkv"])
    (result,) = map(json.loads, (tmp_path / "compared" / "results.jsonl").read_text().splitlines())
    assert (result["task"], result["policy"], result["gates"]) == (
        "niah_single_1",
        "wgkv",
        str(run / "gates"),
    )


@pytest.mark.thorough
@pytest.mark.parametrize("window", [16, 100])
def test_comparison_printed_by_a_run_is_possible(window, model, tmp_path):
    """It has every policy at every budget; this test uses fewer contexts."""
    loaded = load_model(model)
    gates = tiny_gates(loaded)
    described = {"tau": 0.1, "lambda": 0.04, "window": window, "rate": np.full((2, 2), 0.5).tolist()}
    save_gates(tmp_path / "gates", gates, described)
    config = WriteGates(model=str(model), window=window)
    validation = Validation({"admitted": 0.5}, {"rates": np.full((1, 2, 2), 0.5)}, 1)
    trained = RunOutput(loaded, gates, make_mesh(), tmp_path, validation)
    text = train.summary(config, trained, config.deploy(gates, loaded))
    compare = printed_arguments(text, "compare them: python -m kvjax.evaluate ")
    evaluation = choose_default_policies(parse_evaluate(compare))
    compared = sized_tasks(dataclasses.replace(evaluation, samples=1, batch=1))
    assert [task.name for task in compared] == ["needle", "niah_single_1", "vt"]
    Evaluation(evaluation, loaded, compared)
    assert len(pairs(evaluation)) > 50
