"""Test passkeys in text: the hidden words are asked for and labelled, at the published depths, in tokens of any
kind."""

import functools
import itertools

import numpy as np
import pytest

from kvjax.errors import UserError
from kvjax.train.passkeys import DEPTHS, HEAD, ORDINALS, TAIL, WORDS, Passkeys, Text
from tests.tasks.model_tokenizers import byte_tokenizer, smol_tokenizer, spaced_tokenizer

TOKENIZERS = {"smol": smol_tokenizer(), "bytes": byte_tokenizer(), "spaced": spaced_tokenizer()}
each_tokenizer = pytest.mark.parametrize("kind", TOKENIZERS)


@functools.cache
def book(kind):
    """Return the tokens of a text with numbered lines."""
    return Text(TOKENIZERS[kind])(" ".join(f"Line {i} of the book." for i in range(1000)))


def pack(kind, length):
    return book(kind)[:length], np.zeros(length, np.int32)


def labelled_runs(learned):
    """Return the beginning and the end of each run of labelled tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], learned, [False]])))
    return edges.reshape(-1, 2).tolist()


@each_tokenizer
def test_only_the_answers_are_learned(kind):
    """The decoded tokens are the words after each question, which also follow the same passkey in the text."""
    tokenizer = TOKENIZERS[kind]
    passkeys = Passkeys(tokenizer, seed=1, count=3, words=4)
    sequence = passkeys(7, *pack(kind, 4000))
    assert {name: (x.dtype, x.shape) for name, x in sequence.items()} == {
        "tokens": (np.int32, (4000,)),
        "document": (np.int32, (4000,)),
        "labelled": (bool, (4000,)),
    }
    assert not sequence["document"].any()
    answers, text = labelled_runs(sequence["labelled"]), tokenizer.decode(sequence["tokens"])
    assert len(answers) == 3
    book_text, questions = text.split("</book>")
    for (start, stop), ordinal in zip(answers, ORDINALS, strict=False):
        answer = tokenizer.decode(sequence["tokens"][start:stop]).strip()
        words = answer.split(" ")
        assert len(words) == 4
        assert set(words) <= set(WORDS)
        before = tokenizer.decode(sequence["tokens"][:start])
        assert before.endswith(f"what is the {ordinal} passkey to the vault?\nPasskey:")
        assert f"They are the {ordinal} passkey to the vault: {answer}\n\n" in book_text
        assert f"the {ordinal} passkey to the vault?\nPasskey: {answer}" in questions
    assert answers[-1][1] == 4000, "the last answer is the end"


@each_tokenizer
def test_a_passkey_has_the_tokens_of_its_answer(kind):
    tokenizer = TOKENIZERS[kind]
    sequence = Passkeys(tokenizer, seed=1, count=2, words=5)(0, *pack(kind, 3000))
    for start, stop in labelled_runs(sequence["labelled"]):
        answer = sequence["tokens"][start:stop]
        windows = np.lib.stride_tricks.sliding_window_view(sequence["tokens"], len(answer))
        assert len(np.flatnonzero((windows == answer).all(1))) == 2


@each_tokenizer
def test_the_text_around_passkeys_is_complete(kind):
    tokenizer = TOKENIZERS[kind]
    tokens, document = pack(kind, 4000)
    sequence = Passkeys(tokenizer, seed=1, count=3, words=4)(0, tokens, document)
    text = tokenizer.decode(sequence["tokens"]).split("</book>")[0].split("<book>\n\n")[1]
    first, *parts = text.split("\n\nRemember these words")
    actual = "".join("".join([first, *(part.split("\n\n", 1)[1] for part in parts)]).split())
    assert "".join(tokenizer.decode(tokens).split()).startswith(actual)
    assert len(actual) > 1500


def test_a_sequence_has_the_begin_token_and_no_end_token():
    beginnings = {kind: Passkeys(x, 0, 1, 1)(0, *pack(kind, 900))["tokens"] for kind, x in TOKENIZERS.items()}
    spaced = TOKENIZERS["spaced"]
    assert beginnings["spaced"][0] == spaced.bos_token_id
    assert np.count_nonzero(beginnings["spaced"] == spaced.bos_token_id) == 1
    assert spaced.eos_token_id not in beginnings["spaced"]
    assert TOKENIZERS["bytes"].decode(beginnings["bytes"]).startswith(HEAD)


def test_depths_are_spread_from_5_to_95_percent_of_the_text():
    """The depth is the share of the text before each passkey, over many sequences."""
    tokenizer, tokens = TOKENIZERS["bytes"], pack("bytes", 4000)
    passkeys, depths_of_all = Passkeys(tokenizer, seed=0, count=4, words=2), []
    for index in range(60):
        text = tokenizer.decode(passkeys(index, *tokens)["tokens"])
        book_text = text.split(TAIL)[0].removeprefix(HEAD)
        gaps = [part.split("\n\n", 1)[-1] for part in book_text.split("\n\nRemember these words")]
        sizes = np.array([len(gaps[0]), *map(len, gaps[1:])])
        depths = np.cumsum(sizes)[:-1] / sizes.sum()
        assert (np.diff(depths) >= 0).all()
        depths_of_all += depths.tolist()
    assert 0.04 < min(depths_of_all) < 0.1
    assert 0.9 < max(depths_of_all) < 0.96
    assert abs(np.mean(depths_of_all) - 0.5) < 0.05
    assert (DEPTHS[0], DEPTHS[-1], len(DEPTHS)) == (0.05, 0.95, 1000)


def test_a_sequence_depends_only_on_seed_and_index():
    kind, tokenizer = "smol", TOKENIZERS["smol"]
    first, second = (Passkeys(tokenizer, seed=3, count=2, words=4) for _ in range(2))
    first(5, *pack(kind, 900))  # in any order
    same = [passkeys(9, *pack(kind, 900))["tokens"] for passkeys in (first, second)]
    np.testing.assert_array_equal(*same)
    different = [first(10, *pack(kind, 900)), Passkeys(tokenizer, 4, 2, 4)(9, *pack(kind, 900))]
    for one, other in itertools.combinations([same[0], *(x["tokens"] for x in different)], 2):
        assert not np.array_equal(one, other)


@each_tokenizer
def test_the_error_for_a_short_sequence_has_the_minimum_length(kind):
    tokenizer = TOKENIZERS[kind]
    passkeys = Passkeys(tokenizer, seed=0, count=10, words=32)
    with pytest.raises(
        UserError, match=r"--lengths 100: 10 passkeys of 32 words and their questions take"
    ) as error:
        passkeys.check(100)
    minimum = int(str(error.value).split("take ")[1].split(" ")[0])
    passkeys.check(minimum)
    with pytest.raises(UserError, match="--lengths"):
        passkeys.check(minimum - 1)
    for index in range(20):
        assert len(passkeys(index, *pack(kind, minimum))["tokens"]) == minimum
    with pytest.raises(UserError, match="10 passkeys of 32 words"):
        passkeys(0, *pack(kind, minimum // 2))
