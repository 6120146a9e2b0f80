"""What training bought: accuracy against measured KV size, beside what costs nothing to train, at equal size.

Every row is measured through the paged cache: contexts are read, then questions asked of the small cache; the sizes
are the cache's own.
"""

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from jaxtyping import Float

from kvjax.evaluate import pictures
from kvjax.evaluate.accuracy import Accuracy, measure
from kvjax.evaluate.fixed import sink_and_window, whole_heads
from kvjax.evaluate.tasks import make_task
from kvjax.evaluate.tasks.task import Sample
from kvjax.models.decoder import Decoder
from kvjax.policies import Policy, make_policy
from kvjax.policies.admission.wgkv import WriteGate
from kvjax.train.config import TrainConfig

CONTEXT = 1024
"""Tokens of the report's contexts."""
SAMPLES = {"default": {"recall": 16}, "full": {"recall": 32, "needle": 176, "copy": 256}}
"""Contexts of each task, by --report: at least 192 answers by default, at least 500 in full."""
FIRST_SEED = 1_000_000
"""Seeds of the report's contexts start here, whatever the run's seed: every run is asked the same."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One method on one task: `accuracy` over `answers` answers at `kv_ratio` of the full cache's entries."""

    method: str
    task: str
    context: int
    kv_ratio: float
    accuracy: float
    answers: int
    by_kind: dict[str, float]


def rivals(model: Decoder, gated: Accuracy, *, context: int, window: int, seed: int) -> dict[str, Policy]:
    """The policies that a trained one is held against, each sized to hold as many entries as it did.

    Sink + window: the window is as wide as the size allows. Head pattern: as many whole heads as fit, in the order of
    the gates' own admission rates, the streaming heads' windows widened until the size is met. Random: as many tokens,
    evenly; and by the gates' own rate of each head.
    """
    size = gated.kv_ratio * context
    left = context - (window - 1)
    return {
        "sink + window": sink_and_window(model, entries=size),
        "head pattern": whole_heads(model, gated.rates, entries=size, context=context, window=window),
        "random": make_policy(
            "random",
            model=model,
            window=window,
            seed=seed,
            ratio=float(np.clip((size - window + 1) / left, 0, 1)),
        ),
        "random, the gates' rates": make_policy(
            "random", model=model, window=window, seed=seed, rates=np.clip(gated.rates, 0, 1)
        ),
    }


def compare(
    model: Decoder,
    gates: WriteGate,
    tasks: dict[str, list[Sample]],
    *,
    context: int,
    window: int,
    tau: float,
    seed: int,
    say: Callable[[str], None],
) -> tuple[list[Row], Float[np.ndarray, "l k"]]:
    """Measure every method on every task; returns the rows and the gates' admission rates on the first task."""
    rows, first_rates = [], None
    for task, samples in tasks.items():

        def row(method, policy, task=task, samples=samples):
            result = measure(model, policy, samples)
            rows.append(
                Row(method, task, context, result.kv_ratio, result.accuracy, result.answers, result.by_kind)
            )
            say(f"{task}: {method} {100 * result.accuracy:.1f}% right at {result.kv_ratio:.3f} of the cache")
            return result

        row("full", make_policy("full", model=model))
        # its real size is not known yet, so the pool takes everything
        gated = row("wgkv", make_policy("wgkv", model=model, gates=gates, tau=tau, window=window))
        first_rates = gated.rates if first_rates is None else first_rates
        for method, policy in rivals(model, gated, context=context, window=window, seed=seed).items():
            row(method, policy)
    assert first_rates is not None
    return rows, first_rates


def report(
    model: Decoder, gates: WriteGate, config: TrainConfig, folder: Path, say: Callable[[str], None]
) -> list[Row]:
    """Measure, write the report's files into `folder`, and return the rows. For models with the built-in vocabulary."""
    began = time.perf_counter()
    tasks = {}
    for name, count in SAMPLES[config.report].items():
        task = make_task(name)
        tasks[name] = [task.sample(FIRST_SEED + index, CONTEXT) for index in range(count)]
    rows, rates = compare(
        model, gates, tasks, context=CONTEXT, window=config.window, tau=config.tau, seed=config.seed, say=say
    )
    described = {
        "model": config.model, "lambda": config.lambda_, "tau": config.tau, "window": config.window,
        "steps": config.steps, "seed": config.seed, "mesh": str(config.mesh), "jax": jax.__version__,
        "device": jax.devices()[0].device_kind, "report seconds": round(time.perf_counter() - began),
    }  # fmt: skip
    write(folder, rows, rates, described)
    return rows


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table."""
    lines = ["| task | method | KV size | accuracy | answers |", "|---|---|---|---|---|"]
    lines += [
        f"| {r.task}, {r.context} tokens | {r.method} | {r.kv_ratio:.3f} | {100 * r.accuracy:.1f}% | {r.answers} |"
        for r in rows
    ]
    return "\n".join(lines)


def write(
    out: Path, rows: list[Row], rates: Float[np.ndarray, "l k"], description: dict[str, object]
) -> None:
    """`report.json`, `report.md`, `tradeoff.png` and `heads.png` in `out`."""
    found = {"rows": [dataclasses.asdict(row) for row in rows], "rates": rates.tolist()}
    (out / "report.json").write_text(json.dumps(description | found, indent=1) + "\n")
    notes = "\n".join(f"- {key}: {value}" for key, value in description.items())
    (out / "report.md").write_text(f"# Accuracy against KV size\n\n{table(rows)}\n\n{notes}\n")
    _draw_tradeoff(out / "tradeoff.png", rows)
    _draw_heads(out / "heads.png", rates)


def _draw_tradeoff(file: Path, rows: list[Row]) -> None:
    tasks = list(dict.fromkeys(row.task for row in rows))
    figure = pictures.figure(4.5 * len(tasks), 3.6)
    for index, task in enumerate(tasks):
        axes = figure.add_subplot(1, len(tasks), index + 1)
        mine = [row for row in rows if row.task == task]
        for row in mine:
            axes.plot(
                row.kv_ratio, 100 * row.accuracy, "*" if row.method == "wgkv" else "o", label=row.method
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
