"""The report of a run on the built-in model: accuracy by measured KV size, and untrained methods at the same size.

Every row is measured through the paged cache. Contexts are read in four chunks, then questions are asked of the
compressed cache. Sizes are measured, too.
"""

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from kvjax.evaluate import pictures
from kvjax.evaluate.calibrated import PatternSearch, orders
from kvjax.evaluate.config import default_chunk
from kvjax.evaluate.measuring import Measurement, MeasureSettings, measure
from kvjax.evaluate.teacher_forcing import TeacherForcing
from kvjax.files import write_text
from kvjax.models.decoder import Decoder
from kvjax.policies import Policy, make_policy
from kvjax.tasks import Copy, Needle, Recall, Sample, builtin_task
from kvjax.tasks.splits import Split
from kvjax.tasks.suite import RIGHT, FromSeeds
from kvjax.train.recipe import Recipe, option

CONTEXT = 1024
"""The tokens of the report's contexts."""
SAMPLES = {"default": {Recall: 16}, "full": {Recall: 32, Needle: 176, Copy: 256}}
"""The number of samples of each task, by --report: at least 192 answers for default, at least 500 for full. Their seeds
do not depend on the run's seed, so every run gets the same questions."""
RIVAL_SAMPLES = {Recall: 8, Needle: 16, Copy: 16}
"""The number of calibration samples of each task, on which the static policies are chosen."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One method on one task."""

    method: str
    """The name of the method in the report."""
    task: str
    """The name of the task."""
    context: int
    """The tokens of a context."""
    kv_ratio: float
    """The number of entries after the context was read, relative to the full cache."""
    footprint: float
    """The KV footprint: entries held over all steps, relative to full attention."""
    accuracy: float
    """The accuracy over the answers, from 0 to 1."""
    answers: int
    """The number of answers."""
    by_kind: dict[str, float]
    """The accuracy by kind of question."""
    choice: str = ""
    """The values that were chosen on calibration contexts, in words."""


def same_size(
    model: Decoder,
    static_rivals: PatternSearch,
    evictions: Mapping[str, str],
    *,
    kv_ratio: float,
    rates: Float[np.ndarray, "l k"],
    window: int,
    seed: int,
) -> dict[str, tuple[Policy, str]]:
    """Return the policies with which a trained policy is compared, each with the values chosen for it, in words.

    Each holds as many entries as the trained policy did: the share `kv_ratio` of all entries, and outside the window
    the share `rates` of each head's. Sink + window and the head pattern are the best on calibration contexts
    (`PatternSearch`). Evictions run after a context was read. Random policies keep as many tokens, with the same rate
    in all heads or with the trained policy's rate of each head.
    """
    entries = kv_ratio * static_rivals.context
    calibrated = {
        "sink + window": static_rivals.sink_and_window(entries),
        "head pattern": static_rivals.head_pattern(entries),
    }
    random = {"window": window, "seed": seed}
    evenly = float(np.clip((entries - window + 1) / (static_rivals.context - window + 1), 0, 1))
    calibrated_policies = {
        method: (pattern.policy(model), description) for method, (pattern, description) in calibrated.items()
    }
    policies = {
        method: make_policy({name: {"ratio": kv_ratio}}, model=model) for method, name in evictions.items()
    }
    policies |= {
        "random": make_policy({"random": {"ratio": evenly, **random}}, model=model),
        "random, the trained rates": make_policy(
            {"random": {"rates": np.clip(rates, 0, 1), **random}}, model=model
        ),
    }
    return calibrated_policies | {method: (policy, "") for method, policy in policies.items()}


def compare(
    model: Decoder,
    trained: tuple[str, Policy],
    tasks: dict[str, tuple[Sequence[Sample], Sequence[Sample]]],
    *,
    evictions: Mapping[str, str],
    context: int,
    seed: int,
    say: Callable[[str], None],
) -> tuple[list[Row], Float[np.ndarray, "l k"]]:
    """Measure every method on every task. Return the rows and the share of tokens that the trained policy keeps in each
    head on the first task.

    Args:
        trained: the name and the policy of the trained method.
        tasks: the samples of each task that are measured, and those for calibration.
    """
    (method, policy), rows, first_rates = trained, [], None

    def add_row(
        task: str, samples: Sequence[Sample], method: str, policy: Policy, choice: str = ""
    ) -> Measurement:
        result = measure(model, policy, samples, MeasureSettings(chunk=default_chunk(context)))
        sizes = result.kv_ratio, result.footprint
        rows.append(Row(method, task, context, *sizes, result.score, result.answers, result.by_kind, choice))
        say(f"{task}: {method} {100 * result.score:.1f}% right at {result.kv_ratio:.3f} of the cache")
        return result

    for task, (samples, calibration) in tasks.items():
        add_row(task, samples, "full", make_policy("full", model=model))
        trained_result = add_row(task, samples, method, policy)
        first_rates = trained_result.rates if first_rates is None else first_rates
        teacher_forcing, shape = TeacherForcing(model, calibration), trained_result.rates.shape
        head_orders = orders(teacher_forcing, shape, policy.window) | {
            "the trained rates": trained_result.rates
        }
        static_rivals = PatternSearch(
            teacher_forcing, head_orders, len(samples[0].context), policy.window, shape
        )
        sizes = {"kv_ratio": trained_result.kv_ratio, "rates": trained_result.rates, "window": policy.window}
        for name, (other, choice) in same_size(model, static_rivals, evictions, seed=seed, **sizes).items():
            add_row(task, samples, name, other, choice)
    assert first_rates is not None
    return rows, first_rates


def report(
    model: Decoder, params: Any, recipe: Recipe, folder: Path, say: Callable[[str], None]
) -> list[Row]:
    """Measure, write the report's files into `folder`, and return the rows. For models with the built-in vocabulary."""
    started, processor_started = time.perf_counter(), time.process_time()
    tasks = {}
    for kind, count in SAMPLES[recipe.report].items():
        task = builtin_task(kind)
        source, others = FromSeeds(lambda _, task=task: task, RIGHT), RIVAL_SAMPLES[kind]
        compared = source.samples(Split(0, count), count, CONTEXT)
        tasks[task.name] = compared, source.samples(Split(0, count, calibration=True), others, CONTEXT)
    policy = recipe.deploy(params, model)
    options = {"evictions": recipe.rivals, "context": CONTEXT, "seed": recipe.seed, "say": say}
    rows, rates = compare(model, (recipe.method, policy), tasks, **options)
    method_options = {option(name).removeprefix("--"): value for name, value in recipe.own_options().items()}
    description = {
        "model": recipe.model, "method": recipe.method, **method_options, "steps": recipe.steps, "seed": recipe.seed,
        "mesh": str(recipe.mesh), "jax": jax.__version__, "device": jax.devices()[0].device_kind,
        "report seconds": round(time.perf_counter() - started),
        "report processor seconds": round(time.process_time() - processor_started),
    }  # fmt: skip
    write(folder, rows, rates, description)
    return rows


def table(rows: list[Row]) -> str:
    """Return the rows as a Markdown table."""
    lines = ["| task | method | KV size | KV footprint | accuracy | answers |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {r.task}, {r.context} tokens | {r.method} | {r.kv_ratio:.3f} | {r.footprint:.3f} | "
        f"{100 * r.accuracy:.1f}% | {r.answers} |"
        for r in rows
    ]
    return "\n".join(lines)


def write(
    out: Path, rows: list[Row], rates: Float[np.ndarray, "l k"], description: dict[str, object]
) -> None:
    """Write `report.json`, `report.md`, `tradeoff.png` and `heads.png` into `out`."""
    figures = {"rows": [dataclasses.asdict(row) for row in rows], "rates": rates.tolist()}
    write_text(out / "report.json", json.dumps(description | figures, indent=1) + "\n")
    choices = {
        f"{row.method} on {row.task}, chosen on other contexts": row.choice for row in rows if row.choice
    }
    notes = "\n".join(f"- {key}: {value}" for key, value in (choices | description).items())
    write_text(out / "report.md", f"# Accuracy against KV size\n\n{table(rows)}\n\n{notes}\n")
    panels: dict[str, dict[str, list[tuple[float, ...]]]] = {}
    for row in rows:
        title = f"{row.task}, {row.context} tokens, {row.answers} answers"
        panels.setdefault(title, {})[row.method] = [(row.footprint, row.kv_ratio, row.accuracy)]
    pictures.draw_tradeoff(out / "tradeoff.png", panels)
    draw_heads(out / "heads.png", rates)


def draw_heads(file: Path, rates: Float[np.ndarray, "l k"]) -> None:
    """Draw the share of tokens that each head keeps, as a map."""
    layers, heads = rates.shape
    figure = pictures.figure(2.5 + 0.45 * heads, 1.6 + 0.3 * layers)
    image = pictures.draw_heads(figure.add_subplot(), rates, "share of tokens admitted")
    figure.colorbar(image)
    figure.savefig(file)
