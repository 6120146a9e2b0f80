"""Tests of the samples for comparison and for calibration."""

import dataclasses
import itertools
import json
import re

import numpy as np
import pytest

from kvjax.evaluate.config import parse
from kvjax.evaluate.run import Evaluation
from kvjax.evaluate.sized_tasks import calibration_samples, sized_tasks
from kvjax.models import load_model, load_tokenizer
from kvjax.tasks import Recall, builtin_task, builtin_text
from tests.evaluate.inputs import SMALL, fact


@pytest.mark.parametrize("question_aware", [False, True])
def test_calibration_uses_the_published_samples_after_those_compared(question_aware, tmp_path):
    """τ is searched on the next ones, and heads are chosen on the last ones, so that these differ if there are enough.
    This holds even if heads are ordered on shorter contexts."""
    (tmp_path / "qa_1.jsonl").write_text("\n".join(map(json.dumps, map(fact, range(14)))))
    config = parse([
        *SMALL, "--policies", "head_pattern:calibrated", "wgkv:calibrated", "--tasks", "qa_1",
        "--data", f"ruler={tmp_path}",
        "--order-contexts", "2", "--order-length", "64", "--budgets", "0.5", "--samples", "4",
        "--gates", "builtin", "--out", str(tmp_path / "run"),
    ])  # fmt: skip
    config = dataclasses.replace(config, question_aware=question_aware)
    (task,) = sized_tasks(config)
    model = load_model(config.model, dtype="float32")
    evaluation = Evaluation(
        dataclasses.replace(config, policies=("head_pattern:calibrated",), gates=()), model, [task]
    )

    def houses(samples):
        decode = load_tokenizer(config.model).decode
        return [int(re.findall(r"house (\d+)", decode(sample.context.tolist()))[0]) for sample in samples]

    assert houses(task.samples) == [0, 1, 2, 3]
    assert houses(task.calibration) == [4, 5, 6, 7]
    (others,) = evaluation.choice_samples.values()
    assert (others.length, houses(others.for_order)) == (126, [12, 13])
    assert houses(others.for_pattern) == list(range(4, 14))


def test_generated_contexts_for_comparison_and_calibration_have_different_seeds(tmp_path):
    args = ["--policies", "wgkv:calibrated", "--gates", "builtin", "--tasks", "recall", "--seed", "2"]
    args += ["--out", str(tmp_path / "run")]
    config = parse([*SMALL, *args])
    (task,) = sized_tasks(config)
    for samples, first in (
        (task.samples, 3_000_000),
        (task.calibration, 3_500_000),
        (calibration_samples(task, config, 3, 126), 3_500_004),
    ):
        for index, found in enumerate(samples):
            sample = builtin_task(Recall).sample(first + index, 126)
            np.testing.assert_array_equal(found.context, sample.context)


def test_texts_for_comparison_and_calibration_do_not_overlap(tmp_path):
    """This holds for any seed and length, also for the samples on which static policies are chosen."""
    text = builtin_text("evaluate")

    def covered(samples):
        found = np.zeros(len(text), bool)
        for sample in samples:
            (question,) = sample.questions
            line = np.concatenate([sample.context[1:], question.prompt, question.answer])
            slices = np.lib.stride_tricks.sliding_window_view(text, len(line))
            starts = np.flatnonzero((slices == line).all(1))
            assert len(starts) >= 1
            for start in starts:
                found[start : start + len(line)] = True
        return found

    def made(seed):
        args = [
            "--policies",
            "wgkv",
            "--gates",
            "builtin",
            "--tasks",
            "text",
            "--samples",
            "384",
            "--seed",
            seed,
        ]
        config = parse([*SMALL, *args, "--out", str(tmp_path / "run")])
        (task,) = sized_tasks(config)
        others = (calibration_samples(task, config, 10, length) for length in (126, 96))
        return covered(task.samples), covered([*task.calibration, *itertools.chain(*others)])

    (compared, calibration), (others, _) = made("0"), made("1")
    assert compared.mean() > 0.05
    assert calibration.mean() > 0.02
    assert not (compared & calibration).any()
    assert not (others & calibration).any()
