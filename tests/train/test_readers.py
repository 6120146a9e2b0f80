"""Test readers of documents from local files and hub datasets."""

import datasets
import huggingface_hub
import pytest

from kvjax.errors import UserError
from kvjax.train.documents import Documents
from kvjax.train.readers import FileReader, HubReader, Records, local_path, open_hub
from tests.train.texts import hub


def test_the_error_for_an_unknown_source_mentions_the_hub():
    with pytest.raises(UserError, match="--data no/such-set: no such file or folder, and as a hub dataset"):
        open_hub("no/such-set")


def test_an_unreachable_hub_is_asked_once(monkeypatch):
    """The client that retries for half a minute, and prints messages, is not used."""

    def unreachable(*_, timeout):
        assert timeout <= 10
        raise ConnectionError("no network")

    monkeypatch.setattr(huggingface_hub, "dataset_info", unreachable)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("it tried on"))
    with pytest.raises(UserError, match=r"it cannot be had \(ConnectionError: no network\)$"):
        open_hub("no/such-set")


@pytest.mark.parametrize("path", ["./none", "/no/where", "none.jsonl", "a folder", "a/b/c", "~/none"])
def test_a_path_is_not_looked_for_on_the_hub(path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "dataset_info", lambda *_, **__: pytest.fail("it was"))
    with pytest.raises(UserError, match=f"^--data {path}: no such file or folder$"):
        open_hub(path)


def test_next_returns_none_at_the_end_of_a_pass(tmp_path):
    documents = Documents(write_texts(tmp_path, 3), 0, 100)
    reader = FileReader(documents, 0, 1)
    pass_ = [reader.next() for _ in range(4)]
    assert pass_[3] is None
    assert pass_[:3] == [reader.next() for _ in range(3)]
    split = HubReader(hub(tmp_path, 4), 1, 2, "a/set")
    assert [split.next() for _ in range(3)] == ["01" * 4, "03" * 4, None]


def write_texts(folder, count):
    for i in range(count):
        (folder / f"{i}.txt").write_text(f"text {i}")
    return folder


def test_bad_records_are_skipped_up_to_a_share_of_each_pass():
    bad, good = {"text": "\ud83d"}, {"text": "a"}
    message = "^--data my/set: records that are not documents are skipped"
    with pytest.warns(UserWarning, match=message):
        texts = [text for text, _ in Records(iter([good, bad, {"text": None}, good]), "my/set")]
    assert texts == ["a", "", "", "a"]
    many = Records(iter([good] * 5 + [bad] * 11), "my/set")
    with (
        pytest.warns(UserWarning, match=message),
        pytest.raises(UserError, match="11 of its first 16 records are not"),
    ):
        list(many)


def test_a_broken_stream_is_an_error_of_one_line():
    def records():
        yield {"text": "a"}
        raise OSError("JSON parse error:\n\x1b[31m")

    with pytest.raises(
        UserError, match=r"^--data my/set: record 2 of this pass cannot be read \(OSError: JSON"
    ):
        list(Records(records(), "my/set"))


def test_a_name_that_no_file_can_have_is_an_error_of_one_line():
    with pytest.raises(UserError, match="File name too long"):
        local_path("x" * 5000)
    assert local_path("~nobody-of-that-name/x") is None
