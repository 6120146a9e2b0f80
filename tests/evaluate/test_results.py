"""Tests of a folder of results, and of results that may not be added to it."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from kvjax.builtin import builtin_model
from kvjax.errors import UserError
from kvjax.evaluate.__main__ import main
from kvjax.evaluate.config import parse
from kvjax.evaluate.merge import merge
from kvjax.evaluate.results import Results, read_results
from kvjax.models import load_model
from kvjax.policies.admission.wgkv import save_gates
from tests.evaluate.whole_run import SMALL, TASKS, lines
from tests.tiny_models import tiny_gates

COMMITTED = Path(__file__).parents[2] / "docs" / "evaluations" / "qwen2.5-coder-0.5b"


def committed_result():
    """Return the first of the results in the repository."""
    return next(iter(read_results(COMMITTED / "results.jsonl").values()))


@pytest.mark.thorough
def test_results_on_other_contexts_are_refused(tmp_path):
    """The command is the same, but the file that its contexts are cut from has changed. The same contents in another
    place are accepted."""
    documents = tmp_path / "text.txt"
    paragraphs = [f"An old owl sat there in year {year}." for year in range(400)]
    documents.write_text("\n\n".join(paragraphs))
    files = ["--data", f"documents={documents}", "--out", str(tmp_path / "run")]
    command = [*SMALL, "--samples", "12", "--policies", "full", "--tasks", "text", *files]
    main(command)
    main(command)
    assert len(lines(tmp_path / "run")) == 1
    moved = tmp_path / "elsewhere" / "text.txt"
    moved.parent.mkdir()
    documents.rename(moved)
    main([word.replace(str(documents), str(moved)) for word in command])
    assert len(lines(tmp_path / "run")) == 1
    documents.write_text("\n\n".join(paragraphs).replace("owl", "cat"))
    with pytest.raises(
        UserError, match=r"holds results of text at 126 tokens on other contexts \(their data"
    ):
        main(command)


@pytest.mark.thorough
def test_results_of_other_weights_or_contexts_are_refused(tmp_path):
    """Another model under the same name is refused, and so are contexts that were made differently."""
    folder, out = tmp_path / "model", tmp_path / "run"
    shutil.copytree(builtin_model("test_model"), folder)
    command = [*SMALL, "--model", str(folder), "--policies", "full", "--tasks", "needle", "--out", str(out)]
    main(command)
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("k_proj.weight"))
    save_file(tensors | {name: -tensors[name]}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        UserError, match=r"holds results with --model \['.*', '\w{16}'\], got \['.*', '\w{16}'\]"
    ):
        main(command)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    main(command)
    results = out / "results.jsonl"
    (result,) = lines(out)
    results.write_text(results.read_text().replace(result["contexts"], "another"))
    with pytest.raises(
        UserError, match=r"run holds results of needle at 126 tokens on other contexts \(their"
    ):
        main(command)


def test_a_folder_without_results_may_have_other_settings(tmp_path):
    """The order of gates counts, because a policy that takes one folder takes the first."""
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
    # gates of another method may be added or left out
    shutil.copytree(one, tmp_path / "kvzip")
    described = tmp_path / "kvzip" / "config.json"
    described.write_text(described.read_text().replace("wgkv", "fast_kvzip"))
    results("--gates", str(tmp_path / "kvzip"))
    results("--gates", one, other)
    assert len(json.loads((out / "settings.json").read_text())["gates"]) == 3
    with pytest.raises(UserError, match="holds results with --gates"):
        results("--gates", one)
    # options that did not exist when the folder was made had their defaults
    settings = json.loads((out / "settings.json").read_text())
    del settings["turns"], settings["order_length"]
    (out / "settings.json").write_text(json.dumps(settings))
    results("--gates", one, other)
    (out / "settings.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match="holds results with --order-length 1024, got 512"):
        results("--gates", one, other, "--order-length", "512")


@pytest.mark.slow
def test_results_with_other_settings_are_refused(arguments, evaluated, tmp_path):
    others = ("--samples", "48", "8"), ("--chunk", "32", "16"), ("--batch", "4", "2"), ("--seed", "0", "3")
    for option, was, now in others:
        with pytest.raises(UserError, match=rf"holds results with {option} {was}, got {now}: name another"):
            main([*arguments, *TASKS, option, now, "--out", str(evaluated[0])])
    folder = tmp_path / "run"
    shutil.copytree(evaluated[0], folder)
    whole = (folder / "results.jsonl").read_text()
    for line, message in (
        ('{"policy": "full"}\n', "results.jsonl: line 11 has no field `described`"),
        ("policy\n", "results.jsonl: line 11 is no JSON object, it starts policy"),
    ):
        (folder / "results.jsonl").write_text(whole + line)
        with pytest.raises(UserError, match=message):
            main([*arguments, *TASKS, "--out", str(folder)])
    (folder / "settings.json").unlink()
    with pytest.raises(UserError, match=r"it has results but no settings.json"):
        main([*arguments, *TASKS, "--out", str(folder)])


def test_gates_in_a_policy_string_may_not_change(tmp_path):
    """Other policies may be added meanwhile."""
    model, gates, out = load_model(builtin_model("test_model")), tmp_path / "gates", str(tmp_path / "run")
    save_gates(gates, tiny_gates(model), {"tau": 0.5, "window": 4})
    gated = f"wgkv:gates={gates}"
    Results(parse(["--out", out, *SMALL, "--policies", gated])).begin()
    (tmp_path / "run" / "heads").mkdir()
    Results(parse(["--out", out, *SMALL, "--policies", "full"])).begin()
    save_gates(gates, tiny_gates(model, seed=2), {"tau": 0.5, "window": 4})
    Results(parse(["--out", out, *SMALL, "--policies", "full"])).begin()
    with pytest.raises(UserError, match=f"holds results with other gates than {gates} has now: name another"):
        Results(parse(["--out", out, *SMALL, "--policies", "full", gated]))


def test_a_label_may_not_change_its_policy(tmp_path):
    """It may for another task, whose results are not there."""
    before, now = "snapkv:ratio=0.5", "snapkv:ratio=0.05"

    def config(policy, task, *args):
        policies = ["--policies", json.dumps({"SnapKV": policy})]
        return parse(["--out", str(tmp_path), *SMALL, "--tasks", task, *policies, *args])

    results = Results(config(before, "needle", "--shard", "0/1"))
    results.begin()
    key = {"policy": "SnapKV", "budget": 1.0, "task": "needle", "context": 126}
    results.add(dataclasses.replace(committed_result(), described=before, **key))
    Results(config(before, "needle", "--shard", "0/1"))
    Results(config(now, "text", "--shard", "0/1"))
    message = f"shard-0-of-1 holds results of SnapKV with the policy {before}, got {now}: name another label"
    with pytest.raises(UserError, match=f"--out .*{message}"):
        Results(config(now, "needle", "--shard", "0/1"))
    with pytest.raises(UserError, match=f"--merge: .*{message}"):
        merge(config(now, "needle"))
    assert len(merge(config(before, "needle"))) == 1


def test_the_settings_of_committed_results_are_accepted(tmp_path):
    """They have digests of their data, which later runs need not give."""
    for name in ("settings.json", "results.jsonl"):
        shutil.copy(COMMITTED / name, tmp_path)
    settings = json.loads((tmp_path / "settings.json").read_text())
    assert settings["data"]
    sizes = ["--samples", "24", "--chunk", "256", "--observed", "32", "--batch", "24", "--dtype", "bfloat16"]
    command = ["--out", str(tmp_path), "--model", settings["model"][0], "--context", "2048", *sizes]
    config = parse([*command, "--policies", '{"full cache": "full"}', "--tasks", "niah_single_1"])
    assert len(Results(config).finished) > 100
