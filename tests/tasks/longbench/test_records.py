"""Test LongBench's rows as samples: their official scores, their sources, and the errors for damaged rows."""

import json
import os
import sys
import zipfile
from pathlib import Path

import datasets
import huggingface_hub
import pyarrow
import pyarrow.parquet
import pytest

from kvjax.errors import UserError
from kvjax.tasks.longbench import NAMES, longbench_examples, longbench_task
from kvjax.tasks.longbench.chinese import words
from kvjax.tasks.prompt import PromptEncoder
from tests.tasks.benchmark_inputs import (
    CHINESE_WORDS,
    CODE,
    CONTEXT,
    LONGBENCH,
    LONGBENCH_FIGURES,
    longbench_row,
    longbench_rows,
    write,
)
from tests.tasks.model_tokenizers import byte_tokenizer


@pytest.mark.parametrize("task", LONGBENCH)
def test_scores_equal_those_of_the_official_scorer(task, tmp_path):
    if task in CHINESE_WORDS:
        pytest.importorskip("jieba")
    examples = longbench_examples(task, write(tmp_path, {task: longbench_rows(task)}))
    questions = [question for example in examples for question in example.questions]
    scores = [question.score(answer) for question, answer in zip(questions, LONGBENCH[task][1], strict=True)]
    assert round(100 * sum(scores) / len(scores), 2) == LONGBENCH_FIGURES[task]


def test_prompts_are_cut_where_the_context_ends(tmp_path):
    """Each byte is one token, so that the prompt can be spelled out here."""
    row = longbench_row("def sub(a, b):\n", ["    return a - b"], CODE)
    rows = {task: longbench_rows(task) for task in ("qasper", "passage_count")}
    data = write(tmp_path, rows | {"repobench-p": [row]})
    tokenizer = byte_tokenizer()

    def parts(task, chat=True):
        sample = PromptEncoder(tokenizer, chat)(longbench_examples(task, data)[0])
        (question,) = sample.questions
        assert sample.separable
        assert question.answer_tokens == longbench_task(task).reserved
        return tokenizer.decode(sample.context), tokenizer.decode(question.prompt)

    before, asked = parts("qasper")
    assert before.startswith(
        "<|im_start|>user\nYou are given a scientific article and a question. Answer the "
    )
    assert before.endswith(f"explanation.\n\nArticle: {CONTEXT}\n\n")
    assert asked.startswith(" Answer the question based on the above article as concisely as you can, using")
    assert asked.endswith("\n\nQuestion: Who?\n\nAnswer:<|im_end|>\n<|im_start|>assistant\n")
    assert parts("qasper", chat=False)[1].endswith("Question: Who?\n\nAnswer:")
    assert parts("passage_count", chat=False)[1].endswith("and so on.\n\nThe final answer is: ")
    # the code and few-shot tasks do not use the chat template
    code = f"Please complete the code given below. \n{CODE}", "def sub(a, b):\nNext line of code:\n"
    assert parts("repobench-p") == code


def test_chinese_scores_need_jieba(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "jieba", None)
    words.cache_clear()
    with pytest.raises(UserError, match=r"Chinese scores need jieba: pip install 'kvjax\[chinese\]'"):
        longbench_examples("vcsum", write(tmp_path, {"vcsum": longbench_rows("vcsum")}))


@pytest.mark.parametrize(
    ("task", "reserved", "chat"),
    [("narrativeqa", 128, True), ("musique", 32, True), ("multi_news", 512, True), ("samsum", 128, False)],
)
def test_tasks_have_their_published_lengths(task, reserved, chat):
    assert (longbench_task(task).reserved, longbench_task(task).chat) == (reserved, chat)


def test_the_number_of_tasks():
    assert len(NAMES) == 21 + 13
    assert {"2wikimqa_e", "repobench-p_e"} < set(NAMES)
    assert "narrativeqa_e" not in NAMES


def test_longbench_e_reports_ranges_of_lengths(tmp_path):
    rows = [longbench_row("?", ["x"], length=words) for words in (3999, 4000, 7999, 8000)]
    examples = longbench_examples("qasper_e", write(tmp_path, {"qasper_e": rows}))
    assert [example.questions[0].kind for example in examples] == ["0-4k", "4-8k", "4-8k", "8k+"]


def test_rows_are_read_from_files_and_the_hub(tmp_path, monkeypatch):
    """The rows are in a parquet file, the published archive, the hub's archive, and a hub dataset, replaced here by a
    folder."""
    rows = longbench_rows("triviaqa")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "triviaqa.parquet")
    wanted = [
        (example.context, example.questions[0].expected)
        for example in longbench_examples("triviaqa", tmp_path)
    ]
    assert wanted[0][1] == ("Alan Alanson", "Alanson")

    def found(data):
        return [
            (example.context, example.questions[0].expected)
            for example in longbench_examples("triviaqa", data)
        ]

    archive = tmp_path / "data.zip"
    with zipfile.ZipFile(archive, "w") as opened:
        opened.writestr("data/triviaqa.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        opened.writestr("data/triviaqa_e.jsonl", "")
    assert found(archive) == wanted
    asked = []

    def downloaded(name, file, repo_type, revision):
        asked.append((name, file, repo_type))
        return str(archive)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", downloaded)
    assert found(None) == wanted
    assert asked == [("THUDM/LongBench", "data.zip", "dataset")]
    hub = tmp_path / "hub"
    hub.mkdir()
    write(hub, {"triviaqa": rows})
    configuration = "- config_name: triviaqa\n  data_files:\n  - split: test\n    path: triviaqa.jsonl\n"
    (hub / "README.md").write_text(f"---\nconfigs:\n{configuration}---\n")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    load = datasets.load_dataset
    monkeypatch.setattr(datasets, "load_dataset", lambda name, *arguments: load(str(hub), *arguments))
    monkeypatch.chdir(tmp_path)
    assert found(Path("someone/longbench")) == wanted


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"context": "x"}, "line 1 has no field `input`, it has context"),
        (longbench_row("?", [], classes=["x"]), "line 1: expected `answers` to be a list of strings, got"),
        (longbench_row("?", "x", classes=["x"]), "line 1: expected `answers` to be a list of strings, got x"),
        (longbench_row("?", ["x"], context=1), "line 1: expected `context` to be a string, got 1"),
        (longbench_row("?", ["x"]), "line 1: expected `all_classes` to be a list of strings, got None"),
        (
            longbench_row("?", ["x"], classes=["x"], length=None),
            "line 1: `length` must be a whole number of at",
        ),
    ],
)
def test_errors_name_damaged_rows(row, message, tmp_path):
    with pytest.raises(UserError, match=message) as error:
        longbench_examples("trec_e", write(tmp_path, {"trec_e": [row]}))
    assert str(error.value).startswith(f"--data longbench {tmp_path}")


def test_missing_data_is_refused(tmp_path, monkeypatch):
    (tmp_path / "no.zip").write_text("none")
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as opened:
        opened.writestr("data/qasper_e.jsonl", "")
    (tmp_path / "qasper.jsonl").write_text("")
    for data, message in (
        (tmp_path / "none", "expected a folder, data.zip or a hub dataset, OWNER/NAME"),
        (tmp_path / "qasper.jsonl", "expected a folder, data.zip or a hub dataset, OWNER/NAME"),
        (tmp_path / "no.zip", "cannot be read"),
        (tmp_path / "not.zip", r"cannot be read \(.*No such file"),
        (tmp_path / "data.zip", "expected one qasper.jsonl in it, got no"),
    ):
        with pytest.raises(UserError, match=f"--data longbench {data}: {message}"):
            longbench_examples("qasper", data)
    with pytest.raises(UserError, match="there is no trec.jsonl, trec.parquet or folder trec"):
        longbench_examples("trec", tmp_path)

    def refused(*arguments, **options):
        raise OSError("no\nnetwork")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refused)
    with pytest.raises(
        UserError,
        match=r"--data longbench: data.zip of THUDM/LongBench cannot be loaded from the hub \(OSError: no network\)",
    ):
        longbench_examples("qasper", None)


def test_archives_of_other_tools_are_read(tmp_path):
    """The archives contain macOS's copies of files, a byte-order mark, Windows line ends and blank lines."""
    row = json.dumps(longbench_row("Who?", ["x"]))
    archive = tmp_path / "data.zip"
    with zipfile.ZipFile(archive, "w") as opened:
        opened.writestr("__MACOSX/data/._qasper.jsonl", b"\0\5\x16\7")
        opened.writestr("__MACOSX/qasper.jsonl", b"\0\5\x16\7")
        opened.writestr("data/qasper.jsonl", f"\ufeff{row}\r\n\r\n{row}\r\n")
    assert len(longbench_examples("qasper", archive)) == 2
    folder = tmp_path / "rows" / "qasper"
    folder.mkdir(parents=True)
    (folder / "a.jsonl").write_bytes(f"\ufeff{row}\r\n\n".encode())
    (folder / "._a.jsonl").write_bytes(b"\0\5\x16\7")
    assert len(longbench_examples("qasper", folder.parent)) == 1


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"a/qasper.jsonl": "", "b/qasper.jsonl": ""}, "expected one qasper.jsonl in it, got 2"),
        (
            {"qasper.jsonl": "{}\n[" + "[" * 100_000},
            r"data\.zip: qasper\.jsonl: line 1 has no field `context`",
        ),
        ({"qasper.jsonl": "[" * 100_000}, r"data\.zip: qasper\.jsonl: line 1 is no JSON object"),
        ({"qasper.jsonl": "x" * 2000}, "cannot be read .2,000 bytes, more than 1,000"),
        (
            {"qasper.jsonl": json.dumps(longbench_row("\ud800", ["x"]))},
            r"line 1: `input` must be Unicode text, but character 0 is not",
        ),
    ],
)
def test_damaged_archives_are_refused(entries, message, tmp_path, monkeypatch):
    if "1,000" in message:
        monkeypatch.setattr("kvjax.tasks.longbench.records.LARGEST", 1000)
    with zipfile.ZipFile(tmp_path / "data.zip", "w", zipfile.ZIP_DEFLATED) as opened:
        for name, text in entries.items():
            opened.writestr(name, text)
    with pytest.raises(UserError, match=message):
        longbench_examples("qasper", tmp_path / "data.zip")


def test_damaged_tables_and_pipes_are_refused(tmp_path, monkeypatch):
    """A table's repeated values are stored once, but unpacked for each row."""
    rows = pyarrow.Table.from_pylist(longbench_rows("triviaqa"))
    file = tmp_path / "triviaqa.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"context": ["x" * 10_000] * 999}), file)
    with monkeypatch.context() as patch:
        patch.setattr("kvjax.tasks.datasets.LARGEST", 1_000_000)
        with pytest.raises(UserError, match=r"triviaqa\.parquet: .* unpacks to more than 1,000,000 bytes"):
            longbench_examples("triviaqa", tmp_path)
    pyarrow.parquet.write_table(rows, file)
    whole = file.read_bytes()
    file.write_bytes(whole[:4] + bytes(len(whole) // 2) + whole[4 + len(whole) // 2 :])
    with pytest.raises(UserError, match=r"triviaqa\.parquet: is no parquet file"):
        longbench_examples("triviaqa", tmp_path)
    os.mkfifo(tmp_path / "data.zip")
    with pytest.raises(UserError, match=r"data\.zip: is a pipe or a device, expected a file"):
        longbench_examples("triviaqa", tmp_path / "data.zip")
