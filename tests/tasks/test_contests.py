"""Test contests in each of their published forms."""

import json
from pathlib import Path

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from kvjax.errors import UserError
from kvjax.tasks.contest_answers import Integers
from kvjax.tasks.contests import CONTESTS, ContestProblems, Problem, read_problems
from kvjax.tasks.splits import Split
from tests.tasks.model_tokenizers import byte_tokenizer

TEXTS = r"Find $m+n$ if $\frac{m}{n} = \frac{2}{4}$.", "How many are there?"
FORMS = {
    "HuggingFaceH4/aime_2024": [
        {"id": 60, "problem": TEXTS[0], "solution": "…", "answer": "003", "url": "…", "year": "2024"},
        {"id": 61, "problem": TEXTS[1], "solution": "…", "answer": "204", "url": "…", "year": "2024"},
    ],
    "Maxwell-Jia/AIME_2024": [
        {"ID": "2024-I-1", "Problem": TEXTS[0], "Solution": "…", "Answer": 3},
        {"ID": "2024-II-4", "Problem": TEXTS[1], "Solution": "…", "Answer": 204},
    ],
    "opencompass/AIME2025": [
        {"question": TEXTS[0], "answer": "3"},
        {"question": TEXTS[1], "answer": "204"},
    ],
    "math-ai/aime25": [
        {"problem": TEXTS[0], "answer": "3", "id": "0"},
        {"problem": TEXTS[1], "answer": "204", "id": "1"},
    ],
    "yentinglin/aime_2025": [
        {"id": i, "problem": text, "answer": answer, "solution": "…", "url": "…", "year": 2025}
        for i, text, answer in zip((0, 1), TEXTS, ("3", "204"), strict=True)
    ],
    "MathArena": [
        {"problem_idx": 1, "problem": TEXTS[0], "answer": 3, "problem_type": ["Algebra"]},
        {"problem_idx": 2, "problem": TEXTS[1], "answer": 204, "problem_type": ["Geometry", "Algebra"]},
    ],
}
NAMES = {
    "HuggingFaceH4/aime_2024": ("60", "61"), "Maxwell-Jia/AIME_2024": ("2024-I-1", "2024-II-4"),
    "opencompass/AIME2025": ("1", "2"), "math-ai/aime25": ("0", "1"), "yentinglin/aime_2025": ("0", "1"),
    "MathArena": ("1", "2"),
}  # fmt: skip


def write(file, rows):
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    else:
        file.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return file


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("form", FORMS)
def test_every_published_form_is_read(form, suffix, tmp_path):
    file = write(tmp_path / f"aime_2025{suffix}", FORMS[form])
    for data in (file, tmp_path):
        problems = read_problems("aime_2025", data, Integers())
        assert [problem.name for problem in problems] == list(NAMES[form])
        assert [problem.text for problem in problems] == list(TEXTS)
        assert [int(problem.answer) for problem in problems] == [3, 204]


def test_a_contest_may_be_several_files(tmp_path):
    """AIME has two parts, whose problems may have the same numbers."""
    for part in ("I", "II"):
        write(tmp_path / "aime_2025" / f"aime2025-{part}.jsonl", FORMS["MathArena"])
    found = read_problems("aime_2025", tmp_path, Integers())
    assert [problem.name for problem in found] == ["1", "2", "3", "4"]
    assert [problem.answer for problem in found] == ["3", "204"] * 2


def test_a_hub_data_set_has_one_configuration_or_several(tmp_path, monkeypatch):
    """A folder replaces the hub here, and the hub's own client reads it."""
    hub = tmp_path / "hub"
    card = "---\nconfigs:\n" + "".join(
        f"- config_name: AIME2025-{part}\n  data_files:\n  - split: test\n    path: {part}.jsonl\n"
        for part in ("I", "II")
    )
    for part, row in zip(("I", "II"), FORMS["opencompass/AIME2025"], strict=True):
        write(hub / f"{part}.jsonl", [row])
    (hub / "README.md").write_text(card + "---\n")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    load, named, asked = datasets.load_dataset, datasets.get_dataset_config_names, []

    def names_of(name):
        asked.append(name)
        return named(str(hub))

    monkeypatch.setattr(datasets, "get_dataset_config_names", names_of)
    monkeypatch.setattr(datasets, "load_dataset", lambda name, *arguments: load(str(hub), *arguments))
    monkeypatch.chdir(tmp_path)
    found = read_problems("aime_2025", Path("opencompass/AIME2025"), Integers())
    assert found == [Problem("1", TEXTS[0], "3"), Problem("2", TEXTS[1], "204")]
    assert read_problems("aime_2024", None, Integers()) == found
    assert asked == ["opencompass/AIME2025", CONTESTS["aime_2024"].hub]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "there are no problems of aime_2024"),
        (
            [{"text": "?", "answer": "1"}],
            "line 1 has no field `problem` or `question`, it has text, answer",
        ),
        ([{"problem": "?", "solution": "1"}], "line 1 has no field `answer`, it has problem, solution"),
        ([{"problem": "?", "answer": "1"}, {"problem": "", "answer": "1"}], "line 2 has no field `problem`"),
        (
            [{"problem": "?", "answer": "1000"}],
            "line 1: expected the answer to be an integer from 0 to 999, got 1000",
        ),
        ([{"problem": "?", "answer": r"\sqrt 2"}], r"an integer from 0 to 999, got \\sqrt 2"),
    ],
)
def test_errors_name_damaged_rows(rows, message, tmp_path):
    file = write(tmp_path / "aime_2024.jsonl", rows)
    with pytest.raises(UserError, match=message) as error:
        read_problems("aime_2024", file, Integers())
    assert str(error.value).startswith(f"--data contests {file}")


def test_missing_data_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for data, message in (
        (tmp_path, "there is no aime_2024.jsonl, aime_2024.parquet or folder aime_2024"),
        (tmp_path / "none.jsonl", "expected a .jsonl or .parquet file, a folder of them, or a hub dataset"),
        (write(tmp_path / "a.txt", []), "expected a .jsonl or .parquet file"),
        (Path("no/body"), "no such file or folder, and as a hub dataset it cannot be loaded"),
    ):
        with pytest.raises(UserError, match=f"--data contests {data}: {message}"):
            read_problems("aime_2024", data, Integers())


def test_a_problem_is_the_users_turn_and_its_answer_may_fill_the_length(tmp_path):
    """Each byte is one token, so that the prompt can be spelled out here."""
    write(tmp_path / "aime_2024.jsonl", FORMS["Maxwell-Jia/AIME_2024"])
    tokenizer = byte_tokenizer()
    answer = r"It is \boxed{12}, no: \boxed{204}"
    for chat in (True, False):
        dataset = ContestProblems("aime_2024", tmp_path, tokenizer, chat)
        samples = dataset.samples(Split(0, 1), 1, 400)
        asked = (
            "Please reason step by step, and put your final answer within \\boxed{}.\nThe answer is an integer "
            f"between 0 and 999 inclusive.\n\n{TEXTS[1]}"
        )
        turn = f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
        assert tokenizer.decode(samples[1].context) == (turn if chat else asked)
        longest = max(len(sample.context) for sample in samples)
        for sample, true in zip(samples, (3, 204), strict=True):
            (question,) = sample.questions
            assert question.answer_tokens == 400 - longest
            assert sample.is_contest
            ids = np.array(tokenizer(answer)["input_ids"], np.int32)
            assert question.concluded(ids) == "204"
            assert question.score(ids) == (true == 204)
            assert question.concluded(ids[:8]) is None
            assert question.score(ids[:8]) == 0
        with pytest.raises(
            UserError,
            match=f"--context {longest + 15}: .* takes {longest} tokens, which leaves fewer than 16",
        ):
            dataset.samples(Split(0, 1), 1, longest + 15)


def test_hmmt_has_its_own_instruction_and_grader(tmp_path):
    pytest.importorskip("math_verify")
    rows = [
        {"problem_idx": 1, "problem": "?", "answer": r"\frac{1}{576}", "problem_type": ["Combinatorics"]},
        {"problem_idx": 2, "problem": "?", "answer": r"-1, \sqrt{2}", "problem_type": ["Algebra"]},
    ]
    write(tmp_path / "hmmt_nov_2025.parquet", rows)
    tokenizer = byte_tokenizer()
    samples = ContestProblems("hmmt_nov_2025", tmp_path, tokenizer).samples(Split(0, 1), 1, 300)
    assert "within \\boxed{}.\n\n?<|im_end|>" in tokenizer.decode(samples[0].context)
    for answer, scores in ((r"\boxed{1/576}", [1, 0]), (r"\boxed{\{\sqrt{2}, -1\}}", [0, 1])):
        ids = np.array(tokenizer(answer)["input_ids"], np.int32)
        assert [sample.questions[0].score(ids) for sample in samples] == scores
    write(tmp_path / "hmmt_nov_2025.parquet", [{"problem": "?", "answer": "$$"}])
    with pytest.raises(UserError, match="expected the answer to be an expression in LaTeX, got"):
        _ = ContestProblems("hmmt_nov_2025", tmp_path, tokenizer).problems
