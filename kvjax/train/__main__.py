"""`python -m kvjax.train`: the command."""

import math
import shlex
from typing import TYPE_CHECKING

from kvjax.builtin import BUILTIN
from kvjax.cli.launch import run_command
from kvjax.evaluate.config import EvaluateConfig
from kvjax.train.config import parse
from kvjax.train.recipe import Recipe
from kvjax.train.reporting import measured, without_report

if TYPE_CHECKING:
    from kvjax.policies import Policy
    from kvjax.train.loop import RunOutput


def main(args: list[str] | None = None) -> None:
    """Train, then report."""
    config = parse(args)
    if config.dry_run:
        from kvjax.train.dry_run import dry_run

        print(dry_run(config))
        return
    # the libraries of model and data are imported only once the command line is known to be good
    import jax

    from kvjax.train.loop import compute_share, resume_command, train

    if config.shard is not None:
        compute_share(config)
        print(f"share {config.shard} is in {config.kept}; once all are, the command without --shard trains")
        return
    trained = train(config)
    with jax.set_mesh(trained.mesh):
        policy = config.deploy(trained.params, trained.model)  # in every process, since all of them place it
        text = summary(config, trained, policy)
    if jax.process_index() == 0:
        print(text)
    if config.report == "none" or without_report(policy):
        return

    try:
        rows = _report(config, trained, text)
    except KeyboardInterrupt as stop:
        use = resume_command(config.method, trained.folder)
        raise type(stop)(f"all but the report is there: {use} makes it") from None
    print(f"\n{rows}\n\nreport.md, report.json, tradeoff.png and heads.png are in {trained.folder}")


def _report(config: Recipe, trained: "RunOutput", summary: str) -> str:
    """Measure, write the report, and return its table."""
    import jax

    from kvjax.models.folder import has_builtin_vocabulary
    from kvjax.train import held_out_report, report

    own = trained.model, trained.params, config, trained.folder
    with jax.set_mesh(trained.mesh):
        print("the report: each method's cache is filled before the questions come")
        if has_builtin_vocabulary(config.model):
            return report.table(report.report(*own, print))
        return held_out_report.report(*own, trained.held_out, trained.validation, summary, print)


def summary(config: Recipe, trained: "RunOutput", policy: "Policy") -> str:
    """Return the folder of the exported parameters, their held-out figures and the commands that use them, in lines."""
    found, folder = trained.validation, trained.folder / config.exports
    own = folder / "model"  # if the run trained it
    model = [] if config.model == BUILTIN else ["--model", config.model]
    model = ["--model", str(own)] if own.is_dir() else model
    use = ["generate", *model, *config.use_options(folder), "--prompt-file", "FILE"]
    compare = ["evaluate", *model, *config.evaluate_options(folder), *_tasks_and_context(config, policy)]
    compare = f"compare them: python -m kvjax.{shlex.join([*compare, '--out', 'FOLDER'])}"
    if not measured(policy):
        compare = (
            f"no report, and no comparison: {policy.name} compacts while it decodes, which is not measured"
        )
    return "\n".join(
        [
            f"{config.exports}: {folder}",
            ": ".join(filter(None, [str(found), config.remark(found)])),
            f"use them: python -m kvjax.{shlex.join(use)}",
            compare,
        ]
    )


def _tasks_and_context(config: Recipe, policy: "Policy") -> list[str]:
    """Return the options of tasks that suit the model, and of contexts whose smallest budget is above the window."""
    from kvjax.models.folder import has_builtin_vocabulary

    tasks = [] if has_builtin_vocabulary(config.model) else ["--tasks", "needle", "niah_single_1", "vt"]
    # text contexts are shorter than the option says: the answer takes room, and the next text would not have fitted
    usual, least = min(EvaluateConfig.context), 1.5 * policy.window / min(EvaluateConfig.budgets)
    return tasks if least <= usual else [*tasks, "--context", str(usual * math.ceil(least / usual))]


if __name__ == "__main__":
    run_command(main)
