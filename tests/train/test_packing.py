"""Test documents one after another in sequences: every token once and in order, from any position, and the held-out
ones."""

import json
from pathlib import Path

import numpy as np
import pytest

from kvjax.errors import UserError
from kvjax.train.batches import Rows
from kvjax.train.conversation import Conversation
from kvjax.train.data import DataRequest
from kvjax.train.documents import Documents, digest
from kvjax.train.packing import PackedSequences, StreamEncoder, hold_out_of_stream, open_stream
from kvjax.train.readers import FileReader
from tests.tasks.model_tokenizers import byte_tokenizer
from tests.train.texts import texts

TEXTS = [f"{i:02}" + "abcdefghij"[: 1 + i % 10] * (1 + i % 3) for i in range(40)]


def readers(path, group=0, groups=1):
    return lambda: FileReader(Documents(path, 0, 10_000), group, groups)


@pytest.fixture
def path(tmp_path):
    return Path(texts(tmp_path, TEXTS))


def in_order(path, encode, held_out=()):
    """Return a pass over the documents as one stream."""
    documents = Documents(path, 0, 10_000)
    tokens = [encode(documents[i]) for i in range(len(documents)) if documents[i] not in held_out]
    return np.concatenate(tokens)


def test_sequences_are_consecutive_parts_of_the_stream(path):
    encode = StreamEncoder(byte_tokenizer())
    stream = in_order(path, encode)
    lengths = np.array([16, 16, 8, 16])
    steps = list(PackedSequences(readers(path), encode, 2, lengths, "x"))
    assert [x.shape for x in steps] == [(2, length) for length in lengths]
    actual = np.concatenate([x.reshape(-1) for x in steps])
    np.testing.assert_array_equal(actual, stream[: len(actual)])
    end = byte_tokenizer().eos_token_id
    assert np.count_nonzero(stream == end) == len(TEXTS), "each document ends"


def test_a_second_pass_follows_the_first(path):
    encode = StreamEncoder(byte_tokenizer())
    stream = in_order(path, encode)
    size = len(stream) + 5
    (sequence,) = PackedSequences(readers(path), encode, 1, np.array([size]), "x")
    np.testing.assert_array_equal(sequence[0], np.concatenate([stream, stream[:5]]))


@pytest.mark.parametrize("stop", [0, 1, 3, 6])
def test_reading_resumes_exactly_from_a_json_position(path, stop):
    encode = StreamEncoder(byte_tokenizer())
    dataset = PackedSequences(readers(path), encode, 2, np.full(8, 13), "x")
    steps, running = list(dataset), iter(dataset)
    for _ in range(stop):
        next(running)
    resumed = iter(dataset)
    resumed.set_state(json.loads(json.dumps(running.get_state())))
    for actual, expected in zip(resumed, steps[stop:], strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_held_out_documents_are_never_trained_on(path):
    rows = Rows(np.arange(2), 2, 0)
    options = {"lengths": (16,), "step_lengths": np.full(30, 16), "validation": np.full(3, 16), "seed": 0}
    data = open_stream(DataRequest(str(path), rows=rows, **options, tokenizer=byte_tokenizer()))
    assert [len(x) for x in data.held_out] == [16] * 3
    decode = byte_tokenizer().decode
    held_out = decode(np.concatenate(data.held_out)).split("<|im_end|>")
    trained = decode(np.concatenate([x.reshape(-1) for x in data.sequences])).split("<|im_end|>")
    assert len(set(trained)) > 20
    assert not {x for x in held_out[:-1] if x} & set(trained)
    documents = Documents(path, 0, 16 * 16)
    assert held_out[:2] == [documents[1], documents[3]], "every second one"


def test_processes_read_disjoint_documents(path):
    encode = StreamEncoder(byte_tokenizer())
    decoded = [
        byte_tokenizer().decode(
            next(iter(PackedSequences(readers(path, g, 2), encode, 1, np.array([90]), "x")))[0]
        )
        for g in range(2)
    ]
    documents = [set(x.split("<|im_end|>")[:-1]) for x in decoded]
    assert documents[0]
    assert not documents[0] & documents[1]


@pytest.mark.parametrize(
    ("documents", "purpose"), [(TEXTS, "to train on,"), (["x" * 900], "to hold out, every second document,")]
)
def test_too_little_text_is_an_error_of_one_line(tmp_path, documents, purpose):
    reader = readers(Path(texts(tmp_path, documents)))()
    with pytest.raises(
        UserError, match=rf"there are \d+ tokens {purpose} which fill no sequence of --lengths 800"
    ):
        hold_out_of_stream(reader, StreamEncoder(byte_tokenizer()), [800], "texts.jsonl")


def test_a_process_without_documents_to_train_on_ends_with_an_error(tmp_path):
    path = Path(texts(tmp_path, TEXTS[:2]))
    held_out = frozenset({digest(Documents(path, 0, 10_000)[1])})
    stream = PackedSequences(
        readers(path, 1, 2), StreamEncoder(byte_tokenizer()), 1, np.array([8]), "x", held_out
    )
    with pytest.raises(
        UserError, match="--data x: this process's share of the documents has none to train on"
    ):
        next(iter(stream))


RECORD = {
    "problem": "1 + 1?",
    "expected_answer": "2",
    "messages": [
        {"role": "user", "content": "1 + 1?", "reasoning_content": None},
        {"role": "assistant", "content": "It is \\boxed{2}.", "reasoning_content": "one more than one"},
    ],
    "tools": [],
}
"""A row in the form of Nemotron-Math-v2's data/medium.jsonl."""


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_chats_are_read_as_the_template_writes_them(tmp_path, kind):
    file = tmp_path / f"medium.{kind}"
    if kind == "jsonl":
        file.write_text(json.dumps(RECORD) + "\n")
    else:
        pandas = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pandas.Table.from_pylist([RECORD]), file)
    document = Documents(file, 0, 1000)[0]
    assert isinstance(document, Conversation)
    tokenizer = byte_tokenizer()
    assert tokenizer.decode(StreamEncoder(tokenizer)(document)) == (
        "<|im_start|>user\n1 + 1?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\none more than one\n</think>\n\nIt is \\boxed{2}.<|im_end|>\n"
    )


def test_a_template_with_reasoning_content_gets_the_reasoning():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}[{{ m.reasoning_content }}|{{ m.content }}]{% endfor %}"
    chat = Conversation.of([{"role": "assistant", "content": "b", "reasoning_content": "a"}])
    assert tokenizer.decode(chat.tokens(tokenizer)) == "[a|b]"


def test_unreadable_chats_are_errors_of_one_line(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="has chats, but the model's tokenizer has no chat template"):
        Conversation.of(RECORD["messages"]).tokens(tokenizer)
    file = tmp_path / "a.jsonl"
    chats = [], [{"content": "x"}], [{"role": "user", "content": 1}], "x"
    for wrong in (*({"messages": chat} for chat in chats), {"title": "x"}):
        file.write_text(json.dumps(wrong) + "\n")
        with pytest.raises(UserError, match=f"--data {file}: "):
            Documents(file, 0, 1000)
