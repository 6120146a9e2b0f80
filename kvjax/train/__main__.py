"""`python -m kvjax.train`: the command."""

from kvjax.launch import run_command
from kvjax.train.config import parse


def main() -> None:
    """Train, then report."""
    config = parse()

    # jax and the rest come only once the command line is known to be good
    import jax

    from kvjax.models.folder import speaks_builtin
    from kvjax.train.loop import train

    trained = train(config)
    if config.report == "none" or jax.process_count() > 1 or not speaks_builtin(config.model):
        return

    from kvjax.train import report

    with jax.set_mesh(trained.mesh):
        print("the report: each method's cache is filled before the questions come")
        rows = report.report(trained.model, trained.gates, config, trained.folder, print)
    print(
        f"\n{report.table(rows)}\n\nreport.md, report.json, tradeoff.png and heads.png are in {trained.folder}"
    )


if __name__ == "__main__":
    run_command(main)
