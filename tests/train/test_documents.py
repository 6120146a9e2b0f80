"""Test files of texts as documents: pieces, order, and unusable files."""

import codecs
import json
import os
from types import SimpleNamespace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from kvjax.errors import UserError
from kvjax.train import documents as module
from kvjax.train.conversation import chat_check
from kvjax.train.documents import BLOCK_LINES, Documents


def read_all(path, piece=1 << 20, seed=0):
    documents = Documents(path, seed, piece)
    return [documents[i] for i in range(len(documents))]


def test_a_folder_may_hold_files_of_all_kinds(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "one.txt").write_text("a text")
    (tmp_path / "two.jsonl").write_text('{"text": "line 1", "id": 1}\r\n\n{"text": "line 2"}')
    pyarrow.parquet.write_table(
        pyarrow.table({"id": [1, 2, 3], "text": ["row 1", None, "row 3"]}),
        tmp_path / "three.parquet",
        row_group_size=2,
    )
    (tmp_path / "notes.md").write_text("not data")
    with pytest.warns(UserWarning, match="2 of 7 documents have no text"):
        texts = read_all(tmp_path)
    assert sorted(text for text in texts if text) == ["a text", "line 1", "line 2", "row 1", "row 3"]


def test_pieces_of_a_long_text_cover_it(tmp_path):
    text = "".join(np.random.default_rng(0).choice(list("abc é\n"), 500))
    (tmp_path / "long.txt").write_text(text, encoding="utf-8")
    pieces = read_all(tmp_path / "long.txt", piece=64)
    assert len(pieces) == -(-len(text.encode()) // 64)
    # a cut through é loses it
    assert sum(map(len, pieces)) >= len(text) - len(pieces)
    assert all(piece in text for piece in pieces)


def test_lines_are_read_once_each_in_a_seeded_order(tmp_path):
    lines = [f"line {i}" for i in range(2 * BLOCK_LINES + 5)]
    (tmp_path / "many.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    orders = [read_all(tmp_path / "many.jsonl", seed=seed) for seed in (0, 0, 1)]
    assert sorted(orders[0]) == sorted(lines)
    assert orders[0] == orders[1] != orders[2]
    assert orders[0] != lines


GOOD = b'{"text": "good"}'
LINES = [GOOD] * 1500
SURROGATE = rb'{"text": "bad \ud83d half"}'


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.csv", b"a,b", "expected a .txt, .jsonl, .parquet file"),
        ("x.parquet", b"not parquet", "is not a complete parquet file"),
        ("x.txt", b"", "there is no text in it"),
        ("x.txt", bytes(range(128, 256)) * 4, "is not UTF-8 text: byte 0x80 at offset 0"),
        (
            "x.txt",
            b"a" * 99 + "für".encode("latin1"),
            "is not UTF-8 text: byte 0xfc at offset 100; if it is Latin-1",
        ),
        ("x.txt", "für".encode("utf-16"), "is not UTF-8 text but UTF-16"),
        ("x.txt", b"ab\0c", "is not text, byte 2 is 0"),
        ("x.txt", "fü".encode()[:-1], "byte 0xc3 at offset 1"),
        (
            "x.jsonl",
            b"\n".join([*LINES, b'{"text": "cut off', GOOD, GOOD]),
            "line 1501: expected JSON, got .*cut off",
        ),
        ("x.jsonl", b"\n".join([*LINES, SURROGATE]), "line 1501: has half of a surrogate pair"),
        (
            "x.jsonl",
            b"\n".join([GOOD, b"1", *[b"2"] * 5]),
            "line 2: expected a record such as .*; 5 more lines are",
        ),
        ("x.jsonl", b'{"words": "no"}\n', "line 1: expected a record such as .*words"),
        ("x.jsonl", b'{"text": 3}\n', "line 1: expected a record"),
        ("x.jsonl", b'{"text": "f\xfcr"}\n', "line 1: is not UTF-8 text: byte 0xfc at offset 11"),
        ("x.jsonl", b"[" * 100_000, "line 1: expected JSON"),
        ("x.jsonl", b'{"text": "a", "n": ' + b"9" * 10_000 + b"}", "line 1: expected JSON"),
        ("x.jsonl", '{"text": "a"}\n'.encode("utf-16"), "x.jsonl: is not UTF-8 text but UTF-16"),
        ("x.jsonl", '\ufeff{"text": "a"}\n'.encode("utf-16-be"), "x.jsonl: is not UTF-8 text but UTF-16"),
        ("x.jsonl", b'{"text": null}\n\n', "there is no text in it"),
    ],
)
def test_a_wrong_file_is_refused_with_its_name_and_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        Documents(tmp_path / name, 0, 64)
    assert name in str(error.value)


def test_documents_without_text_are_counted_and_skipped(tmp_path):
    lines = b'{"text": "one"}\r', b"", b'{"text": null}', b'{"text": " "}', b'{"messages": []}'
    (tmp_path / "a.jsonl").write_bytes(codecs.BOM_UTF8 + b"\n".join(lines))
    with pytest.warns(UserWarning, match="4 of 5 documents have no text and are skipped"):
        assert sorted(read_all(tmp_path / "a.jsonl")) == ["", "", "", "", "one"]


def test_a_line_that_is_too_long_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LONGEST_LINE", 1 << 20)
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "' + b"a" * (1 << 20))
    with pytest.raises(UserError, match="line 1 is longer than 1 MiB"):
        Documents(tmp_path / "a.jsonl", 0, 64)


def test_a_pipe_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(UserError, match="is a pipe or a device"):
        Documents(tmp_path / "a.jsonl", 0, 64)


def test_a_file_that_changes_later_is_an_error_of_one_line(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(GOOD + b"\n" + GOOD)
    documents = Documents(file, 0, 64)
    for content, message in (
        (GOOD, "has become shorter"),
        (b"x" * 40 + b"\n", "has changed since"),
        (None, "cannot be read"),
    ):
        file.unlink() if content is None else file.write_bytes(content)
        with pytest.raises(UserError, match=message):
            documents[0]


@pytest.mark.parametrize("column", [[1, 2], [["a"], ["b"]], [b"\xff", b"a"]])
def test_a_parquet_column_of_another_kind_is_refused(tmp_path, column):
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "x.parquet")
    with pytest.raises(UserError, match="row 1 of row group 0: expected a record such as"):
        Documents(tmp_path / "x.parquet", 0, 100)


def test_a_parquet_file_of_texts_and_chats_has_the_documents_of_a_jsonl_file(tmp_path):
    chat = [{"role": "user", "content": "b"}]
    records = [{"text": "a", "messages": None}, {"text": None, "messages": chat}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "x.parquet")
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    documents = read_all(tmp_path / "x.parquet")
    assert sorted(documents) == sorted(["a", json.dumps(chat)])
    assert documents == read_all(tmp_path / "x.jsonl")


def test_a_damaged_page_of_a_parquet_file_is_found_when_opened(tmp_path):
    file = tmp_path / "x.parquet"
    pyarrow.parquet.write_table(
        pyarrow.table({"text": [str(i) * 99 for i in range(999)]}), file, row_group_size=99
    )
    data = bytearray(file.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 200] = bytes(200)
    file.write_bytes(data)
    with pytest.raises(UserError, match=r"x\.parquet: "):
        Documents(file, 0, 100)


def test_a_parquet_file_without_text_names_its_columns(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"id": [1], "body": ["x"]}), tmp_path / "x.parquet")
    with pytest.raises(UserError, match="no column `text`, it has id, body"):
        Documents(tmp_path / "x.parquet", 0, 100)


def test_a_folder_without_data_is_refused(tmp_path):
    with pytest.raises(UserError, match="has no .txt, .jsonl, .parquet file"):
        Documents(tmp_path, 0, 100)


def test_a_chat_that_the_template_refuses_is_found_when_opened(tmp_path):
    """The error comes before the update that would read it."""
    tokenizer = SimpleNamespace(
        chat_template="{% if messages[0].role != 'user' %}{{ raise_exception('no') }}{% endif %}"
    )
    file = tmp_path / "a.jsonl"
    chats = [[{"role": role, "content": "x"}] for role in ("user", "system")]
    file.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    with pytest.raises(UserError, match=rf"^--data {file}: line 2: the tokenizer's .* \(of system\): no"):
        Documents(file, 0, 64, chat_check(tokenizer))


def test_the_order_of_documents_does_not_change(tmp_path):
    """A checkpoint depends on a file's order. Lines without text have a place, too."""
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n\n{"text": "b"}\n{"text": " "}\n{"text": "c"}\n')
    with pytest.warns(UserWarning, match="2 of 5 documents"):
        assert read_all(tmp_path / "a.jsonl") == ["a", "c", "", "b", ""]
