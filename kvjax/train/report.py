"""What training bought: accuracy against measured KV size, beside what costs nothing to train, at equal size.

Every row is measured through the paged cache: contexts are read in four chunks, then questions asked of the small
cache; the sizes are the cache's own.
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
from kvjax.evaluate.calibrated import Rivals, orders
from kvjax.evaluate.config import default_chunk
from kvjax.evaluate.measuring import Manner, Measurement, measure
from kvjax.evaluate.teacher_forcing import TeacherForcing
from kvjax.models.decoder import Decoder
from kvjax.policies import Policy, make_policy
from kvjax.tasks import Copy, Needle, Recall, Sample, builtin_task
from kvjax.tasks.splits import Split
from kvjax.tasks.suite import RIGHT, FromSeeds
from kvjax.train.recipe import Recipe, option

CONTEXT = 1024
"""Tokens of the report's contexts."""
SAMPLES = {"default": {Recall: 16}, "full": {Recall: 32, Needle: 176, Copy: 256}}
"""Samples of each task, by --report: at least 192 answers by default, at least 500 in full. Their seeds do not depend
on the run's: every run is asked the same."""
RIVAL_SAMPLES = {Recall: 8, Needle: 16, Copy: 16}
"""Samples of each task that static rivals are chosen on."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One method on one task."""

    method: str
    """As the report calls it."""
    task: str
    """Its name."""
    context: int
    """Tokens."""
    kv_ratio: float
    """Of the full cache's entries, once the context was read."""
    footprint: float
    """Of the entries over all steps."""
    accuracy: float
    """Over the answers, from 0 to 1."""
    answers: int
    """How many."""
    by_kind: dict[str, float]
    """The accuracy by kind of question."""
    choice: str = ""
    """What was chosen on calibration contexts, in words."""


def same_size(
    model: Decoder,
    static: Rivals,
    evictions: Mapping[str, str],
    *,
    kv_ratio: float,
    rates: Float[np.ndarray, "l k"],
    window: int,
    seed: int,
) -> dict[str, tuple[Policy, str]]:
    """The policies that a trained one is held against, each sized to hold as many entries as it did: `kv_ratio` of all,
    of which `rates` of each head's beyond the window.

    Sink + window and the head pattern: the best on calibration contexts (`Rivals`), with what was chosen in words. The
    evictions once a context was read. Random: as many tokens, evenly; and by the trained one's own rate of each head.
    """
    entries = kv_ratio * static.context
    choices = {"sink + window": static.sink_and_window(entries), "head pattern": static.head_pattern(entries)}
    random = {"window": window, "seed": seed}
    evenly = float(np.clip((entries - window + 1) / (static.context - window + 1), 0, 1))
    best = {method: (choice.pattern.policy(model), choice.words) for method, choice in choices.items()}
    others = {
        method: make_policy({name: {"ratio": kv_ratio}}, model=model) for method, name in evictions.items()
    }
    others |= {
        "random": make_policy({"random": {"ratio": evenly, **random}}, model=model),
        "random, the trained rates": make_policy(
            {"random": {"rates": np.clip(rates, 0, 1), **random}}, model=model
        ),
    }
    return best | {method: (policy, "") for method, policy in others.items()}


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
    """Measure every method, the trained one by its name, on every task, whose samples are those compared and those for
    calibration; returns the rows and the share of the tokens that it keeps in each head on the first task."""
    (method, policy), rows, first_rates = trained, [], None

    def add_row(
        task: str, samples: Sequence[Sample], method: str, policy: Policy, choice: str = ""
    ) -> Measurement:
        found = measure(model, policy, samples, Manner(chunk=default_chunk(context)))
        sizes = found.kv_ratio, found.footprint
        rows.append(Row(method, task, context, *sizes, found.score, found.answers, found.by_kind, choice))
        say(f"{task}: {method} {100 * found.score:.1f}% right at {found.kv_ratio:.3f} of the cache")
        return found

    for task, (samples, calibration) in tasks.items():
        add_row(task, samples, "full", make_policy("full", model=model))
        own = add_row(task, samples, method, policy)
        first_rates = own.rates if first_rates is None else first_rates
        run, shape = TeacherForcing(model, calibration), own.rates.shape
        known = orders(run, shape, policy.window) | {"the trained rates": own.rates}
        static = Rivals(run, known, len(samples[0].context), policy.window, shape)
        sizes = {"kv_ratio": own.kv_ratio, "rates": own.rates, "window": policy.window}
        for rival, (other, choice) in same_size(model, static, evictions, seed=seed, **sizes).items():
            add_row(task, samples, rival, other, choice)
    assert first_rates is not None
    return rows, first_rates


def report(
    model: Decoder, params: Any, config: Recipe, folder: Path, say: Callable[[str], None]
) -> list[Row]:
    """Measure, write the report's files into `folder`, and return the rows. For models with the built-in vocabulary."""
    began, worked = time.perf_counter(), time.process_time()
    tasks = {}
    for kind, count in SAMPLES[config.report].items():
        task = builtin_task(kind)
        source, others = FromSeeds(lambda _, task=task: task, RIGHT), RIVAL_SAMPLES[kind]
        compared = source.samples(Split(0, count), count, CONTEXT)
        tasks[task.name] = compared, source.samples(Split(0, count, calibration=True), others, CONTEXT)
    policy = config.deploy(params, model)
    options = {"evictions": config.rivals, "context": CONTEXT, "seed": config.seed, "say": say}
    rows, rates = compare(model, (config.method, policy), tasks, **options)
    own = {option(name).removeprefix("--"): value for name, value in config.own_options().items()}
    description = {
        "model": config.model, "method": config.method, **own, "steps": config.steps, "seed": config.seed,
        "mesh": str(config.mesh), "jax": jax.__version__, "device": jax.devices()[0].device_kind,
        "report seconds": round(time.perf_counter() - began),
        "report processor seconds": round(time.process_time() - worked),
    }  # fmt: skip
    write(folder, rows, rates, description)
    return rows


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table."""
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
    """`report.json`, `report.md`, `tradeoff.png` and `heads.png` in `out`."""
    figures = {"rows": [dataclasses.asdict(row) for row in rows], "rates": rates.tolist()}
    (out / "report.json").write_text(json.dumps(description | figures, indent=1) + "\n")
    choices = {
        f"{row.method} on {row.task}, chosen on other contexts": row.choice for row in rows if row.choice
    }
    notes = "\n".join(f"- {key}: {value}" for key, value in (choices | description).items())
    (out / "report.md").write_text(f"# Accuracy against KV size\n\n{table(rows)}\n\n{notes}\n")
    panels: dict[str, dict[str, list[tuple[float, ...]]]] = {}
    for row in rows:
        title = f"{row.task}, {row.context} tokens, {row.answers} answers"
        panels.setdefault(title, {})[row.method] = [(row.footprint, row.kv_ratio, row.accuracy)]
    pictures.draw_tradeoff(out / "tradeoff.png", panels)
    draw_heads(out / "heads.png", rates)


def draw_heads(file: Path, rates: Float[np.ndarray, "l k"]) -> None:
    """The share of tokens that each head keeps, as a map."""
    layers, heads = rates.shape
    figure = pictures.figure(2.5 + 0.45 * heads, 1.6 + 0.3 * layers)
    image = pictures.draw_heads(figure.add_subplot(), rates, "share of tokens admitted")
    figure.colorbar(image)
    figure.savefig(file)
