"""Tests of the comparison with kvpress: both libraries give the same answers from the same kept entries."""

import dataclasses
import importlib

import pytest

from infer.kvpress_rival import METHODS, compare, main
from kvjax.errors import UserError
from kvjax.evaluate import sized_tasks
from tests.models.cases import LLAMA, write_folder
from tests.tasks.model_tokenizers import byte_tokenizer

ARGUMENTS = ["--tasks", "niah_single_1", "--context", "640", "--samples", "2", "--budgets", "0.5"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    sizes = {"vocab_size": 320, "num_hidden_layers": 2, "rope_theta": 1e4, "eos_token_id": 257}
    folder = write_folder(tmp_path_factory.mktemp("llama"), LLAMA | sizes)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.mark.slow
def test_kvjax_and_kvpress_give_the_same_answers(folder, tmp_path, monkeypatch, capsys):
    pytest.importorskip("kvpress", reason="the parity extra is not installed", exc_type=ImportError)
    original = sized_tasks.sized_tasks

    def identified(config):
        """Return the tasks with a score that differs for different answers."""
        score = {"scorer": lambda tokens: hash(tuple(map(int, tokens))) % 1009 / 1009}

        def changed(sample):
            return dataclasses.replace(
                sample, questions=tuple(dataclasses.replace(one, **score) for one in sample.questions)
            )

        return [
            dataclasses.replace(task, samples=[changed(sample) for sample in task.samples])
            for task in original(config)
        ]

    monkeypatch.setattr(sized_tasks, "sized_tasks", identified)
    # kvpress masks KVzip's dropped entries with fake keys, which it cannot compute for random weights
    monkeypatch.delitem(METHODS, "KVzip")
    main(
        [*ARGUMENTS, "--model", folder, "--twin", folder, "--observed", "16", "--out", str(tmp_path / "out")]
    )
    lines = [line for line in capsys.readouterr().out.splitlines() if ": kvjax " in line]
    scores = {line.split(",")[1].split(" at ")[0].strip(): line.split(": ")[1] for line in lines}
    assert scores.keys() == METHODS.keys()
    for line in scores.values():
        ours, theirs = line.split(", ")
        assert ours.split()[1] == theirs.split()[1]
    rows = (tmp_path / "out" / "kvpress.md").read_text().splitlines()[2:]
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        # kvjax counts whole pages
        assert float(cells[6]) == pytest.approx(float(cells[10]), abs=0.11)


def test_missing_kvpress_names_the_extra(monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(UserError, match=r"pip install '\.\[parity\]'"):
        compare(None)  # type: ignore[arg-type]
