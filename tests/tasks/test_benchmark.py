"""Test benchmarks' samples: the cut of long contexts, the number of samples, and contexts that are read with the
question."""

import dataclasses

import numpy as np
import pytest

from kvjax.errors import UserError
from kvjax.tasks.benchmark import BenchmarkSamples, cut_middle
from kvjax.tasks.prompt import Example, ExampleQuestion, PromptEncoder
from kvjax.tasks.registry import TASKS, open_task
from kvjax.tasks.sample import question_aware
from kvjax.tasks.splits import Split
from tests.tasks.benchmark_inputs import longbench_row, scbench_row, write
from tests.tasks.document_inputs import inputs
from tests.tasks.model_tokenizers import byte_tokenizer

TEXT = "".join(f"{i:03d}," for i in range(100))
"""Text with one token per byte."""


def benchmark(*contexts, asked="Which?", reserved=20, count=1, tokenizer=None):
    questions = tuple(ExampleQuestion(asked, "", ("7",), "any", reserved, "test") for _ in range(count))
    examples = [Example(context, questions) for context in contexts]
    return BenchmarkSamples(
        "test", "--data x", examples, PromptEncoder(tokenizer or byte_tokenizer(), False), "right"
    )


@pytest.mark.parametrize("room", [100, 101])
def test_the_middle_of_the_prompt_is_cut(room):
    """The cut is that of LongBench's code: the first and the last half of the limit stay, one token fewer if the limit
    is odd."""
    whole, limit = np.arange(400 + 6), room + 6
    half = limit // 2
    wanted = np.concatenate([whole[:half], whole[-half:]])
    got = np.concatenate([cut_middle(whole[:400], room, 6), whole[400:]])
    np.testing.assert_array_equal(got, wanted)


def test_the_context_is_cut_and_the_question_is_not():
    for length in (150, 426, 425):
        (sample,) = benchmark(TEXT).samples(Split(0, 1), 1, length)
        text = byte_tokenizer().decode(sample.context)
        assert length - 1 <= len(sample.context) + sample.tokens_after_context <= length
        assert byte_tokenizer().decode(sample.questions[0].prompt) == "Which?"
        half = (length - 20) // 2
        assert text == TEXT if length == 426 else text == TEXT[:half] + TEXT[6 - half :]
    assert len(benchmark(TEXT, TEXT[:9]).samples(Split(0, 2), 2, 150)[1].context) == 9
    with pytest.raises(
        UserError, match="--context 33: a sample of test needs 34 tokens at least: 26 for its questions"
    ):
        benchmark(TEXT).samples(Split(0, 1), 1, 33)


def test_a_conversation_reserves_tokens_for_all_its_turns():
    examples = [dataclasses.replace(benchmark(TEXT, count=3).examples[0], conversation=True)]
    (sample,) = dataclasses.replace(benchmark(TEXT), examples=examples).samples(Split(0, 1), 1, 200)
    assert sample.tokens_after_context == 3 * 26
    assert 199 <= len(sample.context) + 3 * 26 <= 200


def test_calibration_uses_the_samples_after_those_compared():
    """Samples about one text are numbered alike, and none of them calibrates if another is compared."""
    dataset = benchmark("a", "b", "c", count=2)
    assert dataset.answers(99) == 2

    def letters(split, count, dataset=dataset):
        return byte_tokenizer().decode(
            [int(sample.context[0]) for sample in dataset.samples(split, count, 99)]
        )

    assert letters(Split(0, 2), 2) == "ab"
    assert letters(Split(0, 2, calibration=True), 1) == "c"
    more = benchmark("a", "b", "c", "d", "e")
    assert letters(Split(0, 2, calibration=True, skipped=1), 2, more) == "de"
    shared = benchmark("a", "b", "b", "a", "c", "a", "d", "c")
    assert [sample.source for sample in shared.samples(Split(0, 4), 4, 99)] == [0, 1, 1, 0]
    assert letters(Split(0, 4, calibration=True), 3, shared) == "cdc"
    assert letters(Split(0, 4, calibration=True, skipped=2), 2, shared) == "dc"
    with pytest.raises(
        UserError, match="there are 7 .*, needed 4 to compare and 4 more to calibrate on, about"
    ):
        letters(Split(0, 4, calibration=True), 4, shared)
    with pytest.raises(
        UserError, match="--data x: there are 3 samples of test, needed 2 to compare and 2 more to cal"
    ):
        letters(Split(0, 2, calibration=True), 2)
    with pytest.raises(UserError, match="--data x: there are no samples of test"):
        benchmark()


def test_tasks_of_benchmarks_are_opened_by_name(tmp_path):
    """The tokenizer is the built-in one; with `question_aware` each question is read with its context."""
    turns = [scbench_row("scbench_kv"), scbench_row("scbench_kv")]
    turns[1]["multi_turns"] = turns[1]["multi_turns"][:1]
    write(tmp_path, {"scbench_kv": turns, "qasper": [longbench_row("Who?", ["Berta"], "Berta wrote. " * 99)]})
    task_inputs = inputs(longbench=tmp_path, scbench=tmp_path)
    kv, qasper = open_task("scbench_kv", task_inputs), open_task("longbench_qasper", task_inputs)
    assert kv.published
    assert qasper.published
    assert kv.answers(512) == 1
    assert qasper.metric == "F1 of the words"
    (sample,) = qasper.samples(Split(0, 1), 1, 500)
    assert 499 <= len(sample.context) + sample.tokens_after_context <= 500
    assert sample.questions[0].score(sample.questions[0].answer) == 1
    (aware,) = question_aware([sample])
    assert aware.question_known
    whole = np.concatenate([sample.context, sample.questions[0].prompt])
    np.testing.assert_array_equal(np.concatenate([aware.context, aware.questions[0].prompt]), whole)
    assert [len(sample.questions) for sample in kv.samples(Split(0, 2), 2, 512)] == [2, 1]
    assert len(TASKS) == len({name.lower() for name in TASKS})
    with pytest.raises(
        UserError, match="unknown task 'longbench_qaspr'; the nearest known: longbench_qasper"
    ):
        open_task("longbench_qaspr", task_inputs)
