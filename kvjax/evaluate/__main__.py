"""`python -m kvjax.evaluate`: the command."""

import shlex
import sys

from kvjax.cli.launch import run_command, start, start_without_devices
from kvjax.errors import printable
from kvjax.evaluate.config import parse


def main(args: list[str] | None = None) -> None:
    """Measure what is not measured yet, then write the report."""
    config = parse(args)

    from kvjax.models.shapes import fit_mesh_to

    mesh = start_without_devices() if config.dry_run else start(fit_mesh_to(config.mesh, config.model))

    # jax and the rest come only once the command line is known to be good
    import jax

    from kvjax.cache import parse_capacity
    from kvjax.cli.lock import FolderLock
    from kvjax.cli.progress import Progress
    from kvjax.evaluate.gates import with_gates
    from kvjax.evaluate.recovery import check_dense
    from kvjax.evaluate.report import report
    from kvjax.evaluate.results import Results
    from kvjax.evaluate.run import Evaluation
    from kvjax.evaluate.sized_tasks import sized_tasks
    from kvjax.evaluate.sizing import check_contexts, check_lengths, check_policies, pairs
    from kvjax.inference.checks import check_capacity
    from kvjax.models import load_model, read_config
    from kvjax.models.folder import find_model
    from kvjax.models.loading import model_shapes

    if config.dry_run:
        from kvjax.evaluate.dry_run import dry_run

        with jax.set_mesh(mesh):
            print(printable(dry_run(config)))
        return
    config = with_gates(config, print)
    check_policies(config)
    with FolderLock(config.out, "--out") as lock, jax.set_mesh(mesh):
        if config.capacity is not None:
            check_capacity(parse_capacity(config.capacity))
        results, longest = Results(config), max(config.context)
        # budgets are checked against nominal lengths first, then against the real contexts, before weights are read
        read = read_config(find_model(config.model), longest, config.weights, config.kv_cache_dtype)
        shapes = model_shapes(read)
        check_lengths(config, shapes)
        tasks = sized_tasks(config)
        results.check_contexts(tasks)
        check_contexts(config, shapes, tasks)
        check_dense(config, tasks)
        stored = {"dtype": config.dtype, "weights": config.weights, "kv_cache_dtype": config.kv_cache_dtype}
        model = load_model(config.model, **stored, max_length=longest)
        results.check_model(model)
        evaluation = Evaluation(config, model, tasks)
        results.begin()
        lock.take()
        own = pairs(config)
        wanted = [(one.label, budget, task.name, task.length) for task in tasks for one, budget in own]
        with Progress("results", len(wanted), sum(key in results.finished for key in wanted)) as progress:
            evaluation.run(results, progress)
        given = sys.argv[1:] if args is None else args
        found = list(results.finished.values())
        print(printable(report(config, found, f"python -m kvjax.evaluate {shlex.join(given)}")))
    print(f"\nresults.jsonl, report.md and the pictures are in {config.out}")


if __name__ == "__main__":
    run_command(main)
