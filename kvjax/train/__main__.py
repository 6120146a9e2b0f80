"""`python -m kvjax.train`: the command."""

import math
import shlex
from typing import TYPE_CHECKING

from kvjax.builtin import BUILTIN
from kvjax.cli.launch import run_command
from kvjax.evaluate.config import EvaluateConfig
from kvjax.train.config import parse
from kvjax.train.recipe import Recipe
from kvjax.train.reporting import can_measure, reason_without_report

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
        print(
            f"share {config.shard} is in {config.kept}; once all shares are there, the command without --shard trains"
        )
        return
    trained = train(config)
    with jax.set_mesh(trained.mesh):
        policy = config.deploy(trained.params, trained.model)  # every process places its arrays
        text = summary(config, trained, policy)
    if jax.process_index() == 0:
        print(text)
    if config.report == "none" or reason_without_report(policy):
        return

    try:
        table = _report(config, trained, text)
    except KeyboardInterrupt as stop:
        command = resume_command(config.method, trained.folder)
        raise type(stop)(f"the run is complete except for its report: {command} makes it") from None
    print(f"\n{table}\n\nreport.md, report.json, tradeoff.png and heads.png are in {trained.folder}")


def _report(config: Recipe, trained: "RunOutput", summary: str) -> str:
    """Measure, write the report, and return its table."""
    import jax

    from kvjax.models.folder import has_builtin_vocabulary
    from kvjax.train import held_out_report, report

    arguments = trained.model, trained.params, config, trained.folder
    with jax.set_mesh(trained.mesh):
        print("the report: each method's cache is filled before the questions come")
        if has_builtin_vocabulary(config.model):
            return report.table(report.report(*arguments, print))
        return held_out_report.report(*arguments, trained.held_out, trained.validation, summary, print)


def summary(config: Recipe, trained: "RunOutput", policy: "Policy") -> str:
    """Return lines with the folder of the exported parameters, held-out figures and the commands that use them."""
    validation, folder = trained.validation, trained.folder / config.exports
    trained_model = folder / "model"  # if the run trained it
    model = [] if config.model == BUILTIN else ["--model", config.model]
    model = ["--model", str(trained_model)] if trained_model.is_dir() else model
    generate = ["generate", *model, *config.use_options(folder), "--prompt-file", "FILE"]
    evaluate = ["evaluate", *model, *config.evaluate_options(folder), *_tasks_and_context(config, policy)]
    comparison = f"compare them: python -m kvjax.{shlex.join([*evaluate, '--out', 'FOLDER'])}"
    if not can_measure(policy):
        comparison = (
            f"no report, and no comparison: {policy.name} compacts while it decodes, which is not measured"
        )
    return "\n".join(
        [
            f"{config.exports}: {folder}",
            ": ".join(filter(None, [str(validation), config.remark(validation)])),
            f"use them: python -m kvjax.{shlex.join(generate)}",
            comparison,
        ]
    )


def _tasks_and_context(config: Recipe, policy: "Policy") -> list[str]:
    """Return options for `kvjax.evaluate`: tasks that suit the model, and contexts so long that even the smallest
    budget is larger than the window."""
    from kvjax.models.folder import has_builtin_vocabulary

    tasks = [] if has_builtin_vocabulary(config.model) else ["--tasks", "needle", "niah_single_1", "vt"]
    # text contexts are shorter than the option says, since the answer must fit and texts are not cut
    default, smallest = min(EvaluateConfig.context), 1.5 * policy.window / min(EvaluateConfig.budgets)
    return (
        tasks if smallest <= default else [*tasks, "--context", str(default * math.ceil(smallest / default))]
    )


if __name__ == "__main__":
    run_command(main)
