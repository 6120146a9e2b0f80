"""Shared by the programs that make tables of docs/results.md: commands that are shown, scores of seeds, tables."""

import json
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvjax.errors import UserError

Scores = dict[str, dict[tuple[str, float], list[float]]]
"""By row, and by task and budget: of each seed the score, in percent."""


def check_different(**values: Sequence[Any]) -> None:
    """Refuse options that name nothing, or something twice. Raises UserError."""
    for name, given in values.items():
        if not given or len(set(given)) < len(given):
            raise UserError(f"--{name} must be different values, got {given}")


def run(*command: str) -> None:
    """A command, shown before. Raises UserError if it fails."""
    print(f"$ {shlex.join(('python', *command))}", flush=True)
    code = subprocess.run([sys.executable, *command], stdout=subprocess.DEVNULL).returncode
    if code:
        raise UserError(f"it ended with {code}: {shlex.join(command)}")


def evaluated(
    folder: Path, policies: Sequence[str], budgets: Sequence[float], tasks: Sequence[str], *options: str
) -> list[dict[str, Any]]:
    """The cells of an evaluation, which measures those that are not there and refuses those of other settings."""
    named = "--policies", *policies, "--budgets", *map(str, budgets), "--tasks", *tasks
    run("-m", "kvjax.evaluate", *named, *options, "--out", str(folder))
    cells = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    return [cell for cell in cells if cell["policy"] in policies and cell["task"] in tasks]


def gather(into: Scores, row: str | None, found: Sequence[Mapping[str, Any]]) -> None:
    """Add a seed's cells, under their policies' names or all under one."""
    for cell in found:
        place = into.setdefault(row or cell["policy"], {})
        place.setdefault((cell["task"], cell["budget"]), []).append(100 * cell["score"])


def spread(values: Sequence[float]) -> str:
    """The mean, and between which values the seeds are."""
    mean, low, high = (f"{x:.0f}" for x in (statistics.mean(values), min(values), max(values)))
    return mean if low == high else f"{mean} ({low}–{high})"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """As Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))
