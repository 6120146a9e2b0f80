"""`python -m kvjax.evaluate`: the command."""

import shlex
import sys

from kvjax.command.launch import run_command, start
from kvjax.evaluate.config import parse


def main(args: list[str] | None = None) -> None:
    """Measure what is not measured yet, then write the report."""
    config = parse(args)
    mesh = start(config.mesh)

    # jax and the rest come only once the command line is known to be good
    import jax

    from kvjax.command.lock import FolderLock
    from kvjax.command.progress import Progress
    from kvjax.evaluate.config import FIXED_TAU
    from kvjax.evaluate.contenders import contender
    from kvjax.evaluate.gates import by_lambda
    from kvjax.evaluate.report import report
    from kvjax.evaluate.results import Results
    from kvjax.evaluate.run import Evaluation, pairs
    from kvjax.evaluate.workloads import workloads
    from kvjax.models import load_model

    for name in config.policies:
        contender(name)
    if FIXED_TAU in config.policies:
        by_lambda(config.gates)
    with FolderLock(config.out, "--out") as lock, jax.set_mesh(mesh):
        results = Results(config)
        compared = workloads(config)
        results.check_contexts(compared)
        model = load_model(config.model, dtype=config.dtype, max_length=max(config.context))
        results.check_model(model)
        evaluation = Evaluation(config, model, compared)
        results.begin()
        lock.take()
        wanted = [(*pair, workload.task, workload.length) for workload in compared for pair in pairs(config)]
        with Progress("cells", len(wanted), sum(key in results.cells for key in wanted)) as progress:
            evaluation.run(results, progress)
        given = sys.argv[1:] if args is None else args
        cells = list(results.cells.values())
        print(report(config, cells, f"python -m kvjax.evaluate {shlex.join(given)}"))
    print(f"\nresults.jsonl, report.md and the pictures are in {config.out}")


if __name__ == "__main__":
    run_command(main)
