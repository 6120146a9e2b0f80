"""Make the tables of docs/results.md from evaluations of several seeds.

    python train/claims.py runs/fast_kvzip/seed-*/main

The evaluations, and the trainings before them, are in the files of configs/claims.
"""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import tyro

from kvjax.cli.launch import parse_command, run_command
from kvjax.errors import UserError
from kvjax.evaluate.results import NOTHING, read_results

Row = tuple[str, str]
"""A budget as the table shows it, and the label of a policy."""
Column = tuple[str, int]
"""A task, and its context length in tokens."""
Scores = dict[Row, dict[Column, dict[int, float]]]
"""The score of each seed, in percent."""


@dataclasses.dataclass(frozen=True)
class ClaimsConfig:
    """Print a table of scores: the mean over the seeds, with the smallest and the largest in parentheses."""

    folders: tyro.conf.Positional[tuple[Path, ...]]
    """The --out folders of `kvjax.evaluate`, of all seeds and policies."""
    relative_to: str | None = None
    """The label of the policy whose score for the same task and seed counts as 100%. It must have one budget."""


def gather(folders: Sequence[Path]) -> Scores:
    """Return the scores of all folders' results. Raises UserError for two scores of a policy, budget, task and seed."""
    if not folders:
        raise UserError("got no folder, expected the --out folders of evaluations")
    scores: Scores = {}
    for folder in folders:
        file = folder / "results.jsonl"
        if not file.is_file():
            raise UserError(f"{folder}: got no results.jsonl, expected the --out folder of an evaluation")
        for result in read_results(file).values():
            # a policy with a fixed size has no budget
            row = "–" if result.sized_by == NOTHING else result.at, result.policy
            seeds = scores.setdefault(row, {}).setdefault((result.task, result.context), {})
            if result.seed in seeds:
                raise UserError(
                    f"{file}: {result.policy} on {result.task} with seed {result.seed} is in another folder, too: "
                    "give one of them another label, or leave it out"
                )
            seeds[result.seed] = 100 * result.score
    return scores


def relative(scores: Scores, label: str) -> Scores:
    """Return every score in percent of the score of the policy `label`.

    Raises UserError if this policy does not have exactly one row, lacks a score or has a score of 0.
    """
    rows = [row for row in scores if row[1] == label]
    if len(rows) != 1:
        raise UserError(f"--relative-to {label}: got {len(rows)} rows of this label, expected 1")
    reference = scores[rows[0]]
    try:
        return {
            row: {
                column: {seed: 100 * score / reference[column][seed] for seed, score in seeds.items()}
                for column, seeds in scores_by_column.items()
            }
            for row, scores_by_column in scores.items()
        }
    except (KeyError, ZeroDivisionError):
        raise UserError(
            f"--relative-to {label}: it has no score, or 0, for a task and seed of other policies"
        ) from None


def spread(values: Sequence[float]) -> str:
    """Return the mean, with the smallest and the largest value if they differ."""
    mean, low, high = (f"{x:.0f}" for x in (statistics.mean(values), min(values), max(values)))
    return mean if low == high else f"{mean} ({low}–{high})"


def mean_of_tasks(scores_by_column: Mapping[Column, Mapping[int, float]], columns: Sequence[Column]) -> str:
    """Return the mean over the tasks if every task has the same seeds, else a dash."""
    seeds = {tuple(sorted(scores_by_column.get(column, ()))) for column in columns}
    if len(seeds) > 1:
        return "–"
    return spread(
        [statistics.mean(scores_by_column[column][seed] for column in columns) for seed in seeds.pop()]
    )


def table(scores: Scores) -> str:
    """Return a Markdown table with a row for each policy and budget, a column for each task and their mean."""
    columns = list(
        dict.fromkeys(column for scores_by_column in scores.values() for column in scores_by_column)
    )
    several = len({context for _, context in columns}) > 1
    names = [f"{task} {context}" if several else task for task, context in columns]
    rows = [["budget", "method", *names, "mean"], ["---"] * (len(columns) + 3)]
    budgets = list(dict.fromkeys(budget for budget, _ in scores))
    for (budget, label), scores_by_column in sorted(
        scores.items(), key=lambda item: budgets.index(item[0][0])
    ):
        cells = [
            spread(list(scores_by_column[column].values())) if column in scores_by_column else "–"
            for column in columns
        ]
        rows.append([budget, label, *cells, mean_of_tasks(scores_by_column, columns)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main(args: list[str] | None = None) -> None:
    """Print the table."""
    config = parse_command(ClaimsConfig, args)
    scores = gather(config.folders)
    print(table(scores if config.relative_to is None else relative(scores, config.relative_to)))


if __name__ == "__main__":
    run_command(main)
