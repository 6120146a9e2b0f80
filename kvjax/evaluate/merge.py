"""Merging the shards of an evaluation into the folder that one process would have made."""

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
    counted,
    read_results,
)
from kvjax.evaluate.sizing import pairs
from kvjax.files import write_text

RESULTS = "results.jsonl"


def merge(config: EvaluateConfig) -> list[Result]:
    """Write the results of all shards into --out, in the order of an evaluation without shards, after which come those
    of other policies and tasks that --out had before. Returns them.

    Raises:
        UserError: a shard or a result of the evaluation is missing, or a folder was measured with other settings, or on
            other contexts, than the rest or than the command line says.
    """
    shards = _shard_folders(config.out)
    folders = [*([config.out] if (config.out / RESULTS).exists() else []), *shards]
    settings = [_settings(folder) for folder in folders]
    found: dict[tuple[str, float, str, int], Result] = {}
    contexts: dict[tuple[str, int], str] = {}
    for folder, own in zip(folders, settings, strict=True):
        _check(folder, own, settings[0], config)
        if (folder / RESULTS).exists():  # else there was no work for the shard
            found |= read_results(folder / RESULTS)
    for one in found.values():
        if contexts.setdefault((one.task, one.context), one.contexts) != one.contexts:
            raise UserError(
                f"--merge: the shards measured {one.task} at {one.context} tokens on different contexts"
            )
    wanted = [
        (one.label, budget, task, length)
        for length in config.context
        for task in config.tasks
        for one, budget in pairs(config)
    ]
    missing = [key for key in wanted if key not in found]
    if missing:
        policy, budget, task, length = missing[0]
        raise UserError(
            f"--merge: {len(missing)} of {len(wanted)} results are missing, the first of them {policy} at {budget:g} "
            f"on {task}, {length} tokens: the shard's own command goes on with them"
        )
    for folder in shards:
        for name in (HEADS_FOLDER, ANSWERS_FOLDER):
            if (folder / name).is_dir():
                shutil.copytree(folder / name, config.out / name, dirs_exist_ok=True)
    results = [found.pop(key) for key in wanted] + list(found.values())
    lines = [json.dumps(dataclasses.asdict(result)) + "\n" for result in results]
    write_text(config.out / "settings.json", (shards[0] / "settings.json").read_text(encoding="utf-8"))
    write_text(config.out / RESULTS, "".join(lines))
    return results


def _check(folder: Path, settings: dict[str, Any], others: dict[str, Any], config: EvaluateConfig) -> None:
    """Raise UserError if the settings of a folder differ from those of another folder or from the command line's."""
    if counted(list(settings.items())) != counted(list(others.items())):
        raise UserError(f"--merge: {folder} was measured with other settings than the rest")
    for name in MEASURED_WITH:
        # the default page size is that of the hardware
        if (name, config.page_size) != ("page_size", None):
            before, now = settings.get(name), getattr(config, name)
            if counted(before) != counted(now):
                option = name.replace("_", "-")
                raise UserError(f"--merge: {folder} was measured with --{option} {before}, got {now}")


def _shard_folders(out: Path) -> list[Path]:
    """Return the folders of all shards, in order. Raises UserError if one is missing."""
    names = [re.fullmatch(r"shard-(\d+)-of-(\d+)", path.name) for path in out.glob("shard-*")]
    shards = sorted(Shard(int(name[1]), int(name[2])) for name in names if name)
    counts = {shard.count for shard in shards}
    if len(counts) != 1:
        had = f"shards of {' and of '.join(map(str, sorted(counts)))}" if counts else "no folder of a shard"
        raise UserError(f"--merge: --out {out} has {had}")
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


__all__ = ["merge"]
