"""What training bought on a model of one's own: held-out text, and tasks that are named, against measured KV size.

Every row is measured through the paged cache: contexts are read in four chunks; then a text's end is predicted, each
token after the true ones before it, and a task's questions are asked. What was trained stands there as a sweep
(`Recipe.sweep`), beside the full cache. The distillation loss is of the same sequences, whole.
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
from kvjax.evaluate.measuring import Manner, measure
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

PREDICTED = {"default": 128, "full": None}
"""Tokens at the end of each held-out sequence that are predicted, by --report: so many at most, or its last eighth."""
SAMPLES = {"default": 16, "full": 64}
"""Contexts of each task that is named, by --report. Their seeds do not depend on the run's."""
TOKENS = 16384
"""Of the contexts that are read at a time, where the mesh has not more sequences at a time."""
OF_FILES = "documents", "text", "qa_1", "qa_2"
"""Tasks that cannot be made here."""
TEXT, FULL = "held-out text", "full"


@dataclasses.dataclass(frozen=True)
class Row:
    """One size of what was trained, or the full cache, on held-out text or a task."""

    task: str
    """Its name."""
    policy: str
    """A policy string, without gates."""
    kv_ratio: float
    """Of the full cache's entries, once the contexts were read."""
    footprint: float
    """Of the entries over all steps."""
    score: float
    """Of a text the share of next tokens that are the full cache's; of a task its own."""
    perplexity: float | None
    """Of a text's tokens; None: of a task."""
    distillation: float | None
    """Of a text: the mean squared difference of final hidden states from full attention's; None: of a task, or of a
    policy that evicts or selects."""
    answers: int
    """How many; of a text its tokens."""


def task_samples(config: Recipe, count: int) -> dict[str, list[Sample]]:
    """So many samples of each task that --tasks names, as long as the longest sequence that is trained on. Raises
    UserError for a task that is not for the model, or not for that length."""
    inputs = Inputs(config.model)
    made = {}
    for name in config.tasks:
        if name in OF_FILES:
            raise UserError(
                f"--tasks {name} is made of files, which kvjax.evaluate takes and a training run does not"
            )
        made[name] = open_task(name, inputs).samples(Split(0, count), count, config.most_tokens)
        check_separable(name, made[name])
    return made


def report(
    model: Decoder,
    params: Any,
    config: Recipe,
    folder: Path,
    held_out: Sequence[Int[ndarray, " _"]],
    validation: Validation,
    summary: str,
    say: Callable[[str], None],
) -> str:
    """Measure, write report.md, report.json, tradeoff.png and heads.png into `folder`, and return the table.

    validation: the last one. summary: of the run, in lines: where the export is, its last validation, how it is used.
    """
    how = str(config.report)
    tasks = {TEXT: [continuation(tokens, most=PREDICTED[how]) for tokens in held_out]}
    tasks |= task_samples(config, SAMPLES[how])
    sweep = config.sweep(params, model, held_out)
    policies = {f"{config.method}:{told}".rstrip(":"): policy for told, policy in sweep.items()}
    losses = distillation(model, policies, held_out) | {FULL: 0.0}
    rows, rates = compare(model, policies, tasks, losses, shards=config.mesh.batch_shards, say=say)
    soft = None if config.soft is None else validation.numbers[config.soft]
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
    """Measure the full cache and every policy on every task, each from the smallest cache on; and the share of tokens
    that the first policy keeps in each head on the first task. Texts that are given are scored by their agreement with
    the full cache."""
    rows: list[Row] = []
    rates = None
    for task, samples in tasks.items():
        longest = max(len(sample.context) for sample in samples)
        manner = Manner(batch=max(shards, TOKENS // longest), chunk=default_chunk(longest))
        full = measure(model, make_policy(FULL, model=model), samples, manner)
        if full.perplexity is not None:
            full = dataclasses.replace(full, score=1.0)  # by its own next tokens
        found, scored = {FULL: full}, score_agreements(samples, full.outputs)
        for name, policy in policies.items():
            found[name] = one = measure(model, policy, scored, manner)
            rates = one.rates if rates is None else rates
            say(f"{task}: {name} {100 * one.score:.1f}% at {one.kv_ratio:.3f} of the cache")
        own = [
            Row(
                *(task, name, one.kv_ratio, one.footprint, one.score, one.perplexity),
                *(losses.get(name) if task == TEXT else None, one.answers),
            )
            for name, one in found.items()
        ]
        rows += sorted(own, key=lambda row: (row.kv_ratio, row.policy == FULL))
    assert rates is not None
    return rows, rates


def table(rows: Sequence[Row], soft: float | None = None) -> str:
    """The rows as a Markdown table. `soft`: the distillation loss of what was trained, which has no threshold."""
    names = "task", "policy", "KV size", "KV footprint", "score", "perplexity", "distillation", "answers"
    lines = [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
    lines += [
        f"| {row.task} | {row.policy} | {row.kv_ratio:.3f} | {row.footprint:.3f} | {100 * row.score:.1f}% | "
        f"{_short(row.perplexity)} | {_short(row.distillation)} | {row.answers} |"
        for row in rows
    ]
    if soft is not None:
        lines.append(f"| {TEXT} | soft, as trained | | | | | {_short(soft)} | |")
    return "\n".join(lines)


def _short(number: float | None) -> str:
    return "" if number is None else f"{number:.4g}"


def write(
    folder: Path, rows: Sequence[Row], rates: Float[ndarray, "l k"], soft: float | None, notes: str
) -> None:
    """`report.md`, `report.json`, `tradeoff.png` and `heads.png` in `folder`."""
    figures = {
        "rows": [dataclasses.asdict(row) for row in rows],
        "soft_distillation": soft,
        "rates": rates.tolist(),
    }
    (folder / "report.json").write_text(json.dumps(figures, indent=1) + "\n")
    (folder / "report.md").write_text(
        f"# Held-out text against KV size\n\n{table(rows, soft)}\n\nThe score of {TEXT}: {SAME_AS_FULL}. "
        "Distillation: the mean squared difference of final hidden states from full attention's, over whole held-out "
        f"sequences.\n\n{notes}\n"
    )
    panels: dict[str, dict[str, list[tuple[float, ...]]]] = {}
    for row in rows:
        method = row.policy.partition(":")[0]
        points = panels.setdefault(f"{row.task}, {row.answers} answers", {})
        points.setdefault(method, []).append((row.footprint, row.kv_ratio, row.score))
    pictures.draw_tradeoff(folder / "tradeoff.png", panels)
    draw_heads(folder / "heads.png", rates)
