"""`python -m kvjax.evaluate`: the command."""

import shlex
import sys

from kvjax.cli.launch import run_command, start
from kvjax.errors import printable
from kvjax.evaluate.config import parse


def main(args: list[str] | None = None) -> None:
    """Measure what is not measured yet, then write the report."""
    config = parse(args)
    mesh = start(config.mesh)

    # jax and the rest come only once the command line is known to be good
    import jax

    from kvjax.cache import parse_capacity
    from kvjax.cli.lock import FolderLock
    from kvjax.cli.progress import Progress
    from kvjax.evaluate.recovery import check_dense
    from kvjax.evaluate.report import report
    from kvjax.evaluate.results import Results
    from kvjax.evaluate.run import (
        Evaluation,
        check_contexts,
        check_lengths,
        check_policies,
        pairs,
        with_gates,
    )
    from kvjax.evaluate.workloads import workloads
    from kvjax.inference.checks import check_capacity
    from kvjax.models import load_model, read_config
    from kvjax.models.folder import find_model
    from kvjax.models.loading import model_shapes

    config = with_gates(config, print)
    check_policies(config)
    with FolderLock(config.out, "--out") as lock, jax.set_mesh(mesh):
        if config.capacity is not None:
            check_capacity(parse_capacity(config.capacity))
        results = Results(config)
        # what no context can hold is refused before there are any, and what these cannot before there are weights
        shapes = model_shapes(read_config(find_model(config.model), max(config.context)))
        check_lengths(config, shapes)
        loads = workloads(config)
        results.check_contexts(loads)
        check_contexts(config, shapes, loads)
        check_dense(config, loads)
        model = load_model(config.model, dtype=config.dtype, max_length=max(config.context))
        results.check_model(model)
        evaluation = Evaluation(config, model, loads)
        results.begin()
        lock.take()
        own = pairs(config)
        wanted = [(one.label, budget, load.task, load.length) for load in loads for one, budget in own]
        with Progress("cells", len(wanted), sum(key in results.cells for key in wanted)) as progress:
            evaluation.run(results, progress)
        given = sys.argv[1:] if args is None else args
        cells = list(results.cells.values())
        print(printable(report(config, cells, f"python -m kvjax.evaluate {shlex.join(given)}")))
    print(f"\nresults.jsonl, report.md and the pictures are in {config.out}")


if __name__ == "__main__":
    run_command(main)
