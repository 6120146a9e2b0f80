"""Test RULER's tasks at a length: how much fits, repetition, and the errors."""

import re
from pathlib import Path

import numpy as np
import pytest

from kvjax.errors import UserError
from kvjax.tasks.prompt import PromptEncoder, prompt_size
from kvjax.tasks.ruler import (
    RULER_TASKS,
    make_ruler_task,
    published_examples,
)

FEW = "niah_single_2", "niah_multikey_3", "vt", "fwe", "qa_2"
"""One task of each kind; the others run only in the thorough tests."""
each = pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x in FEW else pytest.mark.thorough) for x in RULER_TASKS]
)
LENGTHS = (1500, 5000)  # the word list is a longer one from a length between these two


@pytest.mark.slow
@each
def test_a_sample_fills_its_length(name, smol, files):
    """The prompt fills the length to within 2%, or to within one line where every line is a pair of UUIDs."""
    task, encode = make_ruler_task(name, smol, files), PromptEncoder(smol)
    line = len(smol("A secret UUID of 01234567-0123-4123-8123-0123456789ab is ." * 2)["input_ids"])
    for length in (2048, 4096):
        writer = task.writer(length)
        for seed in (3, 0, 1):
            sample, count = task.example(seed, length), task.units(seed, length)
            assert sample == writer.write(seed, count)
            size = prompt_size(sample, encode)
            assert length - max(0.02 * length, line if name == "niah_multikey_3" else 0) <= size <= length
            assert prompt_size(writer.write(seed, count + 1), encode) > length


@pytest.mark.thorough
@pytest.mark.parametrize("name", RULER_TASKS)
def test_a_sample_without_a_template_fills_its_length(name, builtin, files):
    task, encode = make_ruler_task(name, builtin, files), PromptEncoder(builtin)
    for length in LENGTHS:
        assert 0.95 * length < prompt_size(task.example(1, length), encode) <= length


def test_a_sample_does_not_depend_on_earlier_samples(smol):
    task = make_ruler_task("fwe", smol)
    samples = [task.example(seed, 2048) for seed in (2, 0, 1)]
    assert samples == [make_ruler_task("fwe", smol).example(seed, 2048) for seed in (2, 0, 1)]


def test_a_question_is_tokenised_as_a_continuation(chatty):
    """This tokenizer puts a space before any text, but the question continues the context."""
    prompt = make_ruler_task("vt", chatty, chat=False).sample(0, 1500)
    context = chatty.convert_ids_to_tokens(prompt.context.tolist())
    asked = chatty.convert_ids_to_tokens(prompt.questions[0].prompt.tolist())
    assert context[0] == "<s>"
    assert context[1].startswith("▁")
    assert not asked[0].startswith("▁")
    assert "</s>" not in context + asked


@each
def test_samples_are_deterministic_from_the_seed(name, builtin, files):
    first, again = (
        [make_ruler_task(name, builtin, files).example(seed, 1500) for seed in seeds]
        for seeds in ((5, 6), (6, 5))
    )
    assert first == again[::-1]
    assert len({sample.context for sample in first}) == len({sample.questions for sample in first}) == 2


@pytest.mark.parametrize("name", RULER_TASKS)
def test_no_answer_is_in_its_question_and_the_context_ends_with_one_line_break(name, builtin, files):
    task = make_ruler_task(name, builtin, files)
    for sample in (task.example(seed, 1500) for seed in range(5)):
        (question,) = sample.questions
        assert sample.context
        assert re.search(r"\S\n\Z", sample.context)
        assert question.text[0].isalpha()
        assert question.answer_prefix == "\n" + question.answer_prefix.strip()
        assert question.score(question.text + question.answer_prefix) == 0
        assert question.score(sample.context) == 1
        assert (question.kind, question.reserved) == (name, RULER_TASKS[name].reserved)


def test_errors_say_what_is_wrong(builtin, files, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="RULER has no task called 'niah_single'; did you mean niah_single_3"):
        make_ruler_task("niah_single", builtin)
    with pytest.raises(UserError, match="no task called 'x'; did you mean niah_single_1, .*, qa_2"):
        published_examples(tmp_path, "x", 99)
    for name in RULER_TASKS:
        with pytest.raises(UserError, match=rf"{name}: 60 tokens are too few, the shortest .* take \d+"):
            make_ruler_task(name, builtin, files).sample(0, 60)
    with pytest.raises(UserError, match="qa_1 needs the JSON file of SQuAD, as --data squad=FILE"):
        make_ruler_task("qa_1", builtin)
    with pytest.raises(UserError, match="qa_2 needs the JSON file of HotpotQA, as --data hotpotqa=FILE"):
        make_ruler_task("qa_2", builtin)
    with pytest.raises(
        UserError, match="none: there is no such folder; expected a folder, or a hub dataset OWNER/NAME"
    ):
        published_examples(tmp_path / "none", "vt", 99)
    (tmp_path / "vt.jsonl").write_text("{}")
    monkeypatch.chdir(tmp_path.parent)
    for file in (tmp_path / "vt.jsonl", Path(tmp_path.name, "vt.jsonl")):
        with pytest.raises(UserError, match="--data ruler .*vt.jsonl: expected a folder, got a file"):
            published_examples(file, "vt", 99)
    (tmp_path / "vt.jsonl").unlink()
    (tmp_path / "vt.parquet").write_bytes(b"nothing")
    with pytest.raises(UserError, match="--data ruler .*vt.parquet: is no parquet file"):
        published_examples(tmp_path, "vt", 99)
    short = tmp_path / "short.txt"
    for content, message in ((b"", "there is no text in it"), (b"\xff\xfe\xfa", "is not UTF-8 text")):
        short.write_bytes(content)
        with pytest.raises(UserError, match=f"^--data essays .*short.txt: {message}"):
            make_ruler_task("niah_single_2", builtin, {"essays": short})
    with pytest.raises(UserError, match=r"^--data essays .*no: cannot be read \(No such file"):
        make_ruler_task("niah_single_2", builtin, {"essays": tmp_path / "no"})
    with pytest.raises(UserError, match=r"^--data squad .*none: cannot be read \(No such file"):
        make_ruler_task("qa_1", builtin, {"squad": tmp_path / "none"})


def test_a_length_that_needs_too_many_words_is_refused(builtin, monkeypatch):
    monkeypatch.setattr("kvjax.tasks.ruler.needles.WORD_PAIRS", 20)
    with pytest.raises(
        UserError, match="niah_multikey_2: 1500 tokens are too many, there are only 20 pairs of words"
    ):
        make_ruler_task("niah_multikey_2", builtin).sample(0, 1500)


def test_a_sample_is_the_encoded_example(smol):
    task = make_ruler_task("vt", smol)
    sample, example = task.sample(3, 1500), task.example(3, 1500)
    expected = PromptEncoder(smol)(example)
    np.testing.assert_array_equal(sample.context, expected.context)
    np.testing.assert_array_equal(sample.questions[0].prompt, expected.questions[0].prompt)
    assert (
        len(sample.context) + sample.tokens_after_context == prompt_size(example, PromptEncoder(smol)) <= 1500
    )
