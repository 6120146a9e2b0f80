"""Test packs: documents stay separate, a cut one is not continued, sources are mixed by weights, reading resumes at any
position, and some documents are held out."""

import json
from pathlib import Path

import numpy as np
import pytest

from kvjax.errors import UserError
from kvjax.train import readers as module
from kvjax.train.batches import Rows
from kvjax.train.data import DataRequest
from kvjax.train.documents import Documents
from kvjax.train.packing import StreamEncoder
from kvjax.train.packs import PackedDocuments, draw_sources, natural, open_packs
from kvjax.train.readers import FileReader
from tests.tasks.model_tokenizers import byte_tokenizer
from tests.train.texts import hub, texts

TOKENIZER = byte_tokenizer()
END = TOKENIZER.eos_token_id
ENCODE = StreamEncoder(TOKENIZER)
SHORT = [f"s{i:03}" + "abcdefghij"[: i % 10] for i in range(60)]
LONG = [f"L{i:03}" + "klmnopqrst" * (3 + i % 4) for i in range(40)]
ALL = Rows(np.arange(4), 4, 0)
LENGTH = 24
"""Number of tokens of a sequence: some five short documents, or less than a long one."""


def write_texts(tmp_path, name, documents):
    (tmp_path / name).mkdir(exist_ok=True)
    return texts(tmp_path / name, documents)


@pytest.fixture
def two_sources(tmp_path):
    return write_texts(tmp_path, "short", SHORT), write_texts(tmp_path, "long", LONG)


def open_sources(sources, weights, steps=10, rows=ALL, validation=4, seed=0, lengths=(LENGTH,)):
    request = DataRequest(
        sources[0],
        rows=rows,
        step_lengths=np.resize(lengths, steps),
        lengths=lengths,
        validation=np.resize(lengths, validation),
        seed=seed,
        tokenizer=TOKENIZER,
    )
    return open_packs(request, sources, weights, ENCODE, natural)


def documents_of(pack):
    """Return the texts of a pack's documents. The last one may be cut."""
    assert {name: x.dtype for name, x in pack.items()} == {
        "tokens": np.int32,
        "document": np.int32,
        "labelled": bool,
    }
    borders = np.flatnonzero(np.diff(pack["document"])) + 1
    assert set(np.diff(pack["document"]).tolist()) <= {0, 1}
    assert pack["document"][0] == 0
    return [TOKENIZER.decode(part) for part in np.split(pack["tokens"], borders)]


def rows_of(data):
    """Return all rows of all steps."""
    return [{name: x[i] for name, x in step.items()} for step in data for i in range(len(step["tokens"]))]


def test_packs_are_whole_documents_and_a_cut_last_one(two_sources):
    """They are in the reader's order; the rest of a cut document is dropped."""
    documents = (Documents(Path(two_sources[0]), 0, 16 * LENGTH)[i] for i in range(len(SHORT)))
    sources = {two_sources[0]: lambda: FileReader(Documents(Path(two_sources[0]), 0, 16 * LENGTH), 0, 1)}
    dataset = PackedDocuments(
        sources, ENCODE, Rows(np.arange(1), 1, 0), np.full(8, LENGTH), np.zeros(8, int), natural
    )
    for pack in rows_of(dataset):
        expected, missing = [], LENGTH
        while missing > 0:
            expected.append(next(documents) + "<|im_end|>")
            missing -= len(ENCODE(expected[-1]))
        actual = documents_of(pack)
        assert actual[:-1] == expected[:-1]
        assert expected[-1].startswith(actual[-1])
        assert len(pack["tokens"]) == LENGTH


def test_no_document_crosses_a_border_and_its_first_token_is_not_learned(two_sources):
    for pack in rows_of(open_sources(two_sources, (1.0, 1.0)).sequences):
        ends = np.flatnonzero(pack["tokens"] == END)
        inner = ends[ends < LENGTH - 1]
        np.testing.assert_array_equal(inner + 1, np.flatnonzero(np.diff(pack["document"])) + 1)
        np.testing.assert_array_equal(np.flatnonzero(~pack["labelled"]), [0, *(inner + 1)])


def test_a_document_longer_than_a_sequence_fills_one_alone(two_sources):
    (counts,) = {len(set(x["document"])) for x in rows_of(open_sources(two_sources[1:], (1.0,)).sequences)}
    assert counts == 1
    beginnings = [
        documents_of(x)[0] for x in rows_of(open_sources(two_sources[1:], (1.0,), steps=5).sequences)
    ]
    assert len(set(beginnings)) == len(beginnings) == 20, "the rest of each is dropped, the next one follows"
    assert all(any(document.startswith(text) for document in LONG) for text in beginnings)


@pytest.mark.parametrize("weights", [(0.4, 0.6), (1.0, 3.0), (0.37, 0.63)])
@pytest.mark.parametrize("steps", [1, 7, 250])
def test_sources_have_their_shares_of_the_tokens_within_a_sequence(weights, steps):
    lengths = np.random.default_rng(steps).choice([16, 64, 256], 8 * steps)
    sources = draw_sources(lengths, weights, seed=3)
    for length in np.unique(lengths):
        sources_of_length = sources[lengths == length]
        for source, weight in enumerate(weights):
            assert (
                abs(np.sum(sources_of_length == source) - len(sources_of_length) * weight / sum(weights)) < 1
            )
    assert not np.array_equal(sources, draw_sources(lengths, weights, seed=4)) or steps == 1
    np.testing.assert_array_equal(sources, draw_sources(lengths, weights, seed=3))


def test_a_pack_is_of_one_source_and_packs_are_mixed_by_weights(two_sources):
    kinds = [
        {text[0] for text in documents_of(x)}
        for x in rows_of(open_sources(two_sources, (0.4, 0.6), steps=25).sequences)
    ]
    assert all(len(kind) == 1 for kind in kinds)
    kinds_of_packs = [kind.pop() for kind in kinds]
    assert (kinds_of_packs.count("s"), kinds_of_packs.count("L")) == (40, 60)
    assert len(set(kinds_of_packs[:10])) == 2, "shuffled, not sorted"


@pytest.mark.parametrize("stop", range(8))
def test_reading_resumes_exactly_from_a_json_position(two_sources, stop):
    options = dict(steps=7, lengths=(16, LENGTH))
    steps, running = (
        list(open_sources(two_sources, (0.4, 0.6), **options).sequences),
        open_sources(two_sources, (0.4, 0.6), **options).sequences,
    )
    for _ in range(stop):
        next(running)
    resumed = open_sources(two_sources, (0.4, 0.6), **options).sequences
    resumed.set_state(json.loads(json.dumps(running.get_state())))
    resumed = list(resumed)
    assert len(resumed) == 7 - stop
    for actual, expected in zip(resumed, steps[stop:], strict=True):
        for name, x in expected.items():
            np.testing.assert_array_equal(actual[name], x)


def test_held_out_packs_are_from_both_sources_and_never_trained_on(two_sources):
    data = open_sources(two_sources, (0.5, 0.5), steps=60, validation=6)
    held_out_texts = [text for pack in data.held_out for text in documents_of(pack)]
    assert [len(x) for x in data.held_out_tokens] == [LENGTH] * 6
    assert {documents_of(pack)[0][0] for pack in data.held_out} == {"s", "L"}
    for pack in data.held_out:
        assert np.flatnonzero(pack["labelled"]).tolist() == [
            i for i in range(1, LENGTH) if pack["document"][i] == pack["document"][i - 1]
        ]
    held_out = {text[:4] for text in held_out_texts if len(text) >= 4}
    trained = {text[:4] for pack in rows_of(data.sequences) for text in documents_of(pack) if len(text) >= 4}
    assert len(held_out) >= 6
    assert not held_out & trained
    assert len(held_out | trained) >= 90, "all except documents that are cut to a few letters"


def test_documents_of_a_held_out_pack_that_is_never_full_are_trained_on(tmp_path):
    """Every second of 20 documents would be held out, and three of them fill a pack: the tenth is left."""
    source = write_texts(tmp_path, "twenty", [letter * 7 for letter in "abcdefghijklmnopqrst"])
    data = open_sources((source,), (1.0,), steps=20, validation=8)
    held_out = {text[0] for pack in data.held_out for text in documents_of(pack)}
    trained = {text[0] for pack in rows_of(data.sequences) for text in documents_of(pack)}
    assert (len(data.held_out), len(held_out), len(trained)) == (3, 9, 11)
    assert not held_out & trained


def test_a_document_held_out_in_one_source_is_trained_on_in_none(tmp_path):
    first, second = (write_texts(tmp_path, name, LONG[::step]) for name, step in (("forth", 1), ("back", -1)))
    data = open_sources((first, second), (0.5, 0.5), steps=30, validation=8)
    held_out = {documents_of(pack)[0][:4] for pack in data.held_out}
    assert len(held_out) >= 5
    assert not held_out & {documents_of(pack)[0][:4] for pack in rows_of(data.sequences)}


def test_processes_read_disjoint_documents_and_hold_out_the_same(two_sources):
    whole = open_sources(two_sources, (0.4, 0.6))
    parts = [
        open_sources(two_sources, (0.4, 0.6), rows=Rows(np.arange(start, start + 2), 4, start // 2))
        for start in (0, 2)
    ]
    for part in parts:
        for actual, expected in zip(part.held_out, whole.held_out, strict=True):
            np.testing.assert_array_equal(actual["tokens"], expected["tokens"])

    def kinds(steps):
        return [[TOKENIZER.decode(row[:1]) for row in step["tokens"]] for step in steps]

    steps_of_parts = [list(part.sequences) for part in parts]
    assert [a + b for a, b in zip(*map(kinds, steps_of_parts), strict=True)] == kinds(whole.sequences), (
        "the sources"
    )
    first, second = (
        {text[:4] for pack in rows_of(steps) for text in documents_of(pack)[:1]} for steps in steps_of_parts
    )
    assert not first & second


def test_a_streamed_data_set_is_packed(tmp_path, two_sources, monkeypatch):
    monkeypatch.setattr(module, "open_hub", lambda name: hub(tmp_path, 30))
    options = dict(steps=6, validation=2)
    data, resumed_data = (
        open_sources(("some/set:x", two_sources[1]), (0.5, 0.5), **options) for _ in range(2)
    )
    held_out = {documents_of(x)[0][0] for x in data.held_out}
    assert held_out == {"0", "L"}
    steps = list(data.sequences)
    assert any(len(documents_of(x)) == 3 for x in rows_of(steps))
    resumed = resumed_data.sequences
    next(resumed)
    position = json.loads(json.dumps(resumed.get_state()))
    remaining = open_sources(("some/set:x", two_sources[1]), (0.5, 0.5), **options).sequences
    remaining.set_state(position)
    for actual, expected in zip(remaining, steps[1:], strict=True):
        np.testing.assert_array_equal(actual["tokens"], expected["tokens"])


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        (["", " "], "there is no text in it|there are 0 tokens to train on"),
        (["abc"], f"there are 4 tokens to train on, which fill no sequence of --lengths {LENGTH}"),
        (
            ["x" * 90],
            f"0 tokens to hold out, every second document, which fill no sequence of --lengths {LENGTH}",
        ),
        (["x" * 90, "yy"], "3 tokens to hold out"),
    ],
)
def test_too_little_text_names_its_source(tmp_path, two_sources, documents, message):
    source = write_texts(tmp_path, "little", documents)
    with pytest.raises(UserError, match=message) as error:
        open_sources((two_sources[0], source), (0.5, 0.5))
    assert f"--data {source}" in str(error.value)


def test_a_process_without_documents_to_train_on_is_an_error(tmp_path):
    """One of four documents is held out, and a process of four would read only that one."""
    source = write_texts(tmp_path, "few", [letter * 30 for letter in "abcd"])
    for group in range(4):
        data = open_sources((source,), (1.0,), rows=Rows(np.array([group]), 4, group), validation=1)
        held_out = TOKENIZER.decode(data.held_out[0]["tokens"][:1])
        if held_out == Documents(Path(source), 0, 1)[group][0]:
            with pytest.raises(UserError, match="this process's share of the documents has none to train on"):
                next(data.sequences)
            break
    else:
        pytest.fail("no process has the document that is held out")
