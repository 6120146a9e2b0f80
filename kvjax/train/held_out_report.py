"""The report of a run on a model other than the built-in one: scores on held-out text and on tasks, by KV size.

Every row is measured through the paged cache. Contexts are read in four chunks. Then the end of a text is predicted
(each token after the true tokens before it), or a task's questions are asked. The report compares the full cache with a
sweep of the trained policy (`Recipe.sweep`). The distillation loss is measured on the same sequences as a whole.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxtyping import Float, Int
from numpy import ndarray

from kvjax.errors import UserError
from kvjax.evaluate import pictures
from kvjax.evaluate.config import default_chunk
from kvjax.evaluate.measuring import MeasureSettings, measure
from kvjax.files import write_text
from kvjax.models.decoder import Decoder
from kvjax.policies import Policy, make_policy
from kvjax.tasks.registry import open_task
from kvjax.tasks.sample import Sample, check_separable, score_agreements
from kvjax.tasks.splits import Split
from kvjax.tasks.suite import SAME_AS_FULL, Inputs
from kvjax.tasks.text import continuation
from kvjax.train.distillation import distillation
from kvjax.train.recipe import Recipe, Validation
from kvjax.train.report import draw_heads

MAX_PREDICTED = {"default": 128, "full": None}
"""The maximum number of tokens that are predicted of the last eighth of each held-out sequence, by --report; None: all.
"""
SAMPLES = {"default": 16, "full": 64}
"""The number of contexts of each task of --tasks, by --report. Their seeds do not depend on the run's."""
TOKENS_AT_ONCE = 16384
"""The number of context tokens that are read at a time, unless the mesh needs more sequences."""
FILE_TASKS = "documents", "text", "qa_1", "qa_2"
"""Tasks that are made of files, which a training run does not have."""
TEXT, FULL = "held-out text", "full"


@dataclasses.dataclass(frozen=True)
class Row:
    """The trained policy at one size, or the full cache, on held-out text or a task."""

    task: str
    """The name of the task."""
    policy: str
    """The policy string, without gates."""
    kv_ratio: float
    """The number of entries after the contexts were read, relative to the full cache."""
    footprint: float
    """The KV footprint: entries held over all steps, relative to full attention."""
    score: float
    """The task's own score; for text the share of next tokens that agree with those of the full cache."""
    perplexity: float | None
    """The perplexity of a text's tokens; None for a task."""
    distillation: float | None
    """The mean squared difference from the final hidden states of full attention on text; None for a task, or for a
    policy that evicts or selects."""
    answers: int
    """The number of answers; for text the number of predicted tokens."""


def task_samples(recipe: Recipe, count: int) -> dict[str, list[Sample]]:
    """Return `count` samples of each task of --tasks, as long as the longest training sequence. Raises UserError for a
    task that is not for the model or for that length."""
    inputs = Inputs(recipe.model)
    samples = {}
    for name in recipe.tasks:
        if name in FILE_TASKS:
            raise UserError(
                f"--tasks {name} is made of files, which kvjax.evaluate takes and a training run does not"
            )
        samples[name] = open_task(name, inputs).samples(Split(0, count), count, recipe.most_tokens)
        check_separable(name, samples[name])
    return samples


def report(
    model: Decoder,
    params: Any,
    recipe: Recipe,
    folder: Path,
    held_out: Sequence[Int[ndarray, " _"]],
    validation: Validation,
    summary: str,
    say: Callable[[str], None],
) -> str:
    """Measure, write report.md, report.json, tradeoff.png and heads.png into `folder`, and return the table.

    Args:
        validation: the run's last validation.
        summary: lines with the folder of the export, its last validation and the commands that use it.
    """
    detail = str(recipe.report)
    tasks = {TEXT: [continuation(tokens, most=MAX_PREDICTED[detail]) for tokens in held_out]}
    tasks |= task_samples(recipe, SAMPLES[detail])
    sweep = recipe.sweep(params, model, held_out)
    policies = {f"{recipe.method}:{arguments}".rstrip(":"): policy for arguments, policy in sweep.items()}
    losses = distillation(model, policies, held_out) | {FULL: 0.0}
    rows, rates = compare(model, policies, tasks, losses, shards=recipe.mesh.batch_shards, say=say)
    soft = None if recipe.soft is None else validation.numbers[recipe.soft]
    write(folder, rows, rates, soft, summary)
    return table(rows, soft)


def compare(
    model: Decoder,
    policies: Mapping[str, Policy],
    tasks: Mapping[str, Sequence[Sample]],
    losses: Mapping[str, float | None],
    *,
    shards: int,
    say: Callable[[str], None],
) -> tuple[list[Row], Float[ndarray, "l k"]]:
    """Measure the full cache and every policy on every task. Return the rows, by task and ascending size, and the share
    of tokens that the first policy keeps in each head on the first task. Texts are scored by their agreement with the
    full cache."""
    rows: list[Row] = []
    rates = None
    for task, samples in tasks.items():
        longest = max(len(sample.context) for sample in samples)
        settings = MeasureSettings(batch=max(shards, TOKENS_AT_ONCE // longest), chunk=default_chunk(longest))
        full = measure(model, make_policy(FULL, model=model), samples, settings)
        if full.perplexity is not None:
            full = dataclasses.replace(full, score=1.0)  # it agrees with itself
        results, scored_samples = {FULL: full}, score_agreements(samples, full.outputs)
        for name, policy in policies.items():
            results[name] = result = measure(model, policy, scored_samples, settings)
            rates = result.rates if rates is None else rates
            say(f"{task}: {name} {100 * result.score:.1f}% at {result.kv_ratio:.3f} of the cache")
        task_rows = [
            Row(
                *(task, name, result.kv_ratio, result.footprint, result.score, result.perplexity),
                *(losses.get(name) if task == TEXT else None, result.answers),
            )
            for name, result in results.items()
        ]
        rows += sorted(task_rows, key=lambda row: (row.kv_ratio, row.policy == FULL))
    assert rates is not None
    return rows, rates


def table(rows: Sequence[Row], soft: float | None = None) -> str:
    """Return the rows as a Markdown table. `soft`: the distillation loss of soft masks, as in training."""
    names = "task", "policy", "KV size", "KV footprint", "score", "perplexity", "distillation", "answers"
    lines = [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
    lines += [
        f"| {row.task} | {row.policy} | {row.kv_ratio:.3f} | {row.footprint:.3f} | {100 * row.score:.1f}% | "
        f"{_format(row.perplexity)} | {_format(row.distillation)} | {row.answers} |"
        for row in rows
    ]
    if soft is not None:
        lines.append(f"| {TEXT} | soft, as trained | | | | | {_format(soft)} | |")
    return "\n".join(lines)


def _format(number: float | None) -> str:
    return "" if number is None else f"{number:.4g}"


def write(
    folder: Path, rows: Sequence[Row], rates: Float[ndarray, "l k"], soft: float | None, notes: str
) -> None:
    """Write `report.md`, `report.json`, `tradeoff.png` and `heads.png` into `folder`."""
    figures = {
        "rows": [dataclasses.asdict(row) for row in rows],
        "soft_distillation": soft,
        "rates": rates.tolist(),
    }
    write_text(folder / "report.json", json.dumps(figures, indent=1) + "\n")
    write_text(
        folder / "report.md",
        f"# Held-out text against KV size\n\n{table(rows, soft)}\n\nThe score of {TEXT}: {SAME_AS_FULL}. "
        "Distillation: the mean squared difference of final hidden states from full attention's, over whole held-out "
        f"sequences.\n\n{notes}\n",
    )
    panels: dict[str, dict[str, list[tuple[float, ...]]]] = {}
    for row in rows:
        method = row.policy.partition(":")[0]
        points = panels.setdefault(f"{row.task}, {row.answers} answers", {})
        points.setdefault(method, []).append((row.footprint, row.kv_ratio, row.score))
    pictures.draw_tradeoff(folder / "tradeoff.png", panels)
    draw_heads(folder / "heads.png", rates)
