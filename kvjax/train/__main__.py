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
    from kvjax.train.run import RunOutput


def main(args: list[str] | None = None) -> None:
    """Train, then report."""
    recipe = parse(args)
    if recipe.dry_run:
        from kvjax.train.dry_run import dry_run

        print(dry_run(recipe))
        return
    # the libraries of model and data are imported only once the command line is known to be good
    import jax

    from kvjax.train.run import compute_share, resume_command, train

    if recipe.shard is not None:
        compute_share(recipe)
        print(
            f"share {recipe.shard} is in {recipe.kept}; once all shares are there, the command without --shard trains"
        )
        return
    trained = train(recipe)
    with jax.set_mesh(trained.mesh):
        policy = recipe.deploy(trained.params, trained.model)  # every process places its arrays
        text = summary(recipe, trained, policy)
    if jax.process_index() == 0:
        print(text)
    if recipe.report == "none" or reason_without_report(policy):
        return

    try:
        table = _report(recipe, trained, text)
    except KeyboardInterrupt as stop:
        command = resume_command(recipe.method, trained.folder)
        raise type(stop)(f"the run is complete except for its report: {command} makes it") from None
    print(f"\n{table}\n\nreport.md, report.json, tradeoff.png and heads.png are in {trained.folder}")


def _report(recipe: Recipe, trained: "RunOutput", summary: str) -> str:
    """Measure, write the report, and return its table."""
    import jax

    from kvjax.models.folder import has_builtin_vocabulary
    from kvjax.train import held_out_report, report

    arguments = trained.model, trained.params, recipe, trained.folder
    with jax.set_mesh(trained.mesh):
        print("the report: each method's cache is filled before the questions come")
        if has_builtin_vocabulary(recipe.model):
            return report.table(report.report(*arguments, print))
        return held_out_report.report(*arguments, trained.held_out, trained.validation, summary, print)


def summary(recipe: Recipe, trained: "RunOutput", policy: "Policy") -> str:
    """Return lines with the folder of the exported parameters, held-out figures and the commands that use them."""
    validation, folder = trained.validation, trained.folder / recipe.exports
    trained_model = folder / "model"  # if the run trained it
    model = [] if recipe.model == BUILTIN else ["--model", recipe.model]
    model = ["--model", str(trained_model)] if trained_model.is_dir() else model
    generate = ["generate", *model, *recipe.use_options(folder), "--prompt-file", "FILE"]
    evaluate = ["evaluate", *model, *recipe.evaluate_options(folder), *_tasks_and_context(recipe, policy)]
    comparison = f"compare them: python -m kvjax.{shlex.join([*evaluate, '--out', 'FOLDER'])}"
    if not can_measure(policy):
        comparison = (
            f"no report, and no comparison: {policy.name} compacts while it decodes, which is not measured"
        )
    return "\n".join(
        [
            f"{recipe.exports}: {folder}",
            ": ".join(filter(None, [str(validation), recipe.remark(validation)])),
            f"use them: python -m kvjax.{shlex.join(generate)}",
            comparison,
        ]
    )


def _tasks_and_context(recipe: Recipe, policy: "Policy") -> list[str]:
    """Return options for `kvjax.evaluate`: tasks that suit the model, and contexts so long that even the smallest
    budget is larger than the window."""
    from kvjax.models.folder import has_builtin_vocabulary

    tasks = [] if has_builtin_vocabulary(recipe.model) else ["--tasks", "needle", "niah_single_1", "vt"]
    # text contexts are shorter than the option says, since the answer must fit and texts are not cut
    default, smallest = min(EvaluateConfig.context), 1.5 * policy.window / min(EvaluateConfig.budgets)
    return (
        tasks if smallest <= default else [*tasks, "--context", str(default * math.ceil(smallest / default))]
    )


if __name__ == "__main__":
    run_command(main)
