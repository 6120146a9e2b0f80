"""`python -m kvjax.evaluate`: the command."""

import contextlib
import dataclasses
import shlex
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from kvjax.cli.launch import first_process_prints, run_command, start, start_without_devices
from kvjax.errors import UserError, printable
from kvjax.evaluate.config import EvaluateConfig, parse

if TYPE_CHECKING:
    from jax.sharding import Mesh


def main(args: list[str] | None = None) -> None:
    """Measure the missing results, then write the report."""
    config = parse(args)

    from kvjax.models.shapes import fit_mesh_to

    if config.dry_run or config.merge:
        mesh = start_without_devices()
    else:
        mesh = start(fit_mesh_to(config.mesh, config.model), alone=config.shard is not None)
    arguments = sys.argv[1:] if args is None else args
    with first_process_prints(), _folder_of_this_process(config) as config:
        _evaluate(config, mesh, f"python -m kvjax.evaluate {shlex.join(arguments)}")


@contextlib.contextmanager
def _folder_of_this_process(config: EvaluateConfig) -> Iterator[EvaluateConfig]:
    """Give the first of several processes --out, and each of the others a temporary copy of it.

    All processes then have the same finished results, and one of them writes. Used in a `with` statement.

    Raises:
        UserError: the processes do not see the same results.
    """
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    from kvjax.evaluate.results import HEADS_FOLDER

    if jax.process_count() == 1:
        yield config
        return
    with tempfile.TemporaryDirectory() as copy:
        if jax.process_index() > 0:
            for name in ("settings.json", "results.jsonl"):
                if (config.out / name).is_file():
                    shutil.copy(config.out / name, copy)
            if (config.out / HEADS_FOLDER).is_dir():
                shutil.copytree(config.out / HEADS_FOLDER, Path(copy, HEADS_FOLDER))
            config = dataclasses.replace(config, out=Path(copy))
        file = config.out / "results.jsonl"
        checksum = np.uint32(zlib.crc32(file.read_bytes()) if file.is_file() else 0)
        if len(np.unique(multihost_utils.process_allgather(checksum))) > 1:
            raise UserError(
                "--out: the machines of this run see different results in it; expected a shared folder"
            )
        yield config


def _evaluate(config: EvaluateConfig, mesh: "Mesh", command: str) -> None:
    """Measure and report. `command`: the command line, for the report."""
    # imported here, so that a wrong command line is refused without the time for imports
    import jax

    from kvjax.cache import check_capacity, parse_capacity
    from kvjax.cli.lock import FolderLock
    from kvjax.cli.progress import Progress
    from kvjax.evaluate.gates import choose_default_policies
    from kvjax.evaluate.merge import merge
    from kvjax.evaluate.recovery import check_dense
    from kvjax.evaluate.report import report
    from kvjax.evaluate.results import Results
    from kvjax.evaluate.run import Evaluation
    from kvjax.evaluate.sized_tasks import sized_tasks
    from kvjax.evaluate.sizing import check_contexts, check_lengths, check_policies
    from kvjax.models import load_model, read_config
    from kvjax.models.folder import find_model
    from kvjax.models.loading import model_shapes

    if config.dry_run:
        from kvjax.evaluate.dry_run import dry_run

        with jax.set_mesh(mesh):
            print(printable(dry_run(config)))
        return
    config = choose_default_policies(config, print)
    check_policies(config)
    with FolderLock(config.out, "--out") as lock, jax.set_mesh(mesh):
        if config.merge:
            print(printable(report(config, merge(config), command)))
            return
        if config.capacity is not None:
            check_capacity(parse_capacity(config.capacity))
        results, longest = Results(config), max(config.context)
        # budgets are checked against nominal lengths first, then against the real contexts, before weights are read
        model_config = read_config(find_model(config.model), longest, config.weights, config.kv_cache_dtype)
        shapes = model_shapes(model_config)
        check_lengths(config, shapes)
        tasks = sized_tasks(config)
        results.check_contexts(tasks)
        check_contexts(config, shapes, tasks)
        check_dense(config, tasks)
        dtypes = {"dtype": config.dtype, "weights": config.weights, "kv_cache_dtype": config.kv_cache_dtype}
        model = load_model(config.model, **dtypes, max_length=longest)
        results.check_model(model)
        evaluation = Evaluation(config, model, tasks)
        results.begin()
        lock.take()
        wanted = [
            (compared.label, budget, task.name, task.length)
            for task in tasks
            for compared, budget in evaluation.wanted(task)
        ]
        with Progress("results", len(wanted), sum(key in results.finished for key in wanted)) as progress:
            evaluation.run(results, progress)
        if config.shard is None:
            print(printable(report(config, list(results.finished.values()), command)))
    written = "results.jsonl, report.md and the pictures are"
    if config.shard is not None:
        written = "results.jsonl is" if wanted else "this shard has no results to measure; its settings are"
    print(f"\n{written} in {config.out}")


if __name__ == "__main__":
    run_command(main)
