"""Test questions about documents: each has one answer, and only the context holds it."""

import re

from kvjax.tasks.document_questions import (
    FEWEST,
    PER_THIRD,
    QUESTION,
    RESERVED,
    THIRDS,
    distinctive_words,
    document_questions,
)
from kvjax.tasks.documents import Documents
from kvjax.tasks.prompt import prompt_size
from tests.tasks.document_inputs import COMPARED, LENGTH, inputs


def test_the_first_distinctive_word_of_a_sentence_is_the_answer():
    passage = (
        "One two three four five Six7 eight. "  # too few words before the number
        'All of the old guests came into "Room-12" and later into Room-13. '
        "some guests said that the price was 450, others that it was 999. "
        # 450 stands twice: 999 was asked for, and this sentence has no other
        "none of the old guests knew that 450 was the price. "
        "if the same words stand here twice, Alpha comes. Or if the same words stand here twice, Beta comes. "
        "we have not met anybody called Ann. Nobody knows of a_b_c."  # the letters of Ann occur in another word (annex)
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


def test_words_that_do_not_fit_into_an_answer_are_not_used(folder):
    documents = Documents(inputs(documents=folder))
    task_inputs = documents.inputs

    def count(texts):
        """Return counts in which terms of every tenth paragraph take one token more than an answer has."""
        return [
            RESERVED + 1 if re.fullmatch(r" Guild\d+x\d*3x\d", text) else n
            for text, n in zip(texts, task_inputs.count(texts), strict=True)
        ]

    samples = document_questions(documents.for_split(COMPARED), task_inputs.encode, count, LENGTH)
    asked = [word for sample in samples for q in sample.questions for word in q.expected]
    assert len(asked) >= 12
    assert not [word for word in asked if re.search(r"3x\d$", word)]


def test_questions_have_one_answer_that_only_the_context_has(folder):
    documents = Documents(inputs(documents=folder))
    task_inputs = documents.inputs
    samples = document_questions(documents.for_split(COMPARED), task_inputs.encode, task_inputs.count, LENGTH)
    assert len(samples) >= 6
    for sample in samples:
        assert 0.7 * LENGTH < prompt_size(sample, task_inputs.encode) <= LENGTH
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
