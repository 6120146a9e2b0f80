"""Merging the shards of an evaluation into the folder that one process would have made."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

from kvjax.errors import UserError
from kvjax.evaluate.config import EvaluateConfig
from kvjax.evaluate.results import ANSWERS_FOLDER, HEADS_FOLDER, Result, read_results
from kvjax.evaluate.shards import Shard
from kvjax.evaluate.sizing import pairs
from kvjax.files import write_text


def merge(config: EvaluateConfig) -> list[Result]:
    """Write the results of all shards in --out, in the order of an evaluation without shards, and return them.

    Raises:
        UserError: a shard or a result of the evaluation is missing, or a shard was measured with other settings.
    """
    folders = _shard_folders(config.out)
    said = [_settings(folder) for folder in folders]
    for folder, own in zip(folders, said, strict=True):
        if own != said[0]:
            raise UserError(f"--merge: {folder} was measured with other settings than {folders[0]}")
    found: dict[tuple[str, float, str, int], Result] = {}
    for folder in folders:
        found |= read_results(folder / "results.jsonl")
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
    for folder in folders:
        for name in (HEADS_FOLDER, ANSWERS_FOLDER):
            if (folder / name).is_dir():
                shutil.copytree(folder / name, config.out / name, dirs_exist_ok=True)
    results = [found[key] for key in wanted]
    lines = [json.dumps(dataclasses.asdict(result)) + "\n" for result in results]
    write_text(config.out / "settings.json", (folders[0] / "settings.json").read_text(encoding="utf-8"))
    write_text(config.out / "results.jsonl", "".join(lines))
    return results


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


def _settings(folder: Path) -> object:
    """Return the settings of a shard. Raises UserError if there are none."""
    try:
        return json.loads((folder / "settings.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--merge: {folder / 'settings.json'}: {error}") from None


__all__ = ["merge"]
