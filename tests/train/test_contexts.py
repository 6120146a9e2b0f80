"""Test which documents become contexts."""

import json

import numpy as np
import pytest

from kvjax.errors import UserError
from kvjax.tasks.mixture import Mixture, builtin_mixture
from kvjax.train import contexts as module
from kvjax.train.contexts import Choice, builtin_contexts, context_texts, text_contexts


class Words:
    """A tokenizer with one number per word, which begins every text with a 7."""

    chat_template = None

    def __call__(self, text, add_special_tokens=True, verbose=False):
        return {"input_ids": [7] * add_special_tokens + [len(word) for word in text.split()]}


def words(count, letters):
    return " ".join(["x" * letters] * count)


def test_single_and_joined_contexts_begin_with_the_first_document():
    """The lengths are 5, 3, 6, 4, 2, 6, 5, …; those from 3 to below 7 count, and a joined context has 10 or more."""
    counts = [5, 3, 6, 4, 2, 6, 5, 3, 9, 4]
    texts = [(f" {name}\n", count) for name, count in zip("abcdefghij", counts, strict=True)]

    def documents():
        return iter(texts)

    contexts = list(context_texts(documents, Choice(3, 7, 10, single=3, joins=2)))
    # a + b have 8, so c is joined, too, and d is left out; f + g have 11, and h is left out
    assert contexts == ["a", "b", "c", "\n\na\n\nb\n\nc", "\n\nf\n\ng"]
    assert list(context_texts(documents, Choice(3, 7, 15, single=0, joins=1))) == ["\n\na\n\nb\n\nc\n\nd"]
    # the documents never reach this length
    assert len(list(context_texts(documents, Choice(3, 7, 100, single=1, joins=1)))) == 1


def local(tmp_path, counts):
    file = tmp_path / "texts.jsonl"
    texts = [words(count, 1 + index) for index, count in enumerate(counts)]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(file)


def test_local_text_gives_contexts_and_other_documents_for_the_report(tmp_path):
    data = local(tmp_path, [5, 6, 5, 6, 5, 2, 6, 40])
    options = {"seed": 0, "tokenizer": Words(), "instruction": "Read:"}
    contexts, held_out = text_contexts(data, Choice(5, 10, 10, single=2, joins=1), 2, **options)
    assert all(5 <= len(c.tokens) < 10 for c in contexts[:2])
    assert len(contexts) == 3
    assert len(held_out) == 2
    np.testing.assert_array_equal(
        contexts[2].tokens, np.concatenate([contexts[0].tokens, contexts[1].tokens])
    )
    for context in contexts:
        assert context.prefix.tolist() == [7], (
            "what the tokenizer begins with, and nothing without a chat template"
        )
        assert context.row.tolist() == [7, *context.tokens.tolist()]
    trained = {int(token) for context in contexts for token in context.tokens}
    assert not trained & {int(token) for row in held_out for token in row[1:]}
    again, _ = text_contexts(data, Choice(5, 10, 10, single=2, joins=1), 2, **options)
    assert [x.digest for x in again] == [x.digest for x in contexts]


def test_too_few_documents_are_an_error_of_one_line(tmp_path):
    data, options = local(tmp_path, [5, 6, 2]), {"seed": 0, "tokenizer": Words(), "instruction": ""}
    with pytest.raises(
        UserError,
        match=r"2 documents have 5 to 9 tokens, too few for 3 contexts of one document and 0 of at least 13",
    ):
        text_contexts(data, Choice(5, 10, 13, single=3, joins=0), 1, **options)
    with pytest.raises(UserError, match="are trained on: validation needs another, so lower --single"):
        text_contexts(data, Choice(5, 10, 13, single=2, joins=0), 1, **options)
    with pytest.raises(UserError, match="no such file or folder"):
        text_contexts("no-such-data", Choice(5, 10, 13, single=2, joins=0), 1, **options)


def test_chats_are_refused(tmp_path):
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": words(6, 3)}]}) + "\n")
    options = {"seed": 0, "tokenizer": Words(), "instruction": ""}
    with pytest.raises(UserError, match="chats.jsonl: line 1: is a chat, but contexts are texts"):
        text_contexts(str(file), Choice(5, 10, 13, single=1, joins=0), 1, **options)


def test_a_hub_data_set_is_read_in_its_order_by_its_own_count(monkeypatch):
    rows = [
        {"text": words(3, index + 1), "token_count": count} for index, count in enumerate([2, 8, 50, 9, 8])
    ]
    monkeypatch.setattr(module, "open_hub", lambda name: iter(rows))
    options = {"seed": 0, "tokenizer": Words(), "instruction": ""}
    contexts, held_out = text_contexts("a/set", Choice(5, 10, 13, single=2, joins=0), 5, **options)
    assert [context.tokens[0] for context in contexts] == [2, 4]
    assert [row[1] for row in held_out] == [5]
    rows[0] = {"text": None}
    assert text_contexts("a/set", Choice(5, 10, 13, single=2, joins=0), 5, **options)[0][0].tokens[0] == 2
    rows[:0] = [{"words": "x"}] * 11
    with (
        pytest.warns(UserWarning, match="are skipped"),
        pytest.raises(UserError, match="11 of its first 11 records"),
    ):
        text_contexts("a/set", Choice(5, 10, 13, single=2, joins=0), 5, **options)


def test_contexts_of_the_built_in_tasks_match_their_mixture():
    contexts, held_out = builtin_contexts([64, 128], [64], seed=3)
    stream = builtin_mixture()
    for index, (context, length) in enumerate(zip(contexts, (64, 128), strict=True)):
        sequence = stream(3, index, length)[0]
        np.testing.assert_array_equal(sequence[: len(context.row)], context.row)
        first = context.questions[0]
        np.testing.assert_array_equal(sequence[len(context.row) :][: len(first)], first)
        assert len(context.prefix) == 1
    assert isinstance(stream, Mixture)
    assert len(held_out) == 1
    assert len(held_out[0]) == 64
    with pytest.raises(
        UserError, match="--lengths 32: the built-in tasks need sequences of at least 64 tokens"
    ):
        builtin_contexts([32], [], 0)
