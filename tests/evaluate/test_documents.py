"""Passages of documents, and questions about them: each has one answer, and only the context holds it."""

import re

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from kvjax.builtin import builtin_model
from kvjax.errors import UserError
from kvjax.evaluate.sources import AboutDocuments, GoingOn, Material
from kvjax.evaluate.tasks.document_questions import (
    FEWEST,
    PER_THIRD,
    QUESTION,
    THIRDS,
    distinctive,
    document_questions,
)
from kvjax.evaluate.tasks.documents import LEAST, passages, read_documents
from kvjax.evaluate.tasks.ruler import Files
from kvjax.evaluate.tasks.ruler.words import ADJECTIVES, NOUNS
from kvjax.evaluate.tasks.text_prompt import prompt_size

LENGTH = 700


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
    paragraphs = [" ".join([f"p{i}", *["word"] * (size - 1)]) for i, size in enumerate(sizes)]
    found = passages(["\n\n".join(paragraphs[:90]), "\n \n".join(paragraphs[90:])], words, 60)
    assert len(found) >= 0.8 * sum(size for size in sizes if size < 70) // 60
    taken = []
    for passage in found:
        assert LEAST * 60 <= len(passage.split()) <= 60
        own = re.split(r"\n ?\n", passage)
        first = paragraphs.index(own[0])
        assert own == paragraphs[first : first + len(own)]
        # no room for the next one, where there is one in the document
        last = first + len(own)
        assert last in (90, len(paragraphs)) or len(passage.split()) + sizes[last] > 60
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
    found = [(given, word) for _, given, word in distinctive(passage)]
    assert found == [
        ("All of the old guests came into", "Room-12"),
        ("some guests said that the price was 450, others that it was", "999"),
        ("Or if the same words stand here twice,", "Beta"),
    ]
    for at, given, word in distinctive(passage):
        assert passage[round(at * len(passage)) :].lstrip('"').startswith(word)
        assert len(given.split()) >= FEWEST


def test_questions_have_one_answer_which_only_the_context_holds(folder):
    own = material(folder)
    samples = document_questions(own.read, own.encode, own.count, LENGTH)
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
    source = AboutDocuments(material(folder))
    contexts, again = source.contexts(7, 5, LENGTH), AboutDocuments(material(folder)).contexts(7, 5, LENGTH)
    for one, other in zip(contexts, again, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        for a, b in zip(one.questions, other.questions, strict=True):
            np.testing.assert_array_equal(a.prompt, b.prompt)
        assert len(one.tokens) + max(len(q.prompt) + q.answer_tokens for q in one.questions) <= LENGTH
        assert len(one.questions) == source.worth(LENGTH)
    assert len({context.tokens.tobytes() for context in contexts}) == 5
    np.testing.assert_array_equal(source.contexts(8, 1, LENGTH)[0].tokens, contexts[1].tokens)
    tokenizer, asked = material(folder).tokenizer, contexts[0].questions[0]
    sample = source._made[LENGTH][7 % len(source._made[LENGTH])]
    answer = tokenizer.encode(f" {sample.questions[0].expected[0]},", add_special_tokens=False)
    assert asked.score(np.array(answer)) == 1
    assert asked.score(np.array(answer[:1])) == 0


def test_a_text_is_a_passage_and_its_end_is_given(folder):
    own = material(folder)
    for context in GoingOn(own).contexts(0, 3, 600):
        (question,) = context.questions
        line = np.concatenate([context.tokens, question.prompt, question.given])
        assert 0.9 * 600 - 2 < len(line) <= 600
        assert question.answer_tokens == len(question.given) == len(line) // 8
        text = own.tokenizer.decode(line.tolist(), skip_special_tokens=True)
        assert any(text in document for document in own.read)
        assert question.score(question.given) == 1


def test_chat_templates_are_for_questions_and_not_for_texts(folder):
    own = material(folder)
    own.tokenizer.chat_template = "<|question|>{{ messages[0]['content'] }}<|separator|>"
    assert isinstance(own.tokenizer, PreTrainedTokenizerFast)
    mark = own.tokenizer.convert_tokens_to_ids("<|question|>")
    assert mark in AboutDocuments(own).contexts(0, 1, LENGTH)[0].tokens
    assert mark not in GoingOn(own).contexts(0, 1, LENGTH)[0].tokens


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
    for source in (AboutDocuments, GoingOn):
        with pytest.raises(UserError, match="need --documents, a text file or a folder"):
            source(material(None)).contexts(0, 1, LENGTH)
        with pytest.raises(UserError, match=rf"--documents .* of {LENGTH} tokens.*: \d+, 1000 are needed"):
            source(material(folder)).contexts(0, 1000, LENGTH)
