"""`python -m kvjax.train`: the command."""

from typing import TYPE_CHECKING

from kvjax.launch import run_command
from kvjax.train.config import TrainConfig, parse

if TYPE_CHECKING:
    from kvjax.train.loop import Trained


def main() -> None:
    """Train, then report."""
    config = parse()

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
    model = "" if config.model == "builtin" else f" --model {config.model}"
    return "\n".join(
        [
            f"gates: {gates}",
            f"{found}: at τ {config.tau:g} they admit {100 * found.admitted:.1f}% of the tokens",
            f"use them: python -m kvjax.generate{model} --policy wgkv --gates {gates} --prompt-file FILE",
            f"compare them: python -m kvjax.evaluate{model} --gates {gates} --out FOLDER",
        ]
    )


if __name__ == "__main__":
    run_command(main)
