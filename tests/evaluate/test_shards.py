"""Tests that merged shards equal a single evaluation."""

import json
import shutil

import pytest

from kvjax.cli.shards import INDEX_VARIABLES, Shard
from kvjax.errors import UserError
from kvjax.evaluate.__main__ import main
from kvjax.evaluate.config import parse
from tests.evaluate.whole_run import TASKS, lines, without_speeds

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def sharded(arguments, tmp_path_factory):
    """Return a folder with both shards of an evaluation, and the arguments that made them."""
    folder = tmp_path_factory.mktemp("sharded") / "run"
    command = [*arguments, *TASKS, "--out", str(folder)]
    for index in range(2):
        main([*command, "--shard", f"{index}/2"])
    return folder, command


@pytest.fixture
def copied(sharded, tmp_path):
    """Return a copy of that folder, and arguments for it."""
    folder, command = sharded
    shutil.copytree(folder, tmp_path / "run")
    return tmp_path / "run", [*command[:-1], str(tmp_path / "run")]


def test_merged_shards_equal_a_single_evaluation(evaluated, copied):
    (whole, _), (folder, command) = evaluated, copied
    parts = [lines(folder / f"shard-{index}-of-2") for index in range(2)]
    assert all(parts)
    assert not (folder / "shard-0-of-2" / "report.md").exists()
    main([*command, "--merge"])
    assert without_speeds(lines(folder)) == without_speeds(lines(whole))
    assert len(lines(folder)) == sum(map(len, parts))
    assert (folder / "settings.json").read_bytes() == (whole / "settings.json").read_bytes()
    assert (folder / "report.md").is_file()
    merged = lines(folder)
    main(command)  # nothing is left to measure
    assert lines(folder) == merged


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda folder: shutil.rmtree(folder / "shard-1-of-2"), "lacks shards 1 of 2"),
        (lambda folder: [shutil.rmtree(path) for path in folder.glob("shard-*")], "has no shard's folder"),
        (lambda folder: (folder / "shard-0-of-3").mkdir(), "has shards of 2 and of 3"),
        (
            lambda folder: (folder / "shard-0-of-2" / "results.jsonl").write_text(""),
            r"results are missing, first full at 1 on needle, 126 tokens",
        ),
        (
            lambda folder: (folder / "shard-0-of-2" / "results.jsonl").unlink(),
            r"results are missing, first full at 1 on needle, 126 tokens",
        ),
        (
            lambda folder: (folder / "shard-1-of-2" / "settings.json").write_text("{}"),
            "shard-1-of-2 was measured with other settings than the rest",
        ),
    ],
)
def test_missing_shards_and_results_are_named(harm, message, copied):
    folder, command = copied
    harm(folder)
    with pytest.raises(UserError, match=message):
        main([*command, "--merge"])
    assert not (folder / "results.jsonl").exists()


def test_a_merge_keeps_earlier_results_and_settings(copied):
    folder, command = copied
    main([*command, "--merge"])
    before, policies = lines(folder), command.index("--policies")
    fewer = [*command[: policies + 1], "snapkv", *command[policies + 4 :], "--merge"]
    main(fewer)
    snapkv = [line for line in before if line["policy"] == "snapkv"]
    assert lines(folder) == snapkv + [line for line in before if line not in snapkv]
    with pytest.raises(UserError, match="was measured with --question-aware False, got True"):
        main([*command, "--merge", "--question-aware"])


def test_a_merge_joins_the_gates_that_policies_name(copied):
    folder, command = copied
    named = {"shard-0-of-2": {"a": "1"}, "shard-1-of-2": {"b": "2"}}
    for name, gates in named.items():
        file = folder / name / "settings.json"
        settings = json.loads(file.read_text())
        settings["model"][0] = f"/{name}/model"  # the same weights elsewhere
        file.write_text(json.dumps(settings | {"named": gates}))
    main([*command, "--merge"])
    assert json.loads((folder / "settings.json").read_text())["named"] == {"a": "1", "b": "2"}
    file.write_text(json.dumps(settings | {"named": {"a": "2"}}))
    with pytest.raises(UserError, match="shard-1-of-2 was measured with other gates in a than the rest"):
        main([*command, "--merge"])


def test_the_batch_system_gives_the_shards_index(monkeypatch):
    for name in INDEX_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert Shard.parse("3/8") == Shard(3, 8)
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "5")
    assert Shard.parse("8") == Shard(5, 8)
    assert parse(["--out", "runs/x", "--shard", "8"]).out.name == "shard-5-of-8"
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "8")
    for text in ("8", "8/8", "-1/8", "a/b", "", "/2", "2/"):
        with pytest.raises(UserError, match=f"--shard {text}: expected an index from 0 and a count above it"):
            Shard.parse(text)
    with pytest.raises(UserError, match="--shard is for measuring"):
        parse(["--out", "runs/x", "--shard", "0/8", "--merge"])
