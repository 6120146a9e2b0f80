"""Merge the shards of an evaluation into one folder of results."""

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

from kvjax.cli.shards import Shard
from kvjax.errors import UserError
from kvjax.evaluate.config import EvaluateConfig
from kvjax.evaluate.results import (
    ANSWERS_FOLDER,
    HEADS_FOLDER,
    MEASURED_WITH,
    Result,
    check_labels,
    comparable,
    join_gates,
    read_results,
)
from kvjax.evaluate.sizing import pairs
from kvjax.files import write_text

RESULTS = "results.jsonl"


def merge(config: EvaluateConfig) -> list[Result]:
    """Write the results of all shards into --out and return them.

    They have the order of an evaluation without shards. Results of other policies and tasks that --out had before
    follow.

    Raises:
        UserError: a shard or a result is missing, folders were measured with different settings or contexts, or with
            other settings or policies than the command line's.
    """
    shards = _shard_folders(config.out)
    folders = [*([config.out] if (config.out / RESULTS).exists() else []), *shards]
    settings = [_settings(folder) for folder in folders]
    merged: dict[tuple[str, float, str, int], Result] = {}
    contexts: dict[tuple[str, int], str] = {}
    named: dict[str, str] = {}
    gates: list[list[str]] | None = []
    for folder, folder_settings in zip(folders, settings, strict=True):
        _check(folder, folder_settings, settings[0], config)
        if (gates := join_gates(gates, folder_settings.get("gates", []))) is None:
            raise UserError(f"--merge: {folder} was measured with other --gates than the rest")
        for path, digest in folder_settings.get("named", {}).items():
            if named.setdefault(path, digest) != digest:
                raise UserError(f"--merge: {folder} was measured with other gates in {path} than the rest")
        if (folder / RESULTS).exists():  # a shard without work has no file
            results = read_results(folder / RESULTS)
            check_labels(config, results.values(), f"--merge: {folder}")
            merged |= results
    for result in merged.values():
        if contexts.setdefault((result.task, result.context), result.contexts) != result.contexts:
            raise UserError(
                f"--merge: the shards measured {result.task} at {result.context} tokens on different contexts"
            )
    wanted = [
        (compared.label, budget, task, length)
        for length in config.context
        for task in config.tasks
        for compared, budget in pairs(config)
    ]
    missing = [key for key in wanted if key not in merged]
    if missing:
        policy, budget, task, length = missing[0]
        raise UserError(
            f"--merge: {len(missing)} of {len(wanted)} results are missing, first {policy} at {budget:g} on "
            f"{task}, {length} tokens: run the shard's command again"
        )
    for folder in shards:
        for name in (HEADS_FOLDER, ANSWERS_FOLDER):
            if (folder / name).is_dir():
                shutil.copytree(folder / name, config.out / name, dirs_exist_ok=True)
    results = [merged.pop(key) for key in wanted] + list(merged.values())
    lines = [json.dumps(dataclasses.asdict(result)) + "\n" for result in results]
    write_text(
        config.out / "settings.json",
        json.dumps(settings[-1] | {"gates": gates, "named": named}, indent=1) + "\n",
    )
    write_text(config.out / RESULTS, "".join(lines))
    return results


def _check(folder: Path, settings: dict[str, Any], others: dict[str, Any], config: EvaluateConfig) -> None:
    """Raise UserError if the settings of a folder differ from those of another folder or from the command line's."""
    # earlier results also have their data here
    ours, theirs = (
        {name: comparable(x[name]) for name in x.keys() - {"data", "gates", "named"}}
        for x in (settings, others)
    )
    if ours != theirs:
        raise UserError(f"--merge: {folder} was measured with other settings than the rest")
    for name in MEASURED_WITH:
        # the default page size depends on the hardware
        if (name, config.page_size) != ("page_size", None):
            before, now = settings.get(name), getattr(config, name)
            if comparable(before) != comparable(now):
                option = name.replace("_", "-")
                raise UserError(f"--merge: {folder} was measured with --{option} {before}, got {now}")


def _shard_folders(out: Path) -> list[Path]:
    """Return the folders of all shards, in order. Raises UserError if one is missing."""
    names = [re.fullmatch(r"shard-(\d+)-of-(\d+)", path.name) for path in out.glob("shard-*")]
    shards = sorted(Shard(int(name[1]), int(name[2])) for name in names if name)
    counts = {shard.count for shard in shards}
    if len(counts) != 1:
        present = f"shards of {' and of '.join(map(str, sorted(counts)))}" if counts else "no shard's folder"
        raise UserError(f"--merge: --out {out} has {present}")
    (count,) = counts
    if missing := sorted(set(range(count)) - {shard.index for shard in shards}):
        raise UserError(f"--merge: --out {out} lacks shards {', '.join(map(str, missing))} of {count}")
    return [out / shard.folder for shard in shards]


def _settings(folder: Path) -> dict[str, Any]:
    """Return the settings of a folder of results. Raises UserError if there are none."""
    try:
        return dict(json.loads((folder / "settings.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"--merge: {folder / 'settings.json'}: {error}") from None
