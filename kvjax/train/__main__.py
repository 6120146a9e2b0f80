"""`python -m kvjax.train`: the command."""

import math
import shlex
from typing import TYPE_CHECKING

from kvjax.builtin import BUILTIN
from kvjax.command.launch import run_command
from kvjax.evaluate.config import EvaluateConfig
from kvjax.train.config import TrainConfig, parse

if TYPE_CHECKING:
    from kvjax.train.loop import Trained


def main(args: list[str] | None = None) -> None:
    """Train, then report."""
    config = parse(args)

    # jax and the rest come only once the command line is known to be good
    import jax

    from kvjax.models.folder import speaks_builtin
    from kvjax.train.loop import train

    trained = train(config)
    if jax.process_index() == 0:
        print(summary(config, trained))
    if config.report == "none" or jax.process_count() > 1 or not speaks_builtin(config.model):
        return

    from kvjax.train import report

    with jax.set_mesh(trained.mesh):
        print("the report: each method's cache is filled before the questions come")
        rows = report.report(trained.model, trained.gates, config, trained.folder, print)
    print(
        f"\n{report.table(rows)}\n\nreport.md, report.json, tradeoff.png and heads.png are in {trained.folder}"
    )


def summary(config: TrainConfig, trained: "Trained") -> str:
    """Where the gates are, what they are worth, and how to use them."""
    found, gates = trained.validation, trained.folder / "gates"
    model = [] if config.model == BUILTIN else ["--model", config.model]
    use = ["generate", *model, "--policy", "wgkv", "--gates", str(gates), "--prompt-file", "FILE"]
    compare = ["evaluate", *model, "--gates", str(gates), *_compared(config), "--out", "FOLDER"]
    return "\n".join(
        [
            f"gates: {gates}",
            f"{found}: at τ {config.tau:g} they admit {100 * found.admitted:.1f}% of the tokens",
            f"use them: python -m kvjax.{shlex.join(use)}",
            f"compare them: python -m kvjax.{shlex.join(compare)}",
        ]
    )


def _compared(config: TrainConfig) -> list[str]:
    """Tasks that mean something to the model, and contexts of which the smallest budget holds the window."""
    from kvjax.models.folder import speaks_builtin

    tasks = [] if speaks_builtin(config.model) else ["--tasks", "needle", "niah_single_1", "vt"]
    # contexts of text are shorter than they may be, by the answer and by what more would not have fitted
    usual, least = min(EvaluateConfig.context), 1.5 * config.window / min(EvaluateConfig.budgets)
    return tasks if least <= usual else [*tasks, "--context", str(usual * math.ceil(least / usual))]


if __name__ == "__main__":
    run_command(main)
