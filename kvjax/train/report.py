"""What training bought: accuracy against measured KV size, beside what costs nothing to train, at equal size.

Every row is measured through the paged cache: contexts are read in four chunks, then questions asked of the small
cache; the sizes are the cache's own.
"""

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from kvjax.evaluate import pictures
from kvjax.evaluate.config import default_chunk
from kvjax.evaluate.measuring import Manner, measure
from kvjax.evaluate.static_heads import Rivals, orders
from kvjax.evaluate.teacher_forced import TeacherForced
from kvjax.models.decoder import Decoder
from kvjax.policies import Policy, make_policy
from kvjax.tasks import make_task
from kvjax.tasks.context import Context, exact
from kvjax.tasks.splits import CALIBRATION_SEED, FIRST_SEED
from kvjax.train.recipe import Recipe, option

CONTEXT = 1024
"""Tokens of the report's contexts."""
SAMPLES = {"default": {"recall": 16}, "full": {"recall": 32, "needle": 176, "copy": 256}}
"""Contexts of each task, by --report: at least 192 answers by default, at least 500 in full. Their seeds do not depend
on the run's: every run is asked the same."""
CALIBRATION = {"recall": 8, "needle": 16, "copy": 16}
"""Contexts of each task that static rivals are chosen on."""
EVICTIONS = {"KeyDiff": "keydiff", "H2O": "h2o", "Expected Attention": "expected_attention"}
"""The evictions that do best here without training."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One method on one task."""

    method: str
    task: str
    context: int
    kv_ratio: float
    """Of the full cache's entries, once the context was read."""
    footprint: float
    """Of the entries over all steps."""
    accuracy: float
    """Over the answers, from 0 to 1."""
    answers: int
    by_kind: dict[str, float]
    choice: str = ""
    """What was chosen on calibration contexts, in words."""


def same_size(
    model: Decoder,
    static: Rivals,
    *,
    kv_ratio: float,
    rates: Float[np.ndarray, "l k"],
    window: int,
    seed: int,
) -> dict[str, tuple[Policy, str]]:
    """The policies that a trained one is held against, each sized to hold as many entries as it did: `kv_ratio` of all,
    of which `rates` of each head's beyond the window.

    Sink + window and the head pattern: the best on calibration contexts (`Rivals`), with what was chosen in words. The
    evictions once a context was read. Random: as many tokens, evenly; and by the gates' own rate of each head.
    """
    entries = kv_ratio * static.context
    found = {"sink + window": static.sink_and_window(entries), "head pattern": static.head_pattern(entries)}
    random = {"model": model, "window": window, "seed": seed}
    evenly = float(np.clip((entries - window + 1) / (static.context - window + 1), 0, 1))
    chosen = {method: (choice.fixed.policy(model), choice.said) for method, choice in found.items()}
    others = {method: make_policy(name, model=model, ratio=kv_ratio) for method, name in EVICTIONS.items()}
    others |= {
        "random": make_policy("random", ratio=evenly, **random),
        "random, the gates' rates": make_policy("random", rates=np.clip(rates, 0, 1), **random),
    }
    return chosen | {method: (policy, "") for method, policy in others.items()}


def compare(
    model: Decoder,
    trained: tuple[str, Policy],
    tasks: dict[str, tuple[Sequence[Context], Sequence[Context]]],
    *,
    context: int,
    seed: int,
    say: Callable[[str], None],
) -> tuple[list[Row], Float[np.ndarray, "l k"]]:
    """Measure every method, the trained one by its name, on every task, whose contexts are those compared and those for
    calibration; returns the rows and the share of the tokens that it keeps in each head on the first task."""
    (method, policy), rows, first_rates = trained, [], None
    for task, (contexts, calibration) in tasks.items():

        def row(method, policy, choice="", task=task, contexts=contexts):
            found = measure(model, policy, contexts, Manner(chunk=default_chunk(context)))
            sizes = found.kv_ratio, found.footprint
            rows.append(Row(method, task, context, *sizes, found.score, found.answers, found.by_kind, choice))
            say(f"{task}: {method} {100 * found.score:.1f}% right at {found.kv_ratio:.3f} of the cache")
            return found

        row("full", make_policy("full", model=model))
        own = row(method, policy)
        first_rates = own.rates if first_rates is None else first_rates
        run, shape = TeacherForced(model, calibration), own.rates.shape
        known = orders(run, shape, policy.window) | {"the gates' rates": own.rates}
        static = Rivals(run, known, len(contexts[0].tokens), policy.window, shape)
        sizes = {"kv_ratio": own.kv_ratio, "rates": own.rates, "window": policy.window}
        for rival, (other, choice) in same_size(model, static, seed=seed, **sizes).items():
            row(rival, other, choice)
    assert first_rates is not None
    return rows, first_rates


def report(
    model: Decoder, params: Any, config: Recipe, folder: Path, say: Callable[[str], None]
) -> list[Row]:
    """Measure, write the report's files into `folder`, and return the rows. For models with the built-in vocabulary."""
    began, worked = time.perf_counter(), time.process_time()
    tasks = {}
    for name, count in SAMPLES[config.report].items():
        task = make_task(name)
        tasks[name] = tuple(
            [exact(task.sample(first + index, CONTEXT)) for index in range(number)]
            for first, number in ((FIRST_SEED, count), (FIRST_SEED + CALIBRATION_SEED, CALIBRATION[name]))
        )
    policy = config.deployed(params, model)
    rows, rates = compare(model, (config.method, policy), tasks, context=CONTEXT, seed=config.seed, say=say)
    own = {option(name).removeprefix("--"): value for name, value in config.own_options().items()}
    described = {
        "model": config.model, "method": config.method, **own, "steps": config.steps, "seed": config.seed,
        "mesh": str(config.mesh), "jax": jax.__version__, "device": jax.devices()[0].device_kind,
        "report seconds": round(time.perf_counter() - began),
        "report processor seconds": round(time.process_time() - worked),
    }  # fmt: skip
    write(folder, rows, rates, described, config.method)
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
    out: Path, rows: list[Row], rates: Float[np.ndarray, "l k"], description: dict[str, object], trained: str
) -> None:
    """`report.json`, `report.md`, `tradeoff.png` and `heads.png` in `out`."""
    found = {"rows": [dataclasses.asdict(row) for row in rows], "rates": rates.tolist()}
    (out / "report.json").write_text(json.dumps(description | found, indent=1) + "\n")
    chosen = {
        f"{row.method} on {row.task}, chosen on other contexts": row.choice for row in rows if row.choice
    }
    notes = "\n".join(f"- {key}: {value}" for key, value in (chosen | description).items())
    (out / "report.md").write_text(f"# Accuracy against KV size\n\n{table(rows)}\n\n{notes}\n")
    _draw_tradeoff(out / "tradeoff.png", rows, trained)
    _draw_heads(out / "heads.png", rates)


def _draw_tradeoff(file: Path, rows: list[Row], trained: str) -> None:
    tasks = list(dict.fromkeys(row.task for row in rows))
    figure = pictures.figure(4.5 * len(tasks), 3.6)
    for index, task in enumerate(tasks):
        axes = figure.add_subplot(1, len(tasks), index + 1)
        mine = [row for row in rows if row.task == task]
        for row in mine:
            axes.plot(
                row.kv_ratio, 100 * row.accuracy, "*" if row.method == trained else "o", label=row.method
            )
        axes.set(xscale="log", ylim=(-3, 103), xlabel="share of the full KV cache", ylabel="answers right, %")
        smallest = min(row.kv_ratio for row in mine)
        ticks = [tick for tick in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0) if tick >= smallest / 2]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.set_title(f"{task}, {mine[0].context} tokens, {mine[0].answers} answers", fontsize=9)
        axes.grid(alpha=0.3)
    figure.legends.clear()
    figure.axes[0].legend(fontsize=7, loc="center right")
    figure.savefig(file)


def _draw_heads(file: Path, rates: Float[np.ndarray, "l k"]) -> None:
    layers, heads = rates.shape
    figure = pictures.figure(2.5 + 0.45 * heads, 1.6 + 0.3 * layers)
    image = pictures.draw_heads(figure.add_subplot(), rates, "share of tokens admitted")
    figure.colorbar(image)
    figure.savefig(file)
