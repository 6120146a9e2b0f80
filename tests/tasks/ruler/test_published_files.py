"""Test where rows of RULER's own data are found."""

from pathlib import Path

import datasets
import pytest

from kvjax.errors import UserError
from kvjax.tasks.registry import open_task
from kvjax.tasks.ruler import published_examples
from kvjax.tasks.splits import Split
from tests.tasks.document_inputs import inputs
from tests.tasks.ruler.rows import HUB, hub_example, write_rows


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_the_hubs_form_is_read_from_one_file_per_task(kind, tmp_path):
    row = {name: value for name, value in HUB.items() if name not in ("task", "max_new_tokens")}
    write_rows(tmp_path, row, file=f"niah_multivalue.{kind}")
    assert published_examples(tmp_path, "niah_multivalue", 99) == [hub_example(reserved=128)]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_the_hubs_form_is_read_from_files_with_all_tasks(kind, tmp_path):
    others = [HUB | {"task": "vt"}, HUB | {"task": "niah_multivalue_2"}]
    write_rows(tmp_path, others[0], HUB, others[1], HUB, file=f"test-00000-of-00002.{kind}")
    write_rows(tmp_path, HUB | {"answer": ["7"]}, others[0], file=f"test-00001-of-00002.{kind}")
    write_rows(tmp_path, {"text": "something else"}, file=f"another.{kind}")
    first, second, third = published_examples(tmp_path, "niah_multivalue", 99)
    assert first == second == hub_example()
    assert third.questions[0].expected == ("7",)
    assert [sample.questions[0].kind for sample in published_examples(tmp_path, "vt", 99)] == ["vt", "vt"]
    # a row's own task takes precedence over the file's
    with pytest.raises(
        UserError, match="there are no samples of cwe, expected cwe.jsonl, cwe.parquet, cwe/val"
    ):
        published_examples(tmp_path, "cwe", 99)


def test_a_hub_data_set_has_a_configuration_for_each_length(tmp_path, monkeypatch):
    """A folder replaces the hub here, and the hub's own client reads it."""
    card = "---\nconfigs:\n" + "".join(
        f"- config_name: '{length}'\n  data_files:\n  - split: test\n    path: {length}/test-*\n"
        for length in (4096, 8192)
    )
    hub = tmp_path / "hub"
    write_rows(hub, HUB | {"task": "vt"}, HUB, file="4096/test-0.parquet")
    write_rows(hub, HUB | {"answer": ["8"]}, file="8192/test-0.parquet")
    (hub / "README.md").write_text(card + "---\n")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    load, read = datasets.load_dataset, []

    def from_hub(name, *arguments, **options):
        assert name == "someone/ruler"
        read.append(arguments[0])
        return load(str(hub), *arguments, **options)

    monkeypatch.setattr(datasets, "load_dataset", from_hub)
    monkeypatch.chdir(tmp_path)
    name = Path("someone/ruler")
    published = open_task("niah_multivalue", inputs(ruler=name))
    with pytest.raises(
        UserError, match=r"takes \d+ tokens with its answer, less than half of --context 4096: "
    ):
        published.samples(Split(0, 1), 1, 4096)
    with pytest.raises(UserError, match="less than half of --context 8192"):
        published.samples(Split(0, 1), 1, 8192)
    with pytest.raises(UserError, match="there are 1 samples of niah_multivalue, needed 2"):
        published.samples(Split(0, 2), 2, 8192)
    assert read == ["4096", "8192"], "each length once"
    assert published_examples(name, "niah_multivalue", 4096) == [hub_example()]
    (longer,) = published_examples(name, "niah_multivalue", 8192)
    assert longer.questions[0].expected == ("8",)
    with pytest.raises(
        UserError, match="someone/ruler: there are no samples of cwe, expected a column `task`"
    ):
        published_examples(name, "cwe", 4096)
    with pytest.raises(
        UserError, match="no such file or folder, and as a hub dataset .* configuration 1024 "
    ):
        published_examples(name, "cwe", 1024)
