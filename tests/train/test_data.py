"""Test sequences of text and of the built-in tasks: their lengths, their order, and the held-out ones."""

import json
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from kvjax.errors import UserError
from kvjax.tasks import Mixture, builtin_text, builtin_vocabulary
from kvjax.tasks.mixture import builtin_mixture
from kvjax.train import readers
from kvjax.train.batches import Rows
from kvjax.train.data import (
    FIRST_HELD_OUT,
    Bins,
    DataRequest,
    DocumentSequences,
    Encoder,
    draw_step_lengths,
    hold_out,
    open_data,
)
from kvjax.train.readers import HubReader
from tests.train.texts import hub, texts

ALL = Rows(np.arange(4), 4, 0)


class Letters:
    """A tokenizer with one token per character."""

    chat_template = None

    def __call__(self, text, verbose, add_special_tokens=True):
        return {"input_ids": [ord(c) for c in text]}


class Chat(Letters):
    chat_template = (
        "<{{ messages[0].role }}>{{ messages[0].content }}{{ '<model>' if add_generation_prompt }}"
    )


def open_sequences_and_held_out(source, step_lengths, validation, rows=ALL, seed=0, tokenizer=None):
    """Return the iterator and the held-out sequences."""
    request = DataRequest(
        source,
        rows=rows,
        step_lengths=np.asarray(step_lengths),
        lengths=sorted(set(step_lengths)),
        validation=np.asarray(validation, int),
        seed=seed,
        tokenizer=tokenizer or Letters(),
        instruction="Read:",
    )
    data = open_data(request)
    return data.sequences, data.held_out


def open_sequences(source, step_lengths, rows=ALL, seed=0, tokenizer=None):
    return open_sequences_and_held_out(source, step_lengths, [], rows, seed, tokenizer)[0]


def decode(tokens):
    """Return the text of a sequence of `Letters`."""
    return "".join(map(chr, tokens.tolist()))


def test_every_length_gets_its_share_of_the_steps():
    lengths = draw_step_lengths(7500, (4096, 8192, 16384, 32768), (4000.0, 2000.0, 1000.0, 500.0), seed=3)
    assert Counter(lengths.tolist()) == {4096: 4000, 8192: 2000, 16384: 1000, 32768: 500}
    assert int(lengths.sum()) == 65_536_000  # the paper has 62.5 Mi tokens
    assert (lengths[:100] != 4096).any(), "shuffled, not sorted"
    assert Counter(draw_step_lengths(10, (1, 2, 3), (1.0, 1.0, 1.0), seed=0).tolist()).total() == 10
    np.testing.assert_array_equal(
        draw_step_lengths(50, (1, 2), (1.0, 1.0), 5), draw_step_lengths(50, (1, 2), (1.0, 1.0), 5)
    )


def test_builtin_sequences_do_not_depend_on_the_processes():
    step_lengths = [128, 256, 128]
    steps = list(open_sequences("builtin", step_lengths, seed=9))
    halves = [
        list(open_sequences("builtin", step_lengths, Rows(np.array([group, group + 2]), 4, group), seed=9))
        for group in (0, 1)
    ]
    for step, length in enumerate(step_lengths):
        assert steps[step].shape == (4, length)
        np.testing.assert_array_equal(steps[step][1], builtin_mixture()(9, 4 * step + 1, length)[0])
        for group, half in enumerate(halves):
            np.testing.assert_array_equal(steps[step][group::2], half[step])


@pytest.mark.parametrize("kind", ["builtin", "files"])
def test_reading_resumes_exactly_from_a_json_position(kind, tmp_path):
    rng = np.random.default_rng(0)
    documents = ["".join(rng.choice(list("abcdef"), size)) for size in rng.integers(16, 80, 60)]
    source = "builtin" if kind == "builtin" else texts(tmp_path, documents)
    step_lengths = [length * (8 if kind == "builtin" else 1) for length in (16, 32, 16, 16, 32, 16, 32, 16)]
    steps = list(open_sequences(source, step_lengths))
    stopped = open_sequences(source, step_lengths)
    for _ in range(3):
        next(stopped)
    position = json.loads(json.dumps(stopped.get_state()))
    resumed = open_sequences(source, step_lengths)
    next(resumed)  # the iterator's position does not matter
    resumed.set_state(position)
    resumed = list(resumed)
    assert len(resumed) == 5
    for actual, expected in zip(resumed, steps[3:], strict=True):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize(
    ("lengths", "letters_by_length"),
    [((8, 16), {8: "bc", 16: "defgh"}), ((8, 64), {8: "bcdef", 64: "gh"}), ((7,), {7: "abcdefgh"})],
)
def test_a_document_is_cut_to_the_largest_length_that_it_fills(tmp_path, lengths, letters_by_length):
    sizes = {"a": 7, "b": 8, "c": 15, "d": 16, "e": 31, "f": 32, "g": 64, "h": 500}
    source = texts(tmp_path, [letter * size for letter, size in sizes.items()])
    for length, letters in letters_by_length.items():
        # one pass over them has each once
        step_lengths = [length] * len(letters) + [other for other in lengths if other != length]
        sequences = [
            decode(t[0])
            for t in open_sequences(source, step_lengths, Rows(np.arange(1), 1, 0))
            if t.shape[1] == length
        ]
        assert sorted(sequences) == [letter * length for letter in letters]


@pytest.mark.parametrize(
    ("sizes", "remark"),
    [
        ([8, 8, 16, 16], ""),
        ([3, 7, 8, 8, 16, 16], "of all 6 documents: 2 shorter than 8 tokens and not trained on"),
        # 34 of 82 tokens: 2 of a document between the lengths, 32 of one above them
        (
            [7, 10, 16, 48, 8],
            "of all 5 documents: 1 shorter than 8 tokens and not trained on; 2 cut, which leaves out 41% of the tokens",
        ),
        ([24] * 100 + [8], "of the first 101 documents: 100 cut, which leaves out 33% of the tokens"),
        ([8, 16, *[24] * 100], "of the first 64 documents: 62 cut, which leaves out 33% of the tokens"),
    ],
)
def test_left_out_text_is_counted(sizes, remark):
    """The documents are read in this order, for 8 and 16 tokens."""
    documents = iter([*(chr(97 + i) * size for i, size in enumerate(sizes)), None])
    reader = SimpleNamespace(next=lambda: next(documents), get_state=int, set_state=int)
    actual = hold_out(reader, Bins((8, 16), Encoder(Letters(), "", 16)), [], [8, 16], "x")[2]
    assert actual == remark


def held_out_and_trained(source, step_lengths, validation, **changes):
    """Return the held-out texts, and those trained on."""
    sequences, held_out = open_sequences_and_held_out(source, step_lengths, validation, **changes)
    return [decode(t) for t in held_out], {decode(row) for tokens in sequences for row in tokens}


@pytest.fixture
def numbered(tmp_path):
    """Return a source of twenty documents of 8 tokens and twenty of 16, each with a number of its own, and a copy of
    each."""
    short, long = ([f"{i:02}" * (length // 2) for i in range(20)] for length in (8, 16))
    return texts(tmp_path, 2 * (short + long))


def test_held_out_documents_are_never_trained_on(numbered):
    step_lengths = [8] * 40 + [16] * 40
    held_out, trained = held_out_and_trained(numbered, step_lengths, [8, 8, 8, 16, 16])
    assert [len(text) for text in held_out] == [8, 8, 8, 16, 16]
    assert len(set(held_out)) == 5
    assert not set(held_out) & trained
    all_texts = {f"{i:02}" * (length // 2) for i in range(20) for length in (8, 16)}
    assert set(held_out) | trained == all_texts


def test_held_out_documents_do_not_depend_on_the_processes_or_the_steps(numbered):
    step_lengths, validation = [8, 16] * 20, [8, 8, 16]
    held_out, _ = held_out_and_trained(numbered, step_lengths, validation)
    for group in (0, 1):
        rows = Rows(np.arange(2 * group, 2 * group + 2), 4, group)
        others, trained = held_out_and_trained(numbered, step_lengths * 3, validation, rows=rows)
        assert others == held_out
        assert not set(held_out) & trained
    assert held_out_and_trained(numbered, step_lengths, validation, seed=1)[0] != held_out


def test_at_most_half_of_the_documents_of_a_length_are_held_out(tmp_path):
    source = texts(tmp_path, [f"{i:02}" * 4 for i in range(5)] + ["x" * 16])
    held_out, trained = held_out_and_trained(source, [8, 16] * 6, [8] * 10 + [16] * 3)
    assert len(held_out) == 2
    assert len(trained) == 4
    assert "x" * 16 in trained
    two_copies = texts(tmp_path, ["y" * 8, "y" * 8])
    with pytest.raises(UserError, match=r"only one document for each of --lengths \[8\]: validation needs"):
        held_out_and_trained(two_copies, [8], [8])


def test_held_out_built_in_tasks_use_the_evaluation_text():
    held_out = open_sequences_and_held_out("builtin", [128] * 3, [128, 256], seed=4)[1]
    assert [len(tokens) for tokens in held_out] == [128, 256]
    again = open_sequences_and_held_out("builtin", [64], [128, 256], seed=4)[1]
    for actual, expected in zip(held_out, again, strict=True):
        np.testing.assert_array_equal(actual, expected)
    held_mixture = Mixture(builtin_vocabulary(), builtin_text("evaluate"))
    np.testing.assert_array_equal(held_out[1], held_mixture(4, FIRST_HELD_OUT + 1, 256)[0])


def test_processes_read_disjoint_documents(tmp_path):
    source = texts(tmp_path, [f"{i:02}" * 4 for i in range(8)])
    documents = [
        {bytes(t[0].tolist()) for t in open_sequences(source, [8] * 8, Rows(np.array([g]), 2, g))}
        for g in (0, 1)
    ]
    assert len(documents[0]) == len(documents[1]) == 4
    assert not documents[0] & documents[1]


def test_the_seed_orders_the_documents(tmp_path):
    source = texts(tmp_path, [f"{i:02}" * 4 for i in range(20)])
    orders = [
        [bytes(t[0].tolist()) for t in open_sequences(source, [8] * 20, Rows(np.arange(1), 1, 0), seed)]
        for seed in (0, 0, 1)
    ]
    assert orders[0] == orders[1] != orders[2]
    assert set(orders[0]) == set(orders[2])
    assert len(set(orders[0])) == 20


def test_a_chat_model_reads_a_users_turn():
    assert "".join(map(chr, Encoder(Chat(), "Read:", 8)("abc"))) == "<user>Read:\n\nabc<model>"
    assert "".join(map(chr, Encoder(Letters(), "Read:", 8)("abc"))) == "abc"


@pytest.mark.parametrize(
    ("documents", "parts"),
    [
        (["", " \n"], ["there is no text in it"]),
        ([], ["there is no text in it"]),
        (["abc", "abcdefg"], ["no document has 16 to 31 tokens", "about 7", "--lengths"]),
        (["x" * 16], ["no document has 32 or more tokens", "about 16"]),
    ],
)
def test_data_that_cannot_be_used_is_refused_before_the_first_step(tmp_path, documents, parts):
    source = texts(tmp_path, documents)
    with pytest.raises(UserError) as error:
        open_sequences(source, [16, 32])
    assert all(part in str(error.value) for part in [source, *parts]), error.value


def test_a_streamed_data_set_resumes_from_its_position(tmp_path):
    def sequences():
        bins = Bins((8,), Encoder(Letters(), "", 8))
        return iter(
            DocumentSequences(
                lambda group, groups: HubReader(hub(tmp_path, 6), group, groups, "a/set"),
                bins,
                Rows(np.arange(1), 1, 0),
                step_lengths,
                "x",
            )
        )

    step_lengths = np.full(10, 8)  # this is more than one pass
    documents = [bytes(tokens[0].tolist()).decode() for tokens in sequences()]
    assert documents == [f"{i % 6:02}" * 4 for i in range(10)]
    first = sequences()
    for _ in range(4):
        next(first)
    resumed = sequences()
    resumed.set_state(json.loads(json.dumps(first.get_state())))
    assert [bytes(tokens[0].tolist()).decode() for tokens in resumed] == documents[4:]


def test_a_streamed_data_set_holds_documents_out(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "open_hub", lambda name: hub(tmp_path, 8))
    held_out, trained = held_out_and_trained("some/set", [8] * 12, [8, 8], rows=Rows(np.arange(1), 1, 0))
    assert held_out == ["01" * 4, "03" * 4]
    assert trained == {f"{i:02}" * 4 for i in (0, 2, 4, 5, 6, 7)}


def test_the_largest_remainders_get_the_remaining_steps():
    lengths = draw_step_lengths(10, (1, 2, 3), (5.0, 3.4, 1.6), seed=0)
    assert Counter(lengths.tolist()) == {1: 5, 2: 3, 3: 2}


def test_the_chat_template_counts_towards_a_documents_length(tmp_path):
    source = texts(tmp_path, ["x" * 50])
    (tokens,) = open_sequences(source, [64], Rows(np.arange(1), 1, 0), tokenizer=Chat())
    assert tokens.shape == (1, 64)


class Words(Letters):
    """A tokenizer with one token for eight characters."""

    def __call__(self, text, verbose, add_special_tokens=True):
        return {"input_ids": [ord(c) for c in text[::8]]}


def test_tokens_of_many_characters_fill_a_sequence(tmp_path):
    assert len(Encoder(Words(), "", 8)("abcdefgh" * 20)) >= 8
    (tmp_path / "long.txt").write_text("abcdefgh" * 64)
    (tokens,) = open_sequences(str(tmp_path / "long.txt"), [16], Rows(np.arange(1), 1, 0), tokenizer=Words())
    assert tokens.shape == (1, 16)


def test_there_may_be_more_processes_than_documents(tmp_path):
    source = texts(tmp_path, ["a" * 8, "b" * 8])
    assert [len(list(open_sequences(source, [8] * 3, Rows(np.array([g]), 4, g)))) for g in range(4)] == [
        3
    ] * 4


def test_a_process_without_a_document_of_a_length_reads_all(tmp_path):
    """The only document of 16 tokens is in the share of one of two processes."""
    source = texts(tmp_path, ["x" * 16] + [f"{i:02}" * 4 for i in range(7)])
    for group in (0, 1):
        steps = open_sequences(source, [8, 16, 16, 8], Rows(np.array([group]), 2, group))
        documents = [decode(next(steps)[0]) for _ in range(2)]
        resumed = open_sequences(source, [8, 16, 16, 8], Rows(np.array([group]), 2, group))
        resumed.set_state(steps.get_state())
        following = [decode(step[0]) for step in resumed]
        assert following == [decode(step[0]) for step in steps]
        assert documents[1] == following[0] == "x" * 16


def test_each_length_has_its_own_passes(tmp_path):
    """A pass has every document of a length once, in whatever order the lengths are taken."""
    source = texts(tmp_path, [f"{i:02}" * (size // 2) for size in (8, 16) for i in range(10)])
    documents = [decode(t[0]) for t in open_sequences(source, [8, 16] * 10, Rows(np.arange(1), 1, 0))]
    assert len(set(documents)) == 20
