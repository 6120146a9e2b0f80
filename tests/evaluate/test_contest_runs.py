"""Tests of whole evaluations on contests: their results, the report, and options that are refused."""

import dataclasses
import json
import math
import shutil

import pytest

from kvjax.builtin import builtin_model
from kvjax.errors import UserError
from kvjax.evaluate.__main__ import main
from kvjax.evaluate.recovery import Recovery, recovery
from kvjax.evaluate.results import read_results
from tests.evaluate.whole_run import lines, without_speeds

pytestmark = pytest.mark.slow

LENGTH = 140
"""Length of a prompt of 75 tokens and an answer of 65, which is one token and one block."""
POLICIES = ["full", "streaming_llm", "r_kv:when=position,every=16,observed=4"]
SAMPLING = "temperature 0.7, top-p 0.8, top-k 20"


def command(data, out, *args, tasks=("aime_2024",), policies=POLICIES):
    return [
        *("--model", str(builtin_model("test_model")), "--dtype", "float32", "--page-size", "4"),
        *("--context", str(LENGTH), "--samples", "4", "--batch", "4", "--budgets", "0.25"),
        *("--data", f"contests={data}", "--tasks", *tasks, "--policies", *policies, "--out", str(out), *args),
    ]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("contests")
    for year in (2024, 2025):
        rows = [{"ID": f"{year}-{i}", "Problem": f"What is {i} + {i}?", "Answer": 2 * i} for i in (1, 2)]
        (folder / f"aime_{year}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


@pytest.fixture(scope="module")
def evaluated(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    main(command(data, out))
    return out


def rewritten(folder, out, **scores):
    """Return a copy of the folder whose results have these scores, and a standard error of 0.05."""
    shutil.copytree(folder, out)
    results = lines(folder)
    for result in results:
        result["score"] = scores[result["policy"].partition(":")[0]]
        result["drawn"]["error"] = 0.05
    (out / "results.jsonl").write_text("".join(json.dumps(result) + "\n" for result in results))
    return out


@pytest.mark.thorough
def test_results_state_the_draws_and_the_entries_held(evaluated):
    full, streaming, evicting = lines(evaluated)
    for result in (full, streaming, evicting):
        assert (result["task"], result["context"], result["samples"], result["score"]) == (
            "aime_2024",
            LENGTH,
            4,
            0.0,
        )
        assert result["metric"] == rf"pass@1: the last \boxed{{…}} is right; drawn at {SAMPLING}"
        assert result["by_kind"] == {"2024-1": 0.0, "2024-2": 0.0}
        assert result["drawn"]["draws"] == 2
        assert result["drawn"]["cut"] + result["drawn"]["without"] == 1
        assert result["published"]
    assert (full["budget"], full["footprint"], full["kv_ratio"]) == (1.0, 1.0, 1.0)
    # the budget is a quarter of the length, and the most is held as the prompt is read
    assert 35 / LENGTH < streaming["peak_kv"] < 75 / LENGTH
    assert streaming["kv_ratio"] < 0.5
    assert evicting["footprint"] < 1
    assert streaming["bytes"] < 0.6 * full["bytes"]


@pytest.mark.slow
def test_answers_are_written_for_reading(evaluated):
    for result in lines(evaluated):
        file = (
            evaluated / "answers" / f"aime_2024-{LENGTH}-{result['policy']}-{result['budget']:g}.jsonl"
        ).read_text()
        rows = [json.loads(line) for line in file.splitlines()]
        places = [(row["kind"], row["draw"], row["true"]) for row in rows]
        assert places == [(f"2024-{i}", draw, str(2 * i)) for i in (1, 2) for draw in (0, 1)]
        assert sum(row["cut"] for row in rows) == 4 * result["drawn"]["cut"]
        assert all(row["said"] is None and row["text"] and row["tokens"] for row in rows)


@pytest.mark.slow
def test_finished_results_are_kept(data, evaluated, tmp_path):
    """The last result is removed. Only this one is measured again, with the same outcome."""
    out = shutil.copytree(evaluated, tmp_path / "run")
    known = (out / "results.jsonl").read_text().splitlines(keepends=True)
    (out / "results.jsonl").write_text("".join([known[0].replace('"score": 0.0', '"score": 1.0'), known[1]]))
    main(command(data, out))
    again = lines(out)
    assert again[0]["score"] == 1.0
    assert without_speeds(again[1:]) == without_speeds(lines(evaluated)[1:])


def test_the_report_has_pass_at_1_and_relative_recovery(data, evaluated, tmp_path):
    out = rewritten(evaluated, tmp_path / "run", full=0.5, streaming_llm=0.2, r_kv=0.4)
    main(command(data, out))
    report = (out / "report.md").read_text()
    for text in (
        f"is right; drawn at {SAMPLING}; 2 problems, 2 draws of each.",
        "Relative recovery is pass@1 divided by that of this run's full cache",
        "| full | 1 |  | 50.0 ± 5.0 | 1.00 | ",
        # √(0.05² + (0.4 · 0.05)²) / 0.5
        "| streaming_llm | 0.25 | 35 | 20.0 ± 5.0 | 0.40 ± 0.11 | ",
        "| r_kv:when=position,every=16,observed=4 | 0.25 | 35 | 40.0 ± 5.0 | 0.80 ± 0.13 | ",
    ):
        assert text in report, text


@pytest.mark.slow
def test_the_dense_model_may_come_from_another_run(data, evaluated, tmp_path):
    """For KVPOP, the dense model is the model before it had a small cache."""
    dense = rewritten(evaluated, tmp_path / "dense", full=0.8, streaming_llm=0.1, r_kv=0.1)
    out = rewritten(evaluated, tmp_path / "run", full=0.5, streaming_llm=0.2, r_kv=0.4)
    main(command(data, out, "--dense", str(dense)))
    report = (out / "report.md").read_text()
    assert f"pass@1 divided by that of the full cache of {dense}" in report
    assert "| streaming_llm | 0.25 | 35 | 20.0 ± 5.0 | 0.25 ± " in report
    for args, message in (
        (["--context", "170"], "aime_2024 at 170 tokens has no result of the full cache"),
        (["--temperature", "0.6"], f"expected .* drawn at temperature 0.6.*, got .* drawn at {SAMPLING}"),
    ):
        with pytest.raises(UserError, match=message):
            main(command(data, tmp_path / "new", "--dense", str(dense), *args))
    other = tmp_path / "aime_2024.jsonl"
    other.write_text(json.dumps({"problem": "Another?", "answer": "1"}))
    with pytest.raises(UserError, match="has other problems or another tokenizer"):
        main(command(other, tmp_path / "new", "--dense", str(dense)))
    with pytest.raises(UserError, match=r"--dense .*nowhere: there is no results.jsonl"):
        main(command(data, tmp_path / "new", "--dense", str(tmp_path / "nowhere")))


def test_recovery_over_several_contests_uses_the_mean(evaluated):
    """The numbers are those of KVPOP's Table 1: the mean of a row over that of the dense model is 0.80 for KVPOP and
    0.12 for StreamingLLM."""
    result = read_results(evaluated / "results.jsonl")["full", 1.0, "aime_2024", LENGTH]
    names = "aime_2024", "aime_2025", "hmmt_feb_2025", "hmmt_nov_2025"

    def row(*scores, error=0.02):
        assert result.drawn is not None
        drawn = dataclasses.replace(result.drawn, error=error)
        return [
            dataclasses.replace(result, task=task, score=score, drawn=drawn)
            for task, score in zip(names, scores, strict=True)
        ]

    dense = {(reference.task, reference.context): reference for reference in row(0.49, 0.43, 0.20, 0.30)}
    for scores, ratio in (((0.38, 0.33, 0.18, 0.25), 0.80), ((0.03, 0.07, 0.05, 0.02), 0.12)):
        found = recovery(row(*scores), dense)
        assert round(found.ratio, 2) == ratio
        error = math.sqrt(4 * 0.02**2 * (1 + found.ratio**2)) / 1.42
        assert found.error == pytest.approx(error)
    single = recovery(row(0.38, 0.33, 0.18, 0.25)[:1], dense)
    assert round(single.ratio, 2) == 0.78
    assert str(Recovery(1.125, None)) == "1.12"
    assert recovery(row(0.1, 0.1, 0.1, 0.1, error=None), dense).error is None
    assert recovery(row(0.1, 0.1, 0.1, 0.1), dict(list(dense.items())[1:])) is None
    nothing = {key: dataclasses.replace(reference, score=0.0) for key, reference in dense.items()}
    assert recovery(row(0.1, 0.1, 0.1, 0.1), nothing) is None


@pytest.mark.thorough
def test_the_report_shows_several_contests_side_by_side(data, evaluated, tmp_path):
    """The table has the recovery of their mean. Here the second contest's results are made from those of the first."""
    out = rewritten(evaluated, tmp_path / "run", full=0.5, streaming_llm=0.2, r_kv=0.4)
    known = lines(out)
    both = known + [result | {"task": "aime_2025", "score": result["score"] / 2} for result in known]
    (out / "results.jsonl").write_text("".join(json.dumps(result) + "\n" for result in both))
    main(command(data, out))
    report = (out / "report.md").read_text()
    assert (
        "| policy | budget | aime_2024 | aime_2025 | mean | relative recovery | footprint | MiB |" in report
    )
    assert "| streaming_llm | 0.25 | 20.0 | 10.0 | 15.0 | 0.40 ± " in report


def test_other_sampling_settings_need_another_folder(data, evaluated):
    for option, was, now in (("--temperature", "0.7", "0.6"), ("--top-p", "0.8", "0.9"), ("--top-k", 20, 5)):
        with pytest.raises(UserError, match=f"holds results with {option} {was}, got {now}: name another"):
            main(command(data, evaluated, option, str(now)))
    contexts = command(data, evaluated, tasks=["needle"], policies=["full"])
    with pytest.raises(UserError, match="holds results with --temperature 0.7, got None"):
        main(contexts)


@pytest.mark.parametrize(
    ("given", "args", "message"),
    [
        (
            {"tasks": ["aime_2024", "needle"]},
            [],
            "contests and other tasks need separate --out folders, got aime_2024 and needle",
        ),
        (
            {},
            ["--question-aware"],
            "--question-aware is for tasks with a context .*, got the contest aime_2024",
        ),
        (
            {"policies": ["snapkv"]},
            [],
            "--policies snapkv: its cache grows with the answer, .* contests such as aime_2024 need full, ",
        ),
        (
            {"policies": ["wgkv:calibrated"]},
            ["--gates", "builtin"],
            "--policies wgkv:calibrated: its cache grows with the answer",
        ),
        (
            {"tasks": ["needle"], "policies": ["r_kv:when=position"]},
            [],
            "r_kv:when=position evicts while decoding, which is measured on contests: aime_2024, aime",
        ),
        ({}, ["--context", "64"], "--context 64: the longest prompt of aime_2024 takes"),
        (
            {},
            ["--budgets", "0.02"],
            "streaming_llm at 0.02 of 140 tokens: a budget of 2.8 entries of each kv",
        ),
        ({}, ["--temperature", "0"], "--temperature must be above 0, got 0"),
        ({}, ["--top-p", "1.5"], "--top-p must be above 0 and at most 1, got 1.5"),
        ({}, ["--top-k", "-1"], "--top-k must be at least 0, got -1"),
        ({"tasks": ["needle"], "policies": ["full"]}, ["--dense", "x"], "--dense is for contests"),
    ],
)
def test_invalid_options_are_refused_in_one_line(given, args, message, data, tmp_path):
    with pytest.raises(UserError, match=message):
        main(command(data, tmp_path / "run", *args, **given))
    assert not (tmp_path / "run" / "results.jsonl").exists()


@pytest.mark.slow
def test_a_file_is_refused_for_several_contests(data, tmp_path):
    file = data / "aime_2024.jsonl"
    with pytest.raises(
        UserError, match=r"aime_2024.jsonl holds one contest, got --tasks aime_2024 aime_2025"
    ):
        main(command(file, tmp_path / "run", tasks=["aime_2024", "aime_2025"]))
