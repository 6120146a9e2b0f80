"""RULER's own data and the question files: how they are read, and what is said of damaged ones."""

import dataclasses
import json
import shutil
from pathlib import Path

import datasets
import pyarrow.parquet
import pytest

from kvjax.builtin import builtin_model
from kvjax.errors import UserError
from kvjax.tasks import Draft, DraftQuestion, PromptEncoder
from kvjax.tasks.prompt import prompt_size
from kvjax.tasks.ruler import RULER_TASKS, Files, make_ruler_task, published_drafts
from kvjax.tasks.sources import Material, Published, source
from kvjax.tasks.splits import Split
from tests.tasks.ruler_inputs import builtin, files, hotpotqa, smol, squad

__all__ = ["builtin", "files", "smol"]  # fixtures

PUBLISHED = {
    "index": 3,
    "input": "Some numbers are hidden.\nWhat is hidden?\nfiller filler\nWhat is the number for x in the text?",
    "outputs": ["123", "456"],
    "length": 40,
    "answer_prefix": " The number is",
}


HUB = {
    "context": "Some numbers are hidden.\nfiller filler\n",
    "question": "What is the number for x in the text? ",
    "answer_prefix": "The number is",
    "answer": ["123", "456"],
    "task": "niah_multivalue",
    "max_new_tokens": 64,
}


def material():
    return Material(str(builtin_model()), Files(), None, True)


def written(folder, *rows, file="niah_multivalue.jsonl"):
    """The folder with a file of these rows."""
    (folder / file).parent.mkdir(exist_ok=True, parents=True)
    if file.endswith(".parquet"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), folder / file)
    else:
        lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
        (folder / file).write_text("\n".join(lines) + "\n")
    return folder


def test_published_data_is_cut_before_its_question(tmp_path):
    whole = {**PUBLISHED, "input": PUBLISHED["input"] + PUBLISHED["answer_prefix"]}
    bare = {"input": "docs\n\nQuestion: Who?\nAnswer:", "outputs": ["A", "B"], "length": 9}
    one, two, three = published_drafts(written(tmp_path, PUBLISHED, whole, bare), "niah_multivalue", 99)
    assert one == two
    assert not one.templated
    assert one.context == "Some numbers are hidden.\nWhat is hidden?\nfiller filler\n"
    (question,) = one.questions
    assert question.text == "What is the number for x in the text?"
    assert (question.answer_prefix, question.expected) == (" The number is", ("123", "456"))
    assert (question.scoring, question.reserved, question.kind) == ("all", 128, "niah_multivalue")
    assert (three.context, three.questions[0].text) == ("docs\n\n", "Question: Who?\nAnswer:")
    written(tmp_path, bare, file="qa_1/validation.jsonl")
    (asked,) = published_drafts(tmp_path, "qa_1", 99)[0].questions
    assert (asked.scoring, asked.reserved) == ("any", 32)


@pytest.mark.parametrize("text", ["no question", "a\nWhat is it?\n" + "far from the end. " * 100])
def test_published_data_without_a_question_at_its_end_is_not_cut(text, tmp_path):
    written(tmp_path, {"input": text, "outputs": ["1"]}, file="vt.jsonl")
    (sample,) = published_drafts(tmp_path, "vt", 99)
    assert sample.context == ""
    assert sample.questions[0].text == text


def of_hub(task="niah_multivalue", reserved=64):
    question = DraftQuestion(HUB["question"], HUB["answer_prefix"], ("123", "456"), "all", reserved, task)
    return Draft(HUB["context"], (question,))


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_the_hub_s_form_is_read_from_a_file_a_task(kind, tmp_path):
    row = {name: value for name, value in HUB.items() if name not in ("task", "max_new_tokens")}
    written(tmp_path, row, file=f"niah_multivalue.{kind}")
    assert published_drafts(tmp_path, "niah_multivalue", 99) == [of_hub(reserved=128)]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_the_hub_s_form_is_read_from_files_of_all_tasks(kind, tmp_path):
    others = [HUB | {"task": "vt"}, HUB | {"task": "niah_multivalue_2"}]
    written(tmp_path, others[0], HUB, others[1], HUB, file=f"test-00000-of-00002.{kind}")
    written(tmp_path, HUB | {"answer": ["7"]}, others[0], file=f"test-00001-of-00002.{kind}")
    written(tmp_path, {"text": "something else"}, file=f"another.{kind}")
    first, second, third = published_drafts(tmp_path, "niah_multivalue", 99)
    assert first == second == of_hub()
    assert third.questions[0].expected == ("7",)
    assert [sample.questions[0].kind for sample in published_drafts(tmp_path, "vt", 99)] == ["vt", "vt"]
    # a row's own task goes before the file's
    with pytest.raises(
        UserError, match="there are no samples of cwe, expected cwe.jsonl, cwe.parquet, cwe/val"
    ):
        published_drafts(tmp_path, "cwe", 99)


def test_a_folder_s_samples_have_one_length(tmp_path):
    words = {"input": "some word " * 60 + "\nQuestion: which?\nAnswer:", "outputs": ["word"]}
    written(tmp_path, words, words, file="qa_1.jsonl")
    published = Published("qa_1", tmp_path, material())
    size = prompt_size(published_drafts(tmp_path, "qa_1", 0)[0], published.material.encode)
    (sample,) = published.samples(Split(0, 1), 1, 2 * size)
    assert len(sample.context) + sample.room == size
    (tmp_path / "qa_1.jsonl").unlink()
    (other,) = published.samples(Split(0, 1, calibration=True), 1, 2 * size)
    assert other.context.tolist() == sample.context.tolist(), "read once"
    with pytest.raises(
        UserError, match=f"have one length, got --context {2 * size}, {size}; evaluate a folder"
    ):
        published.samples(Split(0, 1), 1, size)
    written(tmp_path, words, file="qa_1.jsonl")
    message = f"longest sample of qa_1 takes {size} tokens with its answer, less than half of --context {2 * size + 1}"
    with pytest.raises(UserError, match=message):
        Published("qa_1", tmp_path, material()).samples(Split(0, 1), 1, 2 * size + 1)


def test_files_are_opened_before_any_context_is_made_and_once(files, tmp_path):
    for task, message in (
        ("qa_1", "give its JSON file as --squad FILE"),
        ("qa_2", "give its JSON file as --hotpotqa FILE"),
        ("documents", "need --documents, a text file"),
    ):
        with pytest.raises(UserError, match=message):
            source(task, material())
    with pytest.raises(UserError, match=r"--documents .*none.txt: cannot be read"):
        source("text", dataclasses.replace(material(), documents=tmp_path / "none.txt"))
    shutil.copy(files.squad, tmp_path / "squad.json")
    asked = source("qa_1", dataclasses.replace(material(), files=Files(squad=tmp_path / "squad.json")))
    (tmp_path / "squad.json").unlink()
    (one,), (other,) = (asked.samples(Split(seed, 1), 1, 400) for seed in (0, 1))
    assert one.context.tolist() != other.context.tolist()


def test_one_answer_may_be_a_string(tmp_path):
    (sample,) = published_drafts(written(tmp_path, HUB | {"answer": "123"}), "niah_multivalue", 99)
    assert sample.questions[0].expected == ("123",)


def test_a_hub_data_set_has_a_configuration_for_each_length(tmp_path, monkeypatch):
    """A folder stands for the hub, read by the hub's own client."""
    card = "---\nconfigs:\n" + "".join(
        f"- config_name: '{length}'\n  data_files:\n  - split: test\n    path: {length}/test-*\n"
        for length in (4096, 8192)
    )
    hub = tmp_path / "hub"
    written(hub, HUB | {"task": "vt"}, HUB, file="4096/test-0.parquet")
    written(hub, HUB | {"answer": ["8"]}, file="8192/test-0.parquet")
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
    published = Published("niah_multivalue", name, material())
    with pytest.raises(
        UserError, match=r"takes \d+ tokens with its answer, less than half of --context 4096: "
    ):
        published.samples(Split(0, 1), 1, 4096)
    with pytest.raises(UserError, match="less than half of --context 8192"):
        published.samples(Split(0, 1), 1, 8192)
    with pytest.raises(UserError, match="there are 1 samples of niah_multivalue, needed 2"):
        published.samples(Split(0, 2), 2, 8192)
    assert read == ["4096", "8192"], "each length once"
    assert published_drafts(name, "niah_multivalue", 4096) == [of_hub()]
    (longer,) = published_drafts(name, "niah_multivalue", 8192)
    assert longer.questions[0].expected == ("8",)
    with pytest.raises(
        UserError, match="someone/ruler: there are no samples of cwe, expected a column `task`"
    ):
        published_drafts(name, "cwe", 4096)
    with pytest.raises(
        UserError, match="no such folder, and as a hub data set .* configuration 1024 "
    ) as error:
        published_drafts(name, "cwe", 1024)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("template", "templated"),
    [
        ("{}", False),
        ("[INST] {} [/INST]", True),
        ("<s>[INST] {} [/INST]", True),
        ("A chat between a curious user and an assistant. USER: {} ASSISTANT:", True),
        ("You are a helpful assistant. USER: {} ASSISTANT: ", True),
        ("<BOS_TOKEN><|START_OF_TURN_TOKEN|><|USER_TOKEN|>{}<|END_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>", True),
        ("[gMASK]sop<|user|> \n {}<|assistant|> \n ", True),
        ("User: hi\n\nAssistant: Hi.\n\nUser: {}\n\nAssistant:", True),
        ("<|user|>\n{}<|end|>\n<|assistant|>\n", True),
        ("<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>", True),
        ("<SPECIAL_10>System\n\n<SPECIAL_11>User\n{}\n<SPECIAL_11>Assistant\n", True),
        ("<start_of_turn>user\n{}<end_of_turn>\n<start_of_turn>model\n", True),
        ("<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n", True),
    ],
)
def test_a_chat_template_in_published_data_is_seen(template, templated, tmp_path, smol):
    """Then nothing is put around the text."""
    row = PUBLISHED | {"input": template.format(PUBLISHED["input"])}
    (sample,) = published_drafts(written(tmp_path, row), "niah_multivalue", 99)
    assert sample.templated is templated
    prompt = PromptEncoder(smol)(sample)
    said = smol.decode([*prompt.context, *prompt.questions[0].prompt])
    if templated:
        assert said == row["input"] + PUBLISHED["answer_prefix"]
    else:
        turn = smol.apply_chat_template(
            [{"role": "user", "content": row["input"]}], tokenize=False, add_generation_prompt=True
        )
        assert said == turn + PUBLISHED["answer_prefix"].lstrip()


@pytest.mark.parametrize("name", RULER_TASKS)
def test_no_task_s_own_words_are_taken_for_a_template(name, builtin, files, tmp_path):
    sample = make_ruler_task(name, builtin, files).draft(0, 1500)
    asked = sample.questions[0].text + sample.questions[0].answer_prefix
    written(tmp_path, {"input": sample.context + asked, "outputs": ["1"]}, file=f"{name}.jsonl")
    (read,) = published_drafts(tmp_path, name, 1500)
    assert not read.templated


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input": "x", "length": 1}, "line 2 has no field `outputs`, it has input, length"),
        ({"input": "x", "outputs": "1"}, "line 2: expected `outputs` to be a list of strings, got 1"),
        ({"input": 1, "outputs": ["1"]}, "line 2: expected `input` to be a string, got 1"),
        (
            {"input": "x", "outputs": ["1"], "answer_prefix": 2},
            "expected `answer_prefix` to be a string, got 2",
        ),
        ({"context": "x", "answer": ["1"]}, "line 2 has no field `question`, it has context, answer"),
        ({"context": "x", "question": "y", "answer": []}, "expected `answer` to be a list of strings, got "),
        (HUB | {"max_new_tokens": 0}, "line 2: `max_new_tokens` must be a whole number of at least 1, got 0"),
        ("[1]", r"line 2 is no JSON object, it starts \[1\]"),
        ("{", "line 2 is no JSON object"),
    ],
)
def test_bad_published_lines_are_named(row, message, tmp_path):
    with pytest.raises(UserError, match=message) as error:
        published_drafts(written(tmp_path, PUBLISHED, row), "niah_multivalue", 99)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith(f"--ruler-data {tmp_path}")


def test_errors_say_what_is_wrong(builtin, files, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="RULER has no task called 'niah_single'; did you mean niah_single_3"):
        make_ruler_task("niah_single", builtin)
    with pytest.raises(UserError, match="no task called 'x'; did you mean niah_single_1, .*, qa_2"):
        published_drafts(tmp_path, "x", 99)
    for name in RULER_TASKS:
        with pytest.raises(UserError, match=rf"{name}: 60 tokens are too few, the shortest .* take \d+"):
            make_ruler_task(name, builtin, files).sample(0, 60)
    with pytest.raises(UserError, match="give its JSON file as --squad FILE"):
        make_ruler_task("qa_1", builtin)
    with pytest.raises(UserError, match="give its JSON file as --hotpotqa FILE"):
        make_ruler_task("qa_2", builtin)
    with pytest.raises(
        UserError, match="none: there is no such folder, and a hub data set is called OWNER/NAME"
    ):
        published_drafts(tmp_path / "none", "vt", 99)
    (tmp_path / "vt.jsonl").write_text("{}")
    monkeypatch.chdir(tmp_path.parent)
    for file in (tmp_path / "vt.jsonl", Path(tmp_path.name, "vt.jsonl")):
        with pytest.raises(
            UserError, match="--ruler-data .*vt.jsonl: is a file; pass the folder that holds it"
        ):
            published_drafts(file, "vt", 99)
    (tmp_path / "vt.jsonl").unlink()
    (tmp_path / "vt.parquet").write_bytes(b"nothing")
    with pytest.raises(UserError, match="--ruler-data .*vt.parquet: is no parquet file"):
        published_drafts(tmp_path, "vt", 99)
    short = tmp_path / "short.txt"
    for content, message in ((b"", "there is no text in it"), (b"\xff\xfe\xfa", "is not UTF-8 text")):
        short.write_bytes(content)
        with pytest.raises(UserError, match=f"^--essays .*short.txt: {message}"):
            make_ruler_task("niah_single_2", builtin, Files(essays=short))
    with pytest.raises(UserError, match=r"^--essays .*no: cannot be read \(No such file"):
        make_ruler_task("niah_single_2", builtin, Files(essays=tmp_path / "no"))
    with pytest.raises(UserError, match=r"^--squad .*none: cannot be read \(No such file"):
        make_ruler_task("qa_1", builtin, Files(squad=tmp_path / "none"))


def test_words_do_not_last_for_ever(builtin, monkeypatch):
    monkeypatch.setattr("kvjax.tasks.ruler.needles.WORD_PAIRS", 20)
    with pytest.raises(
        UserError, match="niah_multikey_2: 1500 tokens are too many, there are only 20 pairs of words"
    ):
        make_ruler_task("niah_multikey_2", builtin).sample(0, 1500)


def spoil(record, path, change):
    """A record changed at a place in it."""
    *into, last = path
    inner = record
    for step in into:
        inner = inner[step]
    if change is None:
        del inner[last]
    else:
        inner[last] = change
    return record


def refused(tokenizer, folder, data_set, content, message):
    """Content of a data set's file is refused in one line that begins with the file."""
    file = folder / "bad.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(UserError, match=message) as error:
        make_ruler_task({"squad": "qa_1", "hotpotqa": "qa_2"}[data_set], tokenizer, Files(**{data_set: file}))
    assert str(error.value).startswith(f"--{data_set} {file}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("path", "change", "message"),
    [
        (["data"], None, "has no field `data`"),
        (["data", 2, "paragraphs"], None, r"data\[2\] has no field `paragraphs`"),
        (
            ["data", 0, "paragraphs", 1, "context"],
            5,
            r"data\[0\].paragraphs\[1\]: expected `context` to be a str, got a int",
        ),
        (["data", 0, "paragraphs", 1, "qas"], None, r"data\[0\].paragraphs\[1\] has no field `qas`"),
        (["data", 0, "paragraphs", 1, "qas", 0, "answers"], None, r"qas\[0\] has no field `answers`"),
        (["data", 0, "paragraphs", 1, "qas", 0, "answers", 0], "A", r"answers\[0\] has no field `text`"),
        (["data"], [], "there is no question with an answer in it"),
    ],
)
def test_missing_fields_of_squad_are_named(path, change, message, builtin, tmp_path):
    refused(builtin, tmp_path, "squad", spoil(squad(), path, change), message)


@pytest.mark.parametrize(
    ("path", "change", "message"),
    [
        ([1, "answer"], None, r"\[1\] has no field `answer`"),
        ([1, "context"], None, r"\[1\] has no field `context`"),
        (
            [1, "context", 0],
            ["title"],
            r"\[1\]: expected `context` to be a list of \[title, \[sentences\]\]",
        ),
        ([1, "context"], [], r"\[1\]: `context` has no document"),
    ],
)
def test_missing_fields_of_hotpotqa_are_named(path, change, message, builtin, tmp_path):
    refused(builtin, tmp_path, "hotpotqa", spoil(hotpotqa(), path, change), message)


@pytest.mark.parametrize(
    ("content", "data_set", "message"),
    [
        ("{", "squad", "is not JSON"),
        ("[]", "squad", "has no field `data`"),
        ("{}", "hotpotqa", "expected a JSON list of questions"),
        ("[]", "hotpotqa", "there is no question"),
    ],
)
def test_question_files_of_another_kind_are_refused(content, data_set, message, builtin, tmp_path):
    refused(builtin, tmp_path, data_set, content, message)
