"""Passages of documents, and questions about them: each has one answer, and only the context holds it."""

import re

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from kvjax.builtin import builtin_model
from kvjax.errors import UserError
from kvjax.tasks.document_questions import (
    FEWEST,
    PER_THIRD,
    QUESTION,
    RESERVED,
    THIRDS,
    distinctive_words,
    document_questions,
)
from kvjax.tasks.documents import LEAST, Paragraph, paragraphs, passages, read_documents, split_documents
from kvjax.tasks.prompt import prompt_size
from kvjax.tasks.ruler import Files
from kvjax.tasks.ruler.words import ADJECTIVES, NOUNS
from kvjax.tasks.sources import DocumentQuestions, DocumentText, Material
from kvjax.tasks.splits import Split

LENGTH = 700
COMPARED = Split(7, 5)


def words(texts):
    return [len(text.split()) for text in texts]


def written(seed: int, paragraphs: int) -> str:
    """Paragraphs of wrapped sentences, every other one with a name or a number that is its own."""
    rng, text = np.random.default_rng(seed), []
    for index in range(paragraphs):
        sentences = []
        for line in range(3):
            a, b = (ADJECTIVES[i] for i in rng.integers(len(ADJECTIVES), size=2))
            noun = NOUNS[rng.integers(len(NOUNS))]
            term = f"Guild{seed}x{index}x{line}" if line else "the others"
            sentences.append(
                f"In the {a} year of the {noun} that was {b} they gave it\n    to {term}, and left."
            )
        text.append(" ".join(sentences))
    return "\n\n".join(text) + "\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("documents")
    (folder / "more").mkdir()
    (folder / "one.txt").write_text(written(1, 60))
    (folder / "more" / "two.txt").write_text(written(2, 60))
    (folder / "not.rst").write_text("not read")
    return folder


def material(documents):
    return Material(str(builtin_model()), Files(), None, True, documents)


def test_passages_are_whole_paragraphs_none_twice(folder):
    rng = np.random.default_rng(0)
    sizes = [*rng.integers(1, 12, 150), 70, *rng.integers(1, 12, 50)]
    texts = [" ".join([f"p{i}", *["word"] * (size - 1)]) for i, size in enumerate(sizes)]
    documents = ["\n\n".join(texts[:90]), "\n \n".join(texts[90:])]
    found = passages([paragraphs(document, words) for document in documents], 60)
    assert len(found) >= 0.8 * sum(size for size in sizes if size < 70) // 60
    taken = []
    for passage in found:
        assert LEAST * 60 <= len(passage.split()) <= 60
        own = re.split(r"\n ?\n", passage)
        first = texts.index(own[0])
        assert own == texts[first : first + len(own)]
        # no room for the next one, where there is one in the document
        last = first + len(own)
        assert last in (90, len(texts)) or len(passage.split()) + sizes[last] > 60
        taken += own
    assert len(taken) == len(set(taken))
    assert not any(len(paragraph.split()) > 60 for paragraph in taken)
    assert {int(passage.split()[0][1:]) < 90 for passage in found[:4]} == {True, False}


def test_the_first_distinctive_word_of_a_sentence_is_asked_for():
    passage = (
        "One two three four five Six7 eight. "  # too few words before it
        'All of the old guests came into "Room-12" and later into Room-13. '
        "some guests said that the price was 450, others that it was 999. "
        "none of the old guests knew that 450 was the price. "  # 450 stands twice: 999 was asked, and here is no other
        "if the same words stand here twice, Alpha comes. Or if the same words stand here twice, Beta comes. "
        "we have not met anybody called Ann. Nobody knows of a_b_c."  # Ann: letters of another word (annex)
        " The annex is new."
    )
    found = [(given, word) for _, given, word in distinctive_words(passage)]
    assert found == [
        ("All of the old guests came into", "Room-12"),
        ("some guests said that the price was 450, others that it was", "999"),
        ("Or if the same words stand here twice,", "Beta"),
    ]
    for at, given, word in distinctive_words(passage):
        assert passage[round(at * len(passage)) :].lstrip('"').startswith(word)
        assert len(given.split()) >= FEWEST


def test_words_that_do_not_fit_into_an_answer_are_not_asked(folder):
    own = material(folder)

    def count(texts):
        """As if terms of every tenth paragraph took a token more than an answer has."""
        return [
            RESERVED + 1 if re.fullmatch(r" Guild\d+x\d*3x\d", text) else n
            for text, n in zip(texts, own.count(texts), strict=True)
        ]

    samples = document_questions(own.documents_of(COMPARED), own.encode, count, LENGTH)
    asked = [word for sample in samples for q in sample.questions for word in q.expected]
    assert len(asked) >= 12
    assert not [word for word in asked if re.search(r"3x\d$", word)]


def test_questions_have_one_answer_which_only_the_context_holds(folder):
    own = material(folder)
    samples = document_questions(own.documents_of(COMPARED), own.encode, own.count, LENGTH)
    assert len(samples) >= 6
    for sample in samples:
        assert 0.7 * LENGTH < prompt_size(sample, own.encode) <= LENGTH
        assert [q.kind for q in sample.questions] == [kind for kind in THIRDS for _ in range(PER_THIRD)]
        assert len({q.expected for q in sample.questions}) == len(sample.questions)
        body = sample.context[sample.context.index("\n\n") :].strip()
        for question in sample.questions:
            (word,) = question.expected
            given = question.answer_prefix.removeprefix("\n")
            assert question.text == QUESTION
            assert len(re.findall(re.escape(word), sample.context, re.IGNORECASE)) == 1
            assert word.lower() not in (question.text + question.answer_prefix).lower()
            assert re.search(rf"{re.escape(given)}\s+{re.escape(word)}", sample.context)
            assert THIRDS[int(3 * body.index(word) / len(body))] == question.kind
            assert question.score(f" {word.upper()}, and") == 1
            assert question.score(" the others, and") == 0


def test_contexts_repeat_by_seed_and_none_is_read_twice(folder):
    source = DocumentQuestions(material(folder))
    samples = source.samples(COMPARED, 5, LENGTH)
    again = DocumentQuestions(material(folder)).samples(COMPARED, 5, LENGTH)
    for one, other in zip(samples, again, strict=True):
        np.testing.assert_array_equal(one.context, other.context)
        for a, b in zip(one.questions, other.questions, strict=True):
            np.testing.assert_array_equal(a.prompt, b.prompt)
        assert len(one.context) + one.room <= LENGTH
        assert len(one.questions) == source.worth(LENGTH)
    assert len({sample.context.tobytes() for sample in samples}) == 5
    other = source.samples(Split(8, 5), 5, LENGTH)
    assert [s.context.tobytes() for s in other] != [s.context.tobytes() for s in samples]
    question = samples[0].questions[0]
    assert question.score(question.answer) == 1
    assert question.score(question.answer[:1]) == 0


@pytest.mark.parametrize("source", [DocumentQuestions, DocumentText])
@pytest.mark.parametrize("files", [1, 3])
def test_no_text_that_is_compared_is_calibrated_on_whatever_the_lengths(source, files, tmp_path):
    """Each term is in one sentence, which is a paragraph."""
    for index in range(files):
        text = written(index, 150 // files).replace(". In", ".\n\nIn")
        (tmp_path / f"{index}.txt").write_text(text)
    own = source(material(tmp_path if files > 1 else tmp_path / "0.txt"))

    def terms(part, length, count):
        decode, samples = own.material.tokenizer.decode, own.samples(part, count, length)
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


def test_a_quarter_of_the_tokens_is_calibrated_on_and_none_is_lost():
    documents = [
        [Paragraph(f"{i}-{j} ", 1 + j % 3) for j in range(size)] for i, size in enumerate((5, 40, 9, 0))
    ]
    compared, calibration = split_documents(documents)
    own, others = ([p for document in part for p in document] for part in (compared, calibration))
    total = sum(p.tokens for document in documents for p in document)
    assert 0 <= sum(p.tokens for p in others) - total / 4 < 3
    assert sorted(p.text for p in own + others) == sorted(p.text for document in documents for p in document)
    assert not {p.text for p in own} & {p.text for p in others}


@pytest.mark.parametrize("room", [-5, 0, 1])
def test_passages_end_where_there_is_no_room(room):
    assert passages([[Paragraph("two words", 2)]], room) == []


def test_a_text_is_a_passage_and_its_end_is_given(folder):
    own = material(folder)
    for sample in DocumentText(own).samples(COMPARED, 3, 600):
        (question,) = sample.questions
        line = np.concatenate([sample.context, question.prompt, question.answer])
        assert 0.9 * 600 - 2 < len(line) <= 600
        assert question.answer_tokens == len(question.answer) == len(line) // 8
        text = own.tokenizer.decode(line.tolist(), skip_special_tokens=True)
        assert any(text in document for document in own.texts)
        assert question.score(question.answer) == 1


def test_chat_templates_are_for_questions_and_not_for_texts(folder):
    own = material(folder)
    own.tokenizer.chat_template = "<|question|>{{ messages[0]['content'] }}<|separator|>"
    assert isinstance(own.tokenizer, PreTrainedTokenizerFast)
    mark = own.tokenizer.convert_tokens_to_ids("<|question|>")
    assert mark in DocumentQuestions(own).samples(COMPARED, 1, LENGTH)[0].context
    assert mark not in DocumentText(own).samples(COMPARED, 1, LENGTH)[0].context


def test_errors_say_what_is_wrong(folder, tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "empty").mkdir()
    for path, message in (
        (tmp_path / "empty", "the folder has no .txt file"),
        (tmp_path / "none.txt", r"none.txt: cannot be read \(No such file"),
        (tmp_path / "latin.txt", "latin.txt: is not UTF-8 text"),
    ):
        with pytest.raises(UserError, match=f"--documents .*{message}"):
            read_documents(path)
    for source in (DocumentQuestions, DocumentText):
        with pytest.raises(UserError, match="need --documents, a text file or a folder"):
            source(material(None)).samples(COMPARED, 1, LENGTH)
        own = source(material(folder))
        for part, use in (
            (Split(0, 1000), r"compare \(of 75%"),
            (Split(0, 5, calibration=True), r"calibrate on \(of 25%"),
        ):
            wanted = rf"--documents .* of {LENGTH} tokens.* to {use} of the text\): found \d+, needed 1000; give more"
            with pytest.raises(UserError, match=wanted):
                own.samples(part, 1000, LENGTH)
        for length in (1, 8, 16):
            with pytest.raises(UserError, match=rf"{length} tokens are too few, "):
                own.samples(COMPARED, 1, length)
