"""Test tasks of documents: files are opened once, and no text serves both comparison and calibration."""

import re
import shutil

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from kvjax.errors import UserError
from kvjax.tasks.documents import DocumentQuestions, Documents, DocumentText
from kvjax.tasks.passages import read_documents
from kvjax.tasks.prompt import prompt_size
from kvjax.tasks.registry import open_task
from kvjax.tasks.ruler import published_examples
from kvjax.tasks.splits import Split
from tests.tasks.document_inputs import COMPARED, LENGTH, inputs, paragraph_text
from tests.tasks.ruler.rows import write_rows


def opened(path):
    return Documents(inputs(documents=path))


def test_contexts_are_deterministic_and_distinct(folder):
    questions = DocumentQuestions(opened(folder))
    samples = questions.samples(COMPARED, 5, LENGTH)
    again = DocumentQuestions(opened(folder)).samples(COMPARED, 5, LENGTH)
    for one, other in zip(samples, again, strict=True):
        np.testing.assert_array_equal(one.context, other.context)
        for a, b in zip(one.questions, other.questions, strict=True):
            np.testing.assert_array_equal(a.prompt, b.prompt)
        assert len(one.context) + one.tokens_after_context <= LENGTH
        assert len(one.questions) == questions.answers(LENGTH)
    assert len({sample.context.tobytes() for sample in samples}) == 5
    other = questions.samples(Split(8, 5), 5, LENGTH)
    assert [s.context.tobytes() for s in other] != [s.context.tobytes() for s in samples]
    question = samples[0].questions[0]
    assert question.score(question.answer) == 1
    assert question.score(question.answer[:1]) == 0


@pytest.mark.parametrize("kind", [DocumentQuestions, DocumentText])
@pytest.mark.parametrize("files", [1, 3])
def test_texts_for_comparison_and_calibration_do_not_overlap_at_any_length(kind, files, tmp_path):
    """Each term occurs in one sentence, which is a paragraph."""
    for index in range(files):
        text = paragraph_text(index, 150 // files).replace(". In", ".\n\nIn")
        (tmp_path / f"{index}.txt").write_text(text)
    dataset = kind(opened(tmp_path if files > 1 else tmp_path / "0.txt"))

    def terms(part, length, count):
        decode, samples = dataset.documents.inputs.tokenizer.decode, dataset.samples(part, count, length)
        return [set(re.findall(r"Guild\d+x\d+x\d+", decode(s.context.tolist()))) for s in samples]

    compared = set.union(*terms(COMPARED, LENGTH, 5))
    assert len(compared) >= 25
    for length in (LENGTH, LENGTH - 200):
        for seed in (0, 7):
            one, other = terms(Split(seed, 5, calibration=True, skipped=4), length, 2)
            assert one
            assert other
            assert not (one | other) & compared
            assert not one & other


def test_a_text_is_a_passage_with_a_teacher_forced_end(folder):
    documents = opened(folder)
    for sample in DocumentText(documents).samples(COMPARED, 3, 600):
        (question,) = sample.questions
        line = np.concatenate([sample.context, question.prompt, question.answer])
        assert 0.9 * 600 - 2 < len(line) <= 600
        assert question.answer_tokens == len(question.answer) == len(line) // 8
        text = documents.inputs.tokenizer.decode(line.tolist(), skip_special_tokens=True)
        assert any(text in document for document in documents.texts)
        assert question.score(question.answer) == 1


def test_only_questions_use_the_chat_template(folder):
    documents = opened(folder)
    tokenizer = documents.inputs.tokenizer
    tokenizer.chat_template = "<|question|>{{ messages[0]['content'] }}<|separator|>"
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    mark = tokenizer.convert_tokens_to_ids("<|question|>")
    assert mark in DocumentQuestions(documents).samples(COMPARED, 1, LENGTH)[0].context
    assert mark not in DocumentText(documents).samples(COMPARED, 1, LENGTH)[0].context


def test_errors_say_what_is_wrong(folder, tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "empty").mkdir()
    for path, message in (
        (tmp_path / "empty", "the folder has no .txt file"),
        (tmp_path / "none.txt", r"none.txt: cannot be read \(No such file"),
        (tmp_path / "latin.txt", "latin.txt: is not UTF-8 text"),
    ):
        with pytest.raises(UserError, match=f"--data documents .*{message}"):
            read_documents(path)
    for kind in (DocumentQuestions, DocumentText):
        with pytest.raises(UserError, match="needs --data documents=PATH, a text file or a folder"):
            kind(Documents(inputs())).samples(COMPARED, 1, LENGTH)
        dataset = kind(opened(folder))
        for part, use in (
            (Split(0, 1000), r"compare \(of 75%"),
            (Split(0, 5, calibration=True), r"calibrate on \(of 25%"),
        ):
            wanted = rf"--data documents .* of {LENGTH} tokens.* to {use} of the text\): found \d+, needed 1000; give"
            with pytest.raises(UserError, match=wanted):
                dataset.samples(part, 1000, LENGTH)
        for length in (1, 8, 16):
            with pytest.raises(UserError, match=rf"{length} tokens are too few, "):
                dataset.samples(COMPARED, 1, length)


def test_the_samples_of_a_folder_have_one_length(tmp_path):
    words = {"input": "some word " * 60 + "\nQuestion: which?\nAnswer:", "outputs": ["word"]}
    others = words | {"input": words["input"].replace("some", "more")}
    write_rows(tmp_path, words, others, file="qa_1.jsonl")
    task_inputs = inputs(ruler=tmp_path)
    published = open_task("qa_1", task_inputs)
    size = prompt_size(published_examples(tmp_path, "qa_1", 0)[0], task_inputs.encode)
    (sample,) = published.samples(Split(0, 1), 1, 2 * size)
    assert len(sample.context) + sample.tokens_after_context == size
    (tmp_path / "qa_1.jsonl").unlink()
    (other,) = published.samples(Split(0, 1, calibration=True), 1, 2 * size)
    assert len(other.context) == len(sample.context), "read once"
    with pytest.raises(
        UserError, match=f"have one length, got --context {2 * size}, {size}; evaluate a folder"
    ):
        published.samples(Split(0, 1), 1, size)
    write_rows(tmp_path, words, file="qa_1.jsonl")
    message = f"longest sample of qa_1 takes {size} tokens with its answer, less than half of --context {2 * size + 1}"
    with pytest.raises(UserError, match=message):
        open_task("qa_1", task_inputs).samples(Split(0, 1), 1, 2 * size + 1)


def test_files_are_opened_once_before_samples_are_made(files, tmp_path):
    for task, message in (
        ("qa_1", "qa_1 needs the JSON file of SQuAD, as --data squad=FILE"),
        ("qa_2", "qa_2 needs the JSON file of HotpotQA, as --data hotpotqa=FILE"),
        ("documents", "needs --data documents=PATH, a text file"),
    ):
        with pytest.raises(UserError, match=message):
            open_task(task, inputs())
    with pytest.raises(UserError, match=r"--data documents .*none.txt: cannot be read"):
        open_task("text", inputs(documents=tmp_path / "none.txt"))
    shutil.copy(files["squad"], tmp_path / "squad.json")
    asked = open_task("qa_1", inputs(squad=tmp_path / "squad.json"))
    (tmp_path / "squad.json").unlink()
    (one,), (other,) = (asked.samples(Split(seed, 1), 1, 400) for seed in (0, 1))
    assert one.context.tolist() != other.context.tolist()
