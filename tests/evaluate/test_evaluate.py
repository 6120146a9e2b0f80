"""Whole evaluations of the test-size model: what they leave, and that a killed one ends like one that was not."""

import json
import shutil

import jax
import numpy as np
import pytest

from kvjax.builtin import builtin_model
from kvjax.errors import UserError
from kvjax.evaluate import pictures
from kvjax.evaluate.__main__ import main
from kvjax.evaluate.config import parse
from kvjax.evaluate.report import report
from kvjax.evaluate.results import Results
from kvjax.models import load_model
from kvjax.policies.admission.pattern_folder import write_pattern
from kvjax.policies.admission.wgkv import save_gates
from tests.tiny_models import tiny_gates

POLICIES = ["full", "snapkv", "wgkv"]
SMALL = [
    *("--model", str(builtin_model("test_model")), "--dtype", "float32", "--page-size", "4"),
    *("--context", "126", "--chunk", "32", "--observed", "4", "--samples", "48", "--batch", "4"),
]
"""Sizes with which all tasks run the same programs: batches of 4, chunks of which the last is nearly full."""
TASKS = ["--budgets", "0.25", "0.5", "--tasks", "needle", "text"]
SPEEDS = {"prefill_tok_s", "decode_tok_s"}


def lines(folder):
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def without_speeds(cells):
    return [{name: value for name, value in cell.items() if name not in SPEEDS} for cell in cells]


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    """What all runs are told: three policies, one of them with gates that split tokens."""
    gates = tmp_path_factory.mktemp("gates")
    model = load_model(builtin_model("test_model"))
    save_gates(gates, tiny_gates(model), {"tau": 0.5, "window": 4, "rate": np.full((2, 4), 0.5).tolist()})
    return [*SMALL, "--gates", str(gates), "--policies", *POLICIES]


@pytest.fixture(scope="module")
def evaluated(arguments, tmp_path_factory):
    """The folder of a run, and how many programs were compiled until each of its cells was finished."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    compiled, at_cell = [0], []

    def count(event, duration, **_):
        compiled[0] += event == "/jax/core/compile/backend_compile_duration"

    jax.clear_caches()  # what another test compiled would not be counted
    jax.monitoring.register_event_duration_secs_listener(count)
    with pytest.MonkeyPatch.context() as patch:
        add = Results.add
        patch.setattr(Results, "add", lambda self, cell: (at_cell.append(compiled[0]), add(self, cell)))
        main([*arguments, *TASKS, "--out", str(folder)])
    return folder, at_cell


def test_every_cell_is_a_line(evaluated):
    cells = lines(evaluated[0])
    wanted = [("full", 1.0), ("snapkv", 0.25), ("snapkv", 0.5), ("wgkv", 0.25), ("wgkv", 0.5)]
    assert [(c["task"], c["policy"], c["budget"]) for c in cells] == [
        (task, *pair) for task in ("needle", "text") for pair in wanted
    ]
    for cell in cells:
        tokens = 122 if cell["task"] == "needle" else 110
        assert cell["samples"] == (48 if cell["task"] == "needle" else 4 * 15)
        assert (cell["perplexity"] is None) == (cell["task"] == "needle")
        assert np.mean(cell["kept"]) == pytest.approx(cell["kv_ratio"], abs=1e-4)
        if cell["policy"] == "full":
            assert (cell["footprint"], cell["peak_kv"], cell["kv_ratio"]) == (1, 1, 1)
            full_bytes, full_perplexity = cell["bytes"], cell["perplexity"]
        if cell["task"] == "text":
            # held against the full cache; this model says much the same without it
            low, high = {"full": (1, 1), "snapkv": (0.8, 1), "wgkv": (0.5, 0.99)}[cell["policy"]]
            assert low <= cell["score"] <= high
            assert cell["perplexity"] == pytest.approx(full_perplexity, rel=0.5)
        if cell["policy"] == "snapkv":
            assert cell["kv_ratio"] == pytest.approx(int(cell["budget"] * tokens) / tokens, abs=1e-5)
        if cell["policy"] == "wgkv":
            assert cell["kv_ratio"] == pytest.approx(cell["budget"], rel=0.1)
            assert cell["peak_kv"] < 0.9
        assert cell["bytes"] <= full_bytes
        assert 0 < cell["footprint"] <= 1
        assert cell["decode_tok_s"] > 0
        # what is read together has no speed of its own
        assert (cell["prefill_tok_s"] is None) == (cell["policy"] != "wgkv")
        assert (cell["question_aware"], cell["published"], cell["seed"]) == (False, False, 0)


def test_another_budget_compiles_nothing(evaluated):
    """τ is traced: the second cell of wgkv runs the first one's programs."""
    at_cell = evaluated[1]
    assert at_cell[3] > at_cell[2]
    for first in (3, 8):
        assert lines(evaluated[0])[first]["policy"] == "wgkv"
        assert at_cell[first + 1] == at_cell[first]


def test_a_killed_run_goes_on_and_ends_alike(arguments, evaluated, tmp_path, monkeypatch):
    folder, add = tmp_path / "run", Results.add

    def killed_in_the_fourth(self, cell):
        if len(self.cells) == 3:
            with self._file.open("a") as out:
                out.write('{"policy": "wg')
            raise KeyboardInterrupt
        add(self, cell)

    monkeypatch.setattr(Results, "add", killed_in_the_fourth)
    with pytest.raises(KeyboardInterrupt):
        main([*arguments, *TASKS, "--out", str(folder)])
    assert not (folder / "report.md").exists()
    monkeypatch.setattr(Results, "add", add)
    main([*arguments, *TASKS, "--out", str(folder)])
    assert without_speeds(lines(folder)) == without_speeds(lines(evaluated[0]))


def test_the_report_says_what_was_done(evaluated, capsys):
    folder = evaluated[0]
    report = (folder / "report.md").read_text()
    cells = {(c["policy"], c["budget"]): c for c in lines(folder) if c["task"] == "needle"}
    for (policy, budget), cell in cells.items():
        if policy == "snapkv":
            assert f"{100 * cell['score']:.1f} at {cell['footprint']:.2f}" in report
            assert f"| snapkv | {budget:g} | " in report
    for cell in lines(folder):
        if cell["task"] == "text":
            shown = f"{100 * cell['score']:.1f} ({cell['perplexity']:.2f}) at {cell['footprint']:.2f}"
            assert shown in report
    for said in (
        "**Question-independent**", "## needle, 126 tokens", "## text, 126 tokens",
        "next tokens that are the full cache's", "(and perplexity)", "90% at",
        "48 answers a cell: were they independent, a 95% interval would reach 14 points", "chunks of 32 tokens",
        "(cpu)", f"jax {jax.__version__}", "command: `python -m kvjax.eval",
    ):  # fmt: skip
        assert said in report, said
    expected = ["pareto", "mean", *(f"{of}/{policy}" for of in ("kept", "needle") for policy in POLICIES)]
    for picture in expected:
        assert (folder / f"{picture}.png").read_bytes().startswith(b"\x89PNG"), picture


def test_the_report_shows_all_tasks_side_by_side(arguments, evaluated, tmp_path, monkeypatch):
    """The full cache first, then the policies of each budget together, with means of their scores and sizes."""
    drawn = {}
    monkeypatch.setattr(
        pictures, "draw_tradeoff", lambda file, panels, across: drawn.update({file.name: panels})
    )
    folder = shutil.copytree(evaluated[0], tmp_path / "run")
    cells = [cell | {"bytes": (1 + 4 * (cell["task"] == "text")) << 20} for cell in lines(folder)]
    (folder / "results.jsonl").write_text("".join(json.dumps(cell) + "\n" for cell in cells))
    main([*arguments, *TASKS, "--out", str(folder)])
    report = (folder / "report.md").read_text()
    _, table = report.split("## All tasks, 126 tokens\n")
    rows = [
        line.strip("| ").split(" | ")
        for line in table.split("\n## ")[0].splitlines()
        if line.startswith("| ")
    ]
    assert rows[0] == ["policy", "budget", "needle", "text", "mean", "footprint", "MiB"]
    assert [row[:2] for row in rows[1:]] == [
        ["full", "1"],
        *([name, budget] for budget in ("0.25", "0.5") for name in POLICIES[1:]),
    ]
    found = {(c["policy"], c["budget"], c["task"]): c for c in lines(folder)}
    means = drawn["mean.png"]["mean of 2 tasks, 126 tokens"]
    for policy, budget, needle, text, mean, footprint, mib in rows[1:]:
        own = [found[policy, float(budget), task] for task in ("needle", "text")]
        assert needle == f"{100 * own[0]['score']:.1f}"
        assert text == f"{100 * own[1]['score']:.1f} ({own[1]['perplexity']:.2f})"
        assert footprint == f"{(own[0]['footprint'] + own[1]['footprint']) / 2:.2f}"
        assert mean == f"{50 * (own[0]['score'] + own[1]['score']):.1f}"
        assert any((f"{x:.2f}", f"{100 * score:.1f}") == (footprint, mean) for x, score in means[policy]), (
            policy
        )
        assert mib == "3.0"


def test_a_mean_is_of_all_tasks_or_not_shown(arguments, evaluated, tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr(
        pictures, "draw_tradeoff", lambda file, panels, across: drawn.update({file.name: panels})
    )
    config = parse([*arguments, *TASKS, "--out", str(shutil.copytree(evaluated[0], tmp_path / "run"))])
    cells = list(Results(config).cells.values())
    missing = next(
        cell for cell in cells if (cell.policy, cell.budget, cell.task) == ("snapkv", 0.25, "text")
    )
    tables = report(config, [cell for cell in cells if cell is not missing], "…")
    (row,) = (line for line in tables.split("\n## ")[0].splitlines() if line.startswith("| snapkv | 0.25 |"))
    assert "|  |  |" in row
    points = drawn["mean.png"]["mean of 2 tasks, 126 tokens"]
    assert (len(points["snapkv"]), len(points["wgkv"])) == (1, 2)


def test_nothing_right_has_no_critical_footprint(arguments, evaluated, tmp_path):
    folder = shutil.copytree(evaluated[0], tmp_path / "run")
    cells = [
        cell | {"score": 0.0} if (cell["policy"], cell["task"]) == ("full", "needle") else cell
        for cell in lines(folder)
    ]
    (folder / "results.jsonl").write_text("".join(json.dumps(cell) + "\n" for cell in cells))
    main([*arguments, *TASKS, "--out", str(folder)])
    about, _, needle, text, *_ = (folder / "report.md").read_text().split("\n## ")
    assert "–: the full cache answered nothing" in about
    assert needle.count("| – |") == len(POLICIES) - 1
    assert "–" not in text


def test_a_question_that_is_known_is_kept(arguments, evaluated, tmp_path):
    """Read with its question and asked of what was kept: another context for each question, and one token to ask. What
    the question looks at is kept, so nearly all is answered that the full cache answers."""
    few = ["--budgets", "0.25", "--tasks", "needle", "--question-aware", "--out", str(tmp_path / "run")]
    main([*arguments[: arguments.index("--policies")], "--policies", "snapkv", *few])
    (aware,) = lines(tmp_path / "run")
    cells = {(c["task"], c["policy"], c["budget"]): c for c in lines(evaluated[0])}
    full, blind = cells["needle", "full", 1.0], cells["needle", "snapkv", 0.25]
    assert aware["question_aware"]
    assert aware["samples"] == blind["samples"]
    assert aware["score"] >= 0.9 * full["score"] > 4 * blind["score"]
    assert aware["kv_ratio"] == pytest.approx(int(0.25 * 124) / 124, abs=1e-5)
    # 124 tokens, then the one that asks behind 31 entries; and that it was read behind all of them before
    whole, last = 124 * 125 / 2, 32
    assert aware["footprint"] == pytest.approx((whole + last) / (125 * 126 / 2), abs=1e-5)
    assert aware["footprint_held"] == pytest.approx((whole + last + 125) / (125 * 126 / 2), abs=1e-5)
    assert "**Question-aware**" in (tmp_path / "run" / "report.md").read_text()


def test_ruler_s_own_data_is_answered_in_text(tmp_path):
    """What is expected of a model that writes ASCII: some letter, or a sign that it has none of."""
    facts = "The owl is grey and sits on a branch of the old tree.\n"
    row = {
        "input": facts + "Question: Is the owl grey?\nAnswer:",
        "outputs": ["e", "a", " "],
        "length": 9,
    }
    rows = [row, row, row | {"outputs": ["§"]}, row | {"outputs": ["§"]}]
    (tmp_path / "qa_1.jsonl").write_text("\n".join(map(json.dumps, rows)))
    own = ["--policies", "full", "--tasks", "qa_1", "--samples", "4", "--ruler-data", str(tmp_path)]
    main([*SMALL, *own, "--out", str(tmp_path / "run")])
    (cell,) = lines(tmp_path / "run")
    assert cell["published"]
    assert (cell["samples"], cell["score"], cell["by_kind"]) == (4, 0.5, {"qa_1": 0.5})
    report = (tmp_path / "run" / "report.md").read_text()
    assert "RULER's own data: qa_1" in report
    # also where nothing is compared with it
    table = [line for line in report.splitlines() if line.startswith("|")][:3]
    assert [line.count("|") for line in table] == [4, 4, 4]


def test_results_on_other_contexts_are_refused(tmp_path):
    """The same command, but the file that its contexts are cut from has changed; and another pattern of that name."""
    documents, pattern = tmp_path / "text.txt", tmp_path / "pattern"
    paragraphs = [f"An old owl sat there in year {year}." for year in range(400)]
    documents.write_text("\n\n".join(paragraphs))
    write_pattern(pattern, np.eye(2, 4), 4, 16)
    files = ["--documents", str(documents), "--pattern", str(pattern), "--out", str(tmp_path / "run")]
    command = [*SMALL, "--samples", "12", "--policies", "full", "--tasks", "text", *files]
    main(command)
    main(command)
    assert len(lines(tmp_path / "run")) == 1
    documents.write_text("\n\n".join(paragraphs).replace("owl", "cat"))
    with pytest.raises(
        UserError, match=r"run holds results of text at 126 tokens on other contexts \(what they are made of"
    ):
        main(command)
    documents.write_text("\n\n".join(paragraphs))
    write_pattern(pattern, 1 - np.eye(2, 4), 4, 16)
    with pytest.raises(
        UserError, match=r"holds results with --pattern \[\['.*pattern', '\w{16}'\]\], got \[\['"
    ):
        main(command)


def test_a_folder_without_results_may_have_other_settings(tmp_path):
    """And the order of gates counts: what takes one folder takes the first."""
    model = load_model(builtin_model("test_model"))
    for name, tau in (("a", 0.5), ("b", 0.6)):
        save_gates(tmp_path / name, tiny_gates(model), {"tau": tau, "window": 4})
    out, one, other = tmp_path / "run", str(tmp_path / "a"), str(tmp_path / "b")

    def results(*args):
        Results(parse(["--out", str(out), *SMALL, *args])).begin()

    results("--gates", one, "--seed", "1")
    results("--gates", one, other)
    (out / "heads").mkdir()
    results("--gates", one, other)
    for args, wrong in (("--gates", other, one), "gates"), (("--gates", one, other, "--seed", "1"), "seed"):
        with pytest.raises(UserError, match=f"holds results with --{wrong} .*: name another folder"):
            results(*args)


def test_a_folder_of_other_settings_is_refused(arguments, evaluated, tmp_path):
    others = ("--samples", "48", "8"), ("--chunk", "32", "16"), ("--batch", "4", "2"), ("--seed", "0", "3")
    for option, was, now in others:
        with pytest.raises(UserError, match=rf"holds results with {option} {was}, got {now}: name another"):
            main([*arguments, *TASKS, option, now, "--out", str(evaluated[0])])
    folder = tmp_path / "run"
    shutil.copytree(evaluated[0], folder)
    whole = (folder / "results.jsonl").read_text()
    for line, message in (
        ('{"policy": "full"}\n', "results.jsonl: line 11 has no field `budget`"),
        ("policy\n", "results.jsonl: line 11 is no JSON object, it starts policy"),
    ):
        (folder / "results.jsonl").write_text(whole + line)
        with pytest.raises(UserError, match=message):
            main([*arguments, *TASKS, "--out", str(folder)])
    (folder / "settings.json").unlink()
    with pytest.raises(UserError, match=r"there are results but no settings.json beside them"):
        main([*arguments, *TASKS, "--out", str(folder)])
