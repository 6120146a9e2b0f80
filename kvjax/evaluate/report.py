"""report.md, pareto.png and the maps of kept entries, from the cells of results.jsonl."""

import platform
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from kvjax.evaluate import pictures
from kvjax.evaluate.config import EvaluateConfig
from kvjax.evaluate.footprint import critical
from kvjax.evaluate.results import Cell

FULL = "full"
"""The policy that others are held against."""
SHARE = 0.9
"""Of its score, for critical footprints."""


def report(config: EvaluateConfig, cells: Sequence[Cell], command: str) -> str:
    """Write the report of all `cells` into the folder, and return its tables."""
    tables = "\n\n".join([*map(_scores, _panels(cells).values()), *_speeds(cells)])
    text = f"# Policies compared\n\n{_about(config, cells)}\n\n{tables}\n\n{_made_with(command)}\n"
    (config.out / "report.md").write_text(text, encoding="utf-8")
    _draw(config.out, cells)
    return tables


def _panels(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    """The cells of each task and length, by its title."""
    panels: dict[str, list[Cell]] = {}
    for cell in cells:
        panels.setdefault(f"{cell.task}, {cell.context} tokens", []).append(cell)
    return panels


def _by_policy(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    policies: dict[str, list[Cell]] = {}
    for cell in cells:
        policies.setdefault(cell.policy, []).append(cell)
    return policies


def _about(config: EvaluateConfig, cells: Sequence[Cell]) -> str:
    if config.question_aware:
        how = (
            "**Question-aware**: each question was read with its context (all but its last token) and both were "
            "compressed, before the answer."
        )
    else:
        how = "**Question-independent**: contexts were read and compressed before any question was seen."
    lines = [
        how,
        f"Contexts were read in chunks of {config.chunk} tokens. A cell is the score in percent at its measured KV "
        "footprint: the entries held, summed over the query steps of context, question and answer, over those of full "
        "attention. The last column is the smallest footprint that keeps "
        f"{100 * SHARE:.0f}% of the full cache's score, on straight lines between budgets; < and >: below the smallest "
        "and above the largest that was measured; –: the full cache answered nothing, or was not measured.",
    ]
    if any("quest" in cell.policy for cell in cells):
        lines.append(
            "Quest frees nothing: its budget is what a query reads, its footprint that of the cache it reads from."
        )
    published = {cell.published for cell in cells if cell.published}
    if published:
        tasks = dict.fromkeys(cell.task for cell in cells if cell.published)
        lines.append(f"RULER's own data: {', '.join(tasks)}. Not comparable with RULER's tasks made here.")
    return "\n\n".join(lines)


def _scores(cells: list[Cell]) -> str:
    first, budgets = cells[0], sorted({cell.budget for cell in cells if cell.policy != FULL} or {1.0})
    full = next((cell.score for cell in cells if cell.policy == FULL), None)
    most = max(cell.samples for cell in cells)
    lines = [
        f"## {first.task}, {first.context} tokens",
        f"{first.metric}{'' if first.perplexity is None else ' (and perplexity)'}; {most} answers a cell.",
        "",
        "| policy | " + " | ".join(f"{budget:g}" for budget in budgets) + f" | {100 * SHARE:.0f}% at |",
        "|---" * (len(budgets) + 2) + "|",
    ]
    for name, own in _by_policy(cells).items():
        if name == FULL:
            shown = [_shown(own[0])] + [""] * (len(budgets) - 1)
            lines.append(f"| {name} | {' | '.join(shown)} | |")
            continue
        found = {cell.budget: cell for cell in own}
        shown = [_shown(found[budget]) if budget in found else "" for budget in budgets]
        points = [(cell.footprint, cell.score) for cell in own]
        crossing = str(critical(points, full, SHARE)) if full else "–"
        lines.append(f"| {name} | {' | '.join(shown)} | {crossing} |")
    return "\n".join(lines)


def _shown(cell: Cell) -> str:
    beside = "" if cell.perplexity is None else f" ({cell.perplexity:.2f})"
    return f"{100 * cell.score:.1f}{beside} at {cell.footprint:.2f}"


def _speeds(cells: Sequence[Cell]) -> list[str]:
    """A table for each length: sizes and speeds, the mean over its tasks."""
    tables = []
    for context in dict.fromkeys(cell.context for cell in cells):
        own: dict[tuple[str, float], list[Cell]] = {}
        for cell in cells:
            if cell.context == context:
                own.setdefault((cell.policy, cell.budget), []).append(cell)
        lines = [
            f"## Sizes and speeds, {context} tokens",
            "Means over the tasks. Entries: share of the full cache's once the context was read. MiB: its pages in "
            "use. Tokens per second: of a whole batch, without compilation.",
            "",
            "| policy | budget | entries | peak | MiB a context | prefill tokens/s | decode tokens/s |",
            "|---|---|---|---|---|---|---|",
        ]
        for (policy, budget), group in own.items():
            size = np.mean([cell.bytes for cell in group]) / 2**20
            entries, peak = (np.mean([getattr(c, name) for c in group]) for name in ("kv_ratio", "peak_kv"))
            speeds = [_mean([getattr(c, name) for c in group]) for name in ("prefill_tok_s", "decode_tok_s")]
            lines.append(
                f"| {policy} | {budget:g} | {entries:.3f} | {peak:.3f} | {size:.2f} | {' | '.join(speeds)} |"
            )
        tables.append("\n".join(lines))
    return tables


def _mean(speeds: Sequence[int | None]) -> str:
    known = [speed for speed in speeds if speed is not None]
    return f"{np.mean(known):.0f}" if known else "–"


def _made_with(command: str) -> str:
    kind = jax.devices()[0].device_kind
    lines = [
        "## Made with",
        f"- command: `{command}`",
        f"- devices: {jax.device_count()} × {kind} ({jax.default_backend()})",
        f"- versions: jax {jax.__version__}, Python {platform.python_version()}",
    ]
    return "\n".join(lines)


def _draw(out: Path, cells: Sequence[Cell]) -> None:
    panels = {
        f"{title}, {own[0].samples} answers": {
            name: [(cell.footprint, cell.score) for cell in points]
            for name, points in _by_policy(own).items()
        }
        for title, own in _panels(cells).items()
    }
    pictures.draw_tradeoff(out / "pareto.png", panels, "KV footprint, of full attention's")
    for folder in ("kept", "needle"):
        (out / folder).mkdir(exist_ok=True)
    for name, own in _by_policy(cells).items():
        maps = {
            title: {f"{cell.budget:g}": np.array(cell.kept) for cell in found}
            for title, found in _panels(own).items()
        }
        pictures.draw_kept(out / "kept" / f"{name}.png", f"{name}: kept entries, by budget", maps)
        needles = [cell for cell in own if cell.task == "needle"]
        if needles:
            depths = sorted(map(float, needles[0].by_kind))
            grid = np.array([[cell.by_kind[f"{depth:g}"] for depth in depths] for cell in needles])
            rows = [f"{cell.context} ({cell.kv_ratio:.2f})" for cell in needles]
            pictures.draw_depths(
                out / "needle" / f"{name}.png", name, grid, rows, depths, "context (share of the cache)"
            )
