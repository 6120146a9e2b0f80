"""Test passages of documents: they are whole paragraphs, none occurs twice, and some are for calibration."""

import re

import numpy as np
import pytest

from kvjax.tasks.passages import LEAST, Paragraph, paragraphs, passages, split_documents


def words(texts):
    return [len(text.split()) for text in texts]


def test_passages_are_disjoint_runs_of_whole_paragraphs():
    rng = np.random.default_rng(0)
    sizes = [*rng.integers(1, 12, 150), 70, *rng.integers(1, 12, 50)]
    texts = [" ".join([f"p{i}", *["word"] * (size - 1)]) for i, size in enumerate(sizes)]
    documents = ["\n\n".join(texts[:90]), "\n \n".join(texts[90:])]
    found = passages([paragraphs(document, words) for document in documents], 60)
    assert len(found) >= 0.8 * sum(size for size in sizes if size < 70) // 60
    taken = []
    for passage in found:
        assert LEAST * 60 <= len(passage.split()) <= 60
        parts = re.split(r"\n ?\n", passage)
        first = texts.index(parts[0])
        assert parts == texts[first : first + len(parts)]
        # the next paragraph, if the document has one, does not fit
        last = first + len(parts)
        assert last in (90, len(texts)) or len(passage.split()) + sizes[last] > 60
        taken += parts
    assert len(taken) == len(set(taken))
    assert not any(len(paragraph.split()) > 60 for paragraph in taken)
    assert {int(passage.split()[0][1:]) < 90 for passage in found[:4]} == {True, False}


def test_documents_are_split_with_a_quarter_for_calibration():
    documents = [
        [Paragraph(f"{i}-{j} ", 1 + j % 3) for j in range(size)] for i, size in enumerate((5, 40, 9, 0))
    ]
    compared, calibration = split_documents(documents)
    first, second = ([p for document in part for p in document] for part in (compared, calibration))
    total = sum(p.tokens for document in documents for p in document)
    assert 0 <= sum(p.tokens for p in second) - total / 4 < 3
    assert sorted(p.text for p in first + second) == sorted(
        p.text for document in documents for p in document
    )
    assert not {p.text for p in first} & {p.text for p in second}


@pytest.mark.parametrize("room", [-5, 0, 1])
def test_no_passage_exceeds_its_length(room):
    assert passages([[Paragraph("two words", 2)]], room) == []
