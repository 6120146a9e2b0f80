"""Test SCBench's rows as samples: their official scores, the two modes, and the errors for damaged rows."""

from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from kvjax.errors import UserError
from kvjax.tasks.prompt import PromptEncoder
from kvjax.tasks.scbench import TASKS, scbench_examples
from kvjax.tasks.suite import TURNS
from tests.tasks.benchmark_inputs import BOOK, SCBENCH, SCBENCH_FIGURES, scbench_row, turn, write
from tests.tasks.model_tokenizers import byte_tokenizer

START, END, ANSWER = "<|im_start|>user\n", "<|im_end|>\n", "<|im_start|>assistant\n"


def examples(folder, task, turns="each", chat=True):
    return scbench_examples(task, folder, turns, PromptEncoder(byte_tokenizer(), chat))


def prompts(folder, task, turns, chat):
    """Return the context and the questions of the first row, decoded from the prompts."""
    tokenizer = byte_tokenizer()
    encode = PromptEncoder(tokenizer, chat)
    sample = encode(scbench_examples(task, folder, turns, encode)[0])
    assert sample.conversation == (turns == "own")
    assert sample.separable
    return tokenizer.decode(sample.context), [tokenizer.decode(q.prompt) for q in sample.questions]


@pytest.mark.parametrize("turns", TURNS)
@pytest.mark.parametrize("task", TASKS)
def test_scores_equal_those_of_the_official_scorer(task, turns, tmp_path):
    if "repoqa" in task:
        pytest.importorskip("tree_sitter_python")
    (example,) = examples(write(tmp_path, {task: [scbench_row(task)]}), task, turns)
    scores = [q.score(answer) for q, answer in zip(example.questions, SCBENCH[task][1], strict=True)]
    assert scores == pytest.approx(SCBENCH_FIGURES[task], abs=1e-6)
    reserved = TASKS[task].reserved
    kinds = [row_turn.get("task", task) for row_turn in SCBENCH[task][0]]
    assert [q.reserved for q in example.questions] == [
        reserved if isinstance(reserved, int) else reserved[kind] for kind in kinds
    ]


@pytest.mark.parametrize("chat", [True, False])
def test_separate_questions_follow_the_context_as_published(chat, tmp_path):
    """No text stands between them."""
    before, after = (START, END + ANSWER) if chat else ("", "")
    write(
        tmp_path,
        {task: [scbench_row(task)] for task in ("scbench_qa_eng", "scbench_choice_eng", "scbench_mf")},
    )
    assert prompts(tmp_path, "scbench_qa_eng", "each", chat) == (
        f"{before}Read the book and answer the question. Be very concise in your answer.\n\n{BOOK}",
        [f"Question: Where did Alan live?\nAnswer:{after}", f"Question: And Berta?\nAnswer:{after}"],
    )
    context, (first, _) = prompts(tmp_path, "scbench_choice_eng", "each", chat)
    assert context == f"{before}Read the book and answer the question.\n\n{BOOK}"
    assert first == (
        f"Question: Alan?\nA. Ghent\nB. Rome\nC. Oslo\nD. Bern\n\nThe the correct answer is{after}"
    )
    context, asked = prompts(tmp_path, "scbench_mf", "each", chat)
    assert context == f"{before}[3, 9, 5]", "without the first question"
    assert asked[1] == f"What is the second smallest number?\n\nThe second smallest number is{after}"


def test_golden_turns_follow_the_true_answers_as_published(tmp_path):
    write(tmp_path, {"scbench_vt": [scbench_row("scbench_vt")]})
    row = scbench_row("scbench_kv")
    row["multi_turns"] = [turn("Key one", "v1"), turn("Key two", "v2"), turn("Key three", "v3")]
    write(tmp_path, {"scbench_kv": [row]})
    first = f"Extract the value corresponding to the specified key in the JSON object below.\n\n{BOOK}\n\n"
    assert prompts(tmp_path, "scbench_kv", "golden", False) == (
        first,
        ["Key one", "Key onev1\n\nKey two", "Key onev1\n\nKey twov2\n\nKey three"],
    )
    context, asked = prompts(tmp_path, "scbench_kv", "golden", True)
    assert context == START + first
    turns = [{"role": "user", "content": first + "Key one"}, {"role": "assistant", "content": "v1"}]
    turns += [{"role": "user", "content": "Key two"}, {"role": "assistant", "content": "v2"}]
    turns += [{"role": "user", "content": "Key three"}]
    for number, question in enumerate(asked):
        earlier = turns[: 2 * number + 1]
        whole = byte_tokenizer().apply_chat_template(earlier, tokenize=False, add_generation_prompt=True)
        assert context + question == whole
    assert [q.kind for q in examples(tmp_path, "scbench_kv", "golden")[0].questions] == [
        "turn 1",
        "turn 2",
        "turn 3",
    ]


def test_own_turns_begin_with_the_text_between_turns(tmp_path):
    write(tmp_path, {"scbench_qa_eng": [scbench_row("scbench_qa_eng")]})
    _, asked = prompts(tmp_path, "scbench_qa_eng", "own", False)
    assert asked == ["Question: Where did Alan live?\nAnswer:", "\n\nQuestion: And Berta?\nAnswer:"]
    _, asked = prompts(tmp_path, "scbench_qa_eng", "own", True)
    assert asked[1] == f"{END}{START}Question: And Berta?\nAnswer:{END}{ANSWER}"


def test_at_most_five_questions_are_asked_and_reported_by_kind(tmp_path):
    row = scbench_row("scbench_prefix_suffix") | {"multi_turns": [turn(f"{i}?", f"{i}") for i in range(7)]}
    write(tmp_path, {"scbench_prefix_suffix": [row]})
    (example,) = examples(tmp_path, "scbench_prefix_suffix")
    assert [q.expected for q in example.questions] == [("0",), ("1",), ("2",), ("3",), ("4",)]
    assert {q.kind for q in example.questions} == {"scbench_prefix_suffix"}
    task = "scbench_summary_with_needles"
    write(tmp_path, {task: [scbench_row(task)]})
    kinds = ["scbench_summary", "scbench_passkey"]
    assert [q.kind for q in examples(tmp_path, task)[0].questions] == kinds
    turns = [q.kind for q in examples(tmp_path, task, "golden")[0].questions]
    assert turns == [f"turn 1, {kinds[0]}", f"turn 2, {kinds[1]}"]


def test_rows_are_read_from_files_and_the_hub(tmp_path, monkeypatch):
    """The rows are in a parquet file, and in a hub dataset, replaced here by a folder."""
    row = scbench_row("scbench_choice_eng")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "scbench_choice_eng.parquet")
    hub = tmp_path / "hub"
    hub.mkdir()
    write(hub, {"scbench_choice_eng": [row]})
    files = "  data_files:\n  - split: test\n    path: scbench_choice_eng.jsonl\n"
    (hub / "README.md").write_text(f"---\nconfigs:\n- config_name: scbench_choice_eng\n{files}---\n")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    load, asked = datasets.load_dataset, []

    def from_hub(name, *arguments):
        asked.append(name)
        return load(str(hub), *arguments)

    monkeypatch.setattr(datasets, "load_dataset", from_hub)
    monkeypatch.chdir(tmp_path)
    found = [examples(data, "scbench_choice_eng") for data in (tmp_path, Path("someone/scbench"), None)]
    assert found[0] == found[1] == found[2]
    assert [q.expected for q in found[0][0].questions] == [("Ghent", "A"), ("Rome", "B")]
    assert asked == ["someone/scbench", "microsoft/SCBench"]


KV, CHOICE, BOTH = "scbench_kv", "scbench_choice_eng", "scbench_repoqa_and_kv"


@pytest.mark.parametrize(
    ("task", "row", "message"),
    [
        (KV, {"context": BOOK}, "line 1 has no field `multi_turns`, it has context"),
        (
            KV,
            {"context": BOOK, "multi_turns": []},
            r"line 1: expected `multi_turns` to be a list of objects, got \[\]",
        ),
        (KV, {"multi_turns": [turn("?", "x")]}, "line 1 has no field `input`, it has multi_turns"),
        (
            KV,
            {"context": 1, "multi_turns": [turn("?", "x")]},
            "line 1: expected `context` to be a string, got 1",
        ),
        (KV, {"context": BOOK, "multi_turns": [{"input": "?"}]}, "line 1, turn 1 has no field `answer`"),
        (
            KV,
            {"context": BOOK, "multi_turns": [turn("?", 1)]},
            "turn 1: expected `answer` to be a list of str",
        ),
        (
            "scbench_mf",
            {"context": BOOK, "multi_turns": [turn("The largest is", "9")]},
            "turn 1: expected `answer` to be a number, got 9",
        ),
        (
            "scbench_mf",
            {"context": BOOK, "multi_turns": [turn("Largest?", 9)]},
            'turn 1: expected `input` to have "The … is", got Largest?',
        ),
        (
            CHOICE,
            {"context": BOOK, "multi_turns": [turn("?", "x", options=["x", "y"])]},
            "turn 1: expected `options` to be 4, got 2",
        ),
        (
            CHOICE,
            {"context": BOOK, "multi_turns": [turn("?", "x", options=list("abcd"))]},
            "turn 1: expected `answer` to be one of `options`, got x",
        ),
        (
            BOTH,
            {"context": BOOK, "multi_turns": [turn("?", "x", task="scbench_vt")]},
            "turn 1: expected `task` to be one of scbench_repoqa, scbench_kv, got scbench_vt",
        ),
        (
            BOTH,
            {
                "context": BOOK,
                "repo": "a",
                "lang": "c",
                "multi_turns": [turn("?", "x", task="scbench_repoqa")],
            },
            "line 1: expected `lang` to be one of python, .*, got c",
        ),
    ],
)
def test_errors_name_damaged_rows(task, row, message, tmp_path):
    with pytest.raises(UserError, match=message) as error:
        examples(write(tmp_path, {task: [row]}), task)
    assert str(error.value).startswith(f"--data scbench {tmp_path}")


def test_missing_data_is_refused(tmp_path):
    file = tmp_path / "scbench_kv.jsonl"
    file.write_text("")
    for data in (file, tmp_path / "none"):
        with pytest.raises(
            UserError, match=f"--data scbench {data}: expected a folder or a hub dataset, OWNER/NAME"
        ):
            examples(data, "scbench_kv")
    with pytest.raises(
        UserError, match="there is no scbench_vt.jsonl, scbench_vt.parquet or folder scbench_vt"
    ):
        examples(tmp_path, "scbench_vt")
