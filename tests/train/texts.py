"""Documents for tests: a file of them, and a streamed dataset."""

import json

import pytest


def texts(tmp_path, documents):
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return str(file)


def hub(tmp_path, count):
    datasets = pytest.importorskip("datasets")
    file = texts(tmp_path, [f"{i:02}" * 4 for i in range(count)])
    return datasets.load_dataset(
        "json", data_files=file, split="train", streaming=True, cache_dir=str(tmp_path / "cache")
    )
