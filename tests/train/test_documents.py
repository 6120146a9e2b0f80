"""Files of texts as documents: pieces, order, and files that are none."""

import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from kvjax.errors import UserError
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
