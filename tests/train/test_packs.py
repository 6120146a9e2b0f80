"""Test packs: documents stay separate, a cut one is not continued, sources are mixed by weights, reading resumes at any
position, and some documents are held out."""

import json
from pathlib import Path

import numpy as np
import pytest

from kvjax.errors import UserError
from kvjax.train import readers as module
from kvjax.train.batches import Rows
from kvjax.train.data import Wanted
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
ALL = Rows(0, 4, 4)
LENGTH = 24
"""Number of tokens of a sequence: some five short documents, or less than a long one."""


def put(tmp_path, name, documents):
    (tmp_path / name).mkdir(exist_ok=True)
    return texts(tmp_path / name, documents)


@pytest.fixture
def both(tmp_path):
    return put(tmp_path, "short", SHORT), put(tmp_path, "long", LONG)


def opened(sources, weights, steps=10, rows=ALL, validation=4, seed=0, lengths=(LENGTH,)):
    wanted = Wanted(
        sources[0],
        rows=rows,
        step_lengths=np.resize(lengths, steps),
        lengths=lengths,
        validation=np.resize(lengths, validation),
        seed=seed,
        tokenizer=TOKENIZER,
    )
    return open_packs(wanted, sources, weights, ENCODE, natural)


def documents_of(pack):
    """Return the texts of a pack's documents, of which the last may be cut."""
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


def test_packs_are_whole_documents_and_a_cut_last_one(both):
    """They are in the reader's order; the rest of a cut document is dropped."""
    documents = (Documents(Path(both[0]), 0, 16 * LENGTH)[i] for i in range(len(SHORT)))
    own = {both[0]: lambda: FileReader(Documents(Path(both[0]), 0, 16 * LENGTH), 0, 1)}
    own = PackedDocuments(own, ENCODE, Rows(0, 1, 1), np.full(8, LENGTH), np.zeros(8, int), natural)
    for pack in rows_of(own):
        whole, missing = [], LENGTH
        while missing > 0:
            whole.append(next(documents) + "<|im_end|>")
            missing -= len(ENCODE(whole[-1]))
        found = documents_of(pack)
        assert found[:-1] == whole[:-1]
        assert whole[-1].startswith(found[-1])
        assert len(pack["tokens"]) == LENGTH


def test_no_document_crosses_a_border_and_its_first_token_is_not_learned(both):
    for pack in rows_of(opened(both, (1.0, 1.0)).sequences):
        ends = np.flatnonzero(pack["tokens"] == END)
        inner = ends[ends < LENGTH - 1]
        np.testing.assert_array_equal(inner + 1, np.flatnonzero(np.diff(pack["document"])) + 1)
        np.testing.assert_array_equal(np.flatnonzero(~pack["labelled"]), [0, *(inner + 1)])


def test_a_document_longer_than_a_sequence_fills_one_alone(both):
    (found,) = {len(set(x["document"])) for x in rows_of(opened(both[1:], (1.0,)).sequences)}
    assert found == 1
    texts_ = [documents_of(x)[0] for x in rows_of(opened(both[1:], (1.0,), steps=5).sequences)]
    assert len(set(texts_)) == len(texts_) == 20, "the rest of each is dropped, the next one follows"
    assert all(any(whole.startswith(text) for whole in LONG) for text in texts_)


@pytest.mark.parametrize("weights", [(0.4, 0.6), (1.0, 3.0), (0.37, 0.63)])
@pytest.mark.parametrize("steps", [1, 7, 250])
def test_sources_have_their_shares_of_the_tokens_within_a_sequence(weights, steps):
    lengths = np.random.default_rng(steps).choice([16, 64, 256], 8 * steps)
    drawn = draw_sources(lengths, weights, seed=3)
    for length in np.unique(lengths):
        own = drawn[lengths == length]
        for source, weight in enumerate(weights):
            assert abs(np.sum(own == source) - len(own) * weight / sum(weights)) < 1
    assert not np.array_equal(drawn, draw_sources(lengths, weights, seed=4)) or steps == 1
    np.testing.assert_array_equal(drawn, draw_sources(lengths, weights, seed=3))


def test_a_pack_is_of_one_source_and_packs_are_mixed_by_weights(both):
    kinds = [
        {text[0] for text in documents_of(x)} for x in rows_of(opened(both, (0.4, 0.6), steps=25).sequences)
    ]
    assert all(len(kind) == 1 for kind in kinds)
    found = [kind.pop() for kind in kinds]
    assert (found.count("s"), found.count("L")) == (40, 60)
    assert len(set(found[:10])) == 2, "drawn, not sorted"


@pytest.mark.parametrize("stop", range(8))
def test_reading_resumes_exactly_from_a_json_position(both, stop):
    told = dict(steps=7, lengths=(16, LENGTH))
    whole, running = (
        list(opened(both, (0.4, 0.6), **told).sequences),
        opened(both, (0.4, 0.6), **told).sequences,
    )
    for _ in range(stop):
        next(running)
    resumed = opened(both, (0.4, 0.6), **told).sequences
    resumed.set_state(json.loads(json.dumps(running.get_state())))
    resumed = list(resumed)
    assert len(resumed) == 7 - stop
    for mine, theirs in zip(resumed, whole[stop:], strict=True):
        for name, x in theirs.items():
            np.testing.assert_array_equal(mine[name], x)


def test_held_out_packs_are_from_both_sources_and_never_trained_on(both):
    data = opened(both, (0.5, 0.5), steps=60, validation=6)
    held = [text for pack in data.held_out for text in documents_of(pack)]
    assert [len(x) for x in data.held_out_tokens] == [LENGTH] * 6
    assert {documents_of(pack)[0][0] for pack in data.held_out} == {"s", "L"}
    for pack in data.held_out:
        assert np.flatnonzero(pack["labelled"]).tolist() == [
            i for i in range(1, LENGTH) if pack["document"][i] == pack["document"][i - 1]
        ]
    name = {text[:4] for text in held if len(text) >= 4}
    trained = {text[:4] for pack in rows_of(data.sequences) for text in documents_of(pack) if len(text) >= 4}
    assert len(name) >= 6
    assert not name & trained
    assert len(name | trained) >= 90, "all but those of which a pack has a few letters"


def test_documents_of_a_held_out_pack_that_is_never_full_are_trained_on(tmp_path):
    """Every second of 20 documents would be held out, and three of them fill a pack: the tenth is left."""
    source = put(tmp_path, "twenty", [letter * 7 for letter in "abcdefghijklmnopqrst"])
    data = opened((source,), (1.0,), steps=20, validation=8)
    held = {text[0] for pack in data.held_out for text in documents_of(pack)}
    trained = {text[0] for pack in rows_of(data.sequences) for text in documents_of(pack)}
    assert (len(data.held_out), len(held), len(trained)) == (3, 9, 11)
    assert not held & trained


def test_a_document_held_out_in_one_source_is_trained_on_in_none(tmp_path):
    first, second = (put(tmp_path, name, LONG[::step]) for name, step in (("forth", 1), ("back", -1)))
    data = opened((first, second), (0.5, 0.5), steps=30, validation=8)
    held = {documents_of(pack)[0][:4] for pack in data.held_out}
    assert len(held) >= 5
    assert not held & {documents_of(pack)[0][:4] for pack in rows_of(data.sequences)}


def test_processes_read_disjoint_documents_and_hold_out_the_same(both):
    whole = opened(both, (0.4, 0.6))
    parts = [opened(both, (0.4, 0.6), rows=Rows(start, start + 2, 4)) for start in (0, 2)]
    for part in parts:
        for mine, theirs in zip(part.held_out, whole.held_out, strict=True):
            np.testing.assert_array_equal(mine["tokens"], theirs["tokens"])

    def kinds(steps):
        return [[TOKENIZER.decode(row[:1]) for row in step["tokens"]] for step in steps]

    apart = [list(part.sequences) for part in parts]
    assert [a + b for a, b in zip(*map(kinds, apart), strict=True)] == kinds(whole.sequences), "the sources"
    first, second = (
        {text[:4] for pack in rows_of(steps) for text in documents_of(pack)[:1]} for steps in apart
    )
    assert not first & second


def test_a_streamed_data_set_is_packed(tmp_path, both, monkeypatch):
    monkeypatch.setattr(module, "open_hub", lambda name: hub(tmp_path, 30))
    told = dict(steps=6, validation=2)
    data, again = (opened(("some/set:x", both[1]), (0.5, 0.5), **told) for _ in range(2))
    held = {documents_of(x)[0][0] for x in data.held_out}
    assert held == {"0", "L"}
    whole = list(data.sequences)
    assert any(len(documents_of(x)) == 3 for x in rows_of(whole))
    resumed = again.sequences
    next(resumed)
    position = json.loads(json.dumps(resumed.get_state()))
    rest = opened(("some/set:x", both[1]), (0.5, 0.5), **told).sequences
    rest.set_state(position)
    for mine, theirs in zip(rest, whole[1:], strict=True):
        np.testing.assert_array_equal(mine["tokens"], theirs["tokens"])


@pytest.mark.parametrize(
    ("documents", "said"),
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
def test_too_little_text_names_its_source(tmp_path, both, documents, said):
    source = put(tmp_path, "little", documents)
    with pytest.raises(UserError, match=said) as error:
        opened((both[0], source), (0.5, 0.5))
    assert f"--data {source}" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_process_without_documents_to_train_on_is_an_error(tmp_path):
    """One of four documents is held out, and a process of four would read only that one."""
    source = put(tmp_path, "few", [letter * 30 for letter in "abcd"])
    for group in range(4):
        data = opened((source,), (1.0,), rows=Rows(group, group + 1, 4), validation=1)
        held = TOKENIZER.decode(data.held_out[0]["tokens"][:1])
        if held == Documents(Path(source), 0, 1)[group][0]:
            with pytest.raises(UserError, match="this process's share of the documents has none to train on"):
                next(data.sequences)
            break
    else:
        pytest.fail("no process has the document that is held out")
