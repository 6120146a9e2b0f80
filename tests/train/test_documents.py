"""Files of texts as documents: pieces, order, and files that are none."""

import json
import os

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from kvjax.errors import Doubt, UserError
from kvjax.train import documents
from kvjax.train.documents import BLOCK_LINES, Documents


def everything(path, piece=1 << 20, seed=0):
    documents = Documents(path, seed, piece)
    return [documents[i] for i in range(len(documents))]


def test_a_folder_of_all_kinds(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "one.txt").write_text("a text")
    (tmp_path / "two.jsonl").write_text('{"text": "line 1", "id": 1}\r\n\n{"text": "line 2"}')
    pyarrow.parquet.write_table(
        pyarrow.table({"id": [1, 2, 3], "text": ["row 1", None, "row 3"]}),
        tmp_path / "three.parquet",
        row_group_size=2,
    )
    (tmp_path / "notes.md").write_text("not data")
    with pytest.warns(Doubt, match="2 of its documents have no text and are skipped$"):
        found = everything(tmp_path)
    assert sorted(text for text in found if text) == ["a text", "line 1", "line 2", "row 1", "row 3"]


def test_a_long_text_is_cut_into_pieces_that_miss_nothing(tmp_path):
    text = "".join(np.random.default_rng(0).choice(list("abc é\n"), 500))
    (tmp_path / "long.txt").write_text(text, encoding="utf-8")
    pieces = everything(tmp_path / "long.txt", piece=64)
    assert len(pieces) == -(-len(text.encode()) // 64)
    # a cut through é loses it
    assert sum(map(len, pieces)) >= len(text) - len(pieces)
    assert all(piece in text for piece in pieces)


def test_many_lines_come_once_each_in_an_order_of_the_seed(tmp_path):
    lines = [f"line {i}" for i in range(2 * BLOCK_LINES + 5)]
    (tmp_path / "many.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    found = [everything(tmp_path / "many.jsonl", seed=seed) for seed in (0, 0, 1)]
    assert sorted(found[0]) == sorted(lines)
    assert found[0] == found[1] != found[2]
    assert found[0] != lines


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.csv", b"a,b", "expected a .txt, .jsonl, .parquet file"),
        ("x.jsonl", b'{"words": "no"}\n', 'expected lines such as .*found {"words'),
        ("x.jsonl", b"not json\n", "expected lines such as .*found not json"),
        ("x.jsonl", b'{"text": 3}\n', "expected lines such as"),
        ("x.parquet", b"not parquet", "is no parquet file"),
        ("x.txt", b"", "there is no text in it"),
        ("x.txt", bytes(range(128, 256)) * 4, "is not UTF-8 text"),
    ],
)
def test_a_wrong_file_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        everything(tmp_path / name)
    assert name in str(error.value)


def test_a_parquet_file_without_text_names_its_columns(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"id": [1], "body": ["x"]}), tmp_path / "x.parquet")
    with pytest.raises(UserError, match="no column `text`, it has id, body"):
        Documents(tmp_path / "x.parquet", 0, 100)


def test_a_folder_without_data_is_refused(tmp_path):
    with pytest.raises(UserError, match="has no .txt, .jsonl, .parquet file"):
        Documents(tmp_path, 0, 100)


GOOD = b'{"text": "good"}\n'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (rb'{"text": "cut off', r"found {\"text\": \"cut off \(Unterminated string"),
        (rb'{"text": "bad \ud83d half"}', "half of a surrogate pair at character 4"),
        (b'{"text": "bad \xed\xa0\xbd half"}', "is not UTF-8 text: byte 0xed at offset 14"),
        ('{"text": "für"}'.encode("latin1"), "byte 0xfc at offset 11; if it is Latin-1"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"text": "x", "n": ' + b"9" * 5000 + b"}", "Exceeds the limit"),
        (b'{"body": "x"}', "neither `text` nor `messages`, but 'body'"),
        (b'[{"text": "x"}]', "no JSON object"),
        (b'{"text": ["x"]}', "text must be a string, got"),
        (b'{"messages": [{"role": "user", "content": 3}]}', "messages must be a chat"),
        (rb'{"messages": [{"role": "user", "content": "\udead"}]}', "half of a surrogate pair"),
        (b'{"text": "a\x1b[31m"}', r"found {\"text\": \"a\\x1b\[31m\"} \(Invalid control character"),
    ],
)
def test_a_bad_line_is_named_before_the_first_document(tmp_path, line, message):
    file = tmp_path / "x.jsonl"
    file.write_bytes(GOOD * 2000 + line + b"\n" + GOOD + b"{}\n" + GOOD)
    with pytest.raises(UserError, match=f"^--data {file}: line 2001: .*{message}.*; 2 documents are bad$"):
        Documents(file, 0, 100)


def test_lines_without_text_are_counted_and_change_no_position(tmp_path):
    """A run that is resumed finds each document at its place."""
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n\n{"text": "b"}\n{"text": " "}\n{"text": "c"}\n')
    (tmp_path / "b.jsonl").write_bytes(
        b'\xef\xbb\xbf{"text": "a"}\r\n{"text": null}\r\n{"text": "b"}\r\n{"messages": null}\r\n{"text": "c"}'
    )
    for name in "ab":
        with pytest.warns(Doubt, match=f"{name}.jsonl: 2 of its documents have no text and are skipped$"):
            assert everything(tmp_path / f"{name}.jsonl") == ["a", "b", "c", "", ""]


def test_a_line_without_an_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "LONGEST_LINE", 1 << 20)
    (tmp_path / "x.jsonl").write_bytes(GOOD + b"x" * (3 << 20))
    with pytest.raises(UserError, match="x.jsonl: line 2: is longer than 1 MiB$"):
        Documents(tmp_path / "x.jsonl", 0, 100)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "a b für".encode("latin1"),
            "is not UTF-8 text: byte 0xfc at offset 5; if it is Latin-1, convert it",
        ),
        (b"x" * (3 << 20) + b"\xe4", "byte 0xe4 at offset 3145728"),
        ("für".encode("utf-16"), "is not UTF-8 text but UTF-16"),
        (b"a\0b", "is binary, not text: it has zero bytes"),
        (b" \n", "there is no text in it"),
    ],
)
def test_a_text_file_that_is_no_utf_8_is_refused(tmp_path, content, message):
    (tmp_path / "x.txt").write_bytes(content)
    with pytest.raises(UserError, match=f"x.txt: .*{message}"):
        Documents(tmp_path / "x.txt", 0, 100)


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "x.txt").write_text("für", encoding="utf-8-sig")
    assert everything(tmp_path / "x.txt", piece=100) == ["für"]


def test_a_pipe_and_a_device_are_refused_before_they_are_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "zero.txt").symlink_to("/dev/zero")
    for name in ("pipe.jsonl", "zero.txt"):
        with pytest.raises(UserError, match=f"{name}: is a pipe or a device, expected a file"):
            Documents(tmp_path / name, 0, 100)


NOT_UTF8 = pyarrow.Array.from_buffers(pyarrow.string(), 2, pyarrow.array([b"a", b"\xff"]).buffers())


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"text": [1, 2]}, "its column `text` is of int64, expected strings"),
        ({"text": [["a"]]}, "its column `text` is of list"),
        ({"messages": ["a"]}, "its column `messages` is of string, expected chats"),
        ({"text": pyarrow.array([], pyarrow.string())}, "there is no text in it"),
        ({"text": pyarrow.nulls(2)}, "there is no text in it"),
        ({"text": NOT_UTF8}, "row group 0 cannot be read .*0xff"),
        (
            {"messages": [[{"role": "user", "content": "a"}], [{"role": None, "content": "a"}]]},
            "row 1 of row group 0: messages must be a chat",
        ),
    ],
)
def test_a_parquet_file_of_something_else_is_refused(tmp_path, columns, message):
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "x.parquet")
    with pytest.raises(UserError, match=f"x.parquet: {message}"):
        Documents(tmp_path / "x.parquet", 0, 100)


def test_a_broken_page_is_named_with_its_row_group(tmp_path):
    table = pyarrow.table({"text": [f"{i} word " * 40 for i in range(600)]})
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet", row_group_size=300)
    content = bytearray((tmp_path / "x.parquet").read_bytes())
    start = pyarrow.parquet.read_metadata(tmp_path / "x.parquet").row_group(1).column(0).data_page_offset
    content[start : start + 40] = b"\xff" * 40
    (tmp_path / "x.parquet").write_bytes(content)
    with pytest.raises(UserError, match="x.parquet: row group 1 cannot be read"):
        Documents(tmp_path / "x.parquet", 0, 100)
