"""Where documents come from."""

import datasets
import huggingface_hub
import pytest

from kvjax.errors import Doubt, UserError
from kvjax.train.documents import Documents
from kvjax.train.readers import FileReader, HubReader, hub_documents, local_path, open_hub
from tests.train.texts import hub


def test_an_unknown_source_is_taken_for_a_hub_data_set():
    with pytest.raises(UserError, match="--data no/such-set: no such file or folder, and as a hub data set"):
        open_hub("no/such-set")


def test_a_hub_that_cannot_be_reached_is_asked_once(monkeypatch):
    """Not by the client that tries again for half a minute and prints so."""

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


def test_readers_tell_when_a_pass_is_over(tmp_path):
    documents = Documents(tmp_path_of(tmp_path, 3), 0, 100)
    reader = FileReader(documents, 0, 1)
    pass_ = [reader.next() for _ in range(4)]
    assert pass_[3] is None
    assert pass_[:3] == [reader.next() for _ in range(3)]
    split = HubReader(hub(tmp_path, 4), 1, 2)
    assert [split.next() for _ in range(3)] == ["01" * 4, "03" * 4, None]


def tmp_path_of(folder, count):
    for i in range(count):
        (folder / f"{i}.txt").write_text(f"text {i}")
    return folder


def test_bad_rows_of_a_hub_data_set_are_skipped_and_counted():
    rows = [{"text": "a"}, {"text": "\ud83d"}, {"text": None}, {"text": 3}, {"text": "b"}]
    with pytest.warns(
        Doubt, match="^--data my/set: 1 of 2 rows are bad and skipped; the last: half of a sur"
    ):
        assert [text for text, _ in hub_documents(iter(rows), "my/set")] == ["a", "", "", "", "b"]


@pytest.mark.parametrize(("good", "bad", "ends"), [(1, 100, False), (1, 101, True), (11_000, 110, False)])
@pytest.mark.filterwarnings("ignore::kvjax.errors.Doubt")
def test_a_hub_data_set_may_have_so_many_bad_rows(good, bad, ends):
    rows = hub_documents(iter([{"text": "a"}] * good + [{"text": 3}] * bad), "my/set")
    if not ends:
        assert sum(text == "" for text, _ in rows) == bad
        return
    with pytest.raises(
        UserError, match="^--data my/set: 101 of 102 rows are bad, which is too many; the last"
    ):
        list(rows)


def test_a_hub_data_set_that_breaks_off_is_one_line():
    def rows():
        yield {"text": "a"}
        raise OSError("JSON parse error:\n\x1b[31m")

    with pytest.raises(UserError, match=r"^--data my/set: row 1 of this pass cannot be read \(OSError: JSON"):
        list(hub_documents(rows(), "my/set"))


def test_a_name_that_no_file_can_have_is_one_line():
    with pytest.raises(UserError, match="File name too long"):
        local_path("x" * 5000)
    assert local_path("~nobody-of-that-name/x") is None
