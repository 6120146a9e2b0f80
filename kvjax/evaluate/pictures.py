"""Pictures of results, as .png files."""

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

MARKERS = "osD^v<>PX*hdp"
COLORS = (
    *("black", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown", "tab:pink", "tab:gray"),
    *("tab:olive", "tab:cyan", "gold", "tab:blue", "navy", "turquoise", "lime", "salmon"),
    *("darkgreen", "plum", "sienna", "steelblue", "magenta", "khaki", "maroon"),
)
"""Colors of methods. If there are more methods than colors, they differ by their markers."""

FEW = 7
"""The most lines in a picture of means, so that their labels can be distinguished."""
LONGEST_LABEL = 24
"""The most characters of a label in a picture of means. Longer names would leave no width for the lines."""
APART = 0.06
"""The least distance between two labels, as a share of the axes' height."""

MEASURES = "KV footprint, of full attention's", "entries kept, of the full cache's"
"""Labels of the axes against which scores are drawn."""


def figure(width: float, height: float) -> Any:
    """Return a matplotlib figure of `width` × `height` inches that needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    sheet = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(sheet)
    return sheet


def draw_heads(
    axes: Any,
    values: Float[np.ndarray, "l k"],
    title: str,
    most: float | None = None,
    least: float | None = 0.0,
) -> Any:
    """Draw a value for each layer and kv head as a map on the axes, and return the image.

    Colors range from `least` to `most`; None stands for the smallest or largest value.
    """
    layers, heads = values.shape
    image = axes.imshow(values, vmin=least, vmax=most, cmap="viridis", aspect="auto")
    axes.set(xlabel="kv head", ylabel="layer", xticks=_ticks(heads), yticks=_ticks(layers))
    axes.set_title(title, fontsize=9)
    return image


def _ticks(count: int) -> list[int]:
    """Return at most 16 ticks for `count` rows."""
    return list(range(0, count, -(-count // 16)))


def draw_depths(
    file: Path,
    title: str,
    grid: Float[np.ndarray, "row depth"],
    rows: Sequence[str],
    depths: Sequence[float],
) -> None:
    """Draw a map of scores by row and depth. It is green where every answer was right."""
    sheet = figure(6.5, 1.5 + 0.5 * len(grid))
    axes = sheet.add_subplot()
    image = axes.imshow(grid, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
    axes.set_xticks(range(len(depths)), [f"{100 * depth:.0f}%" for depth in depths])
    axes.set_yticks(range(len(grid)), rows)
    axes.set(xlabel="depth of the needle", ylabel="context (share of the cache)", title=title)
    sheet.colorbar(image, label="answers right")
    sheet.savefig(file)


def draw_tradeoff(file: Path, panels: Mapping[str, Mapping[str, Sequence[tuple[float, ...]]]]) -> None:
    """Draw two panels side by side for each title: the score in percent against the footprint and against the entries
    kept. Each method is a line of (footprint, kept, score) points."""
    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    columns = 4 if len(panels) > 4 else 2
    rows = -(-len(panels) * len(MEASURES) // columns)
    sheet = figure(4.5 * columns + 1.8, 3.6 * rows)
    for index, ((title, lines), (axis, measure)) in enumerate(product(panels.items(), enumerate(MEASURES))):
        axes = sheet.add_subplot(rows, columns, index + 1)
        for name, points in lines.items():
            method = names.index(name)
            x, score = zip(*sorted((point[axis], point[-1]) for point in points), strict=True)
            style = {"color": COLORS[method % len(COLORS)], "marker": MARKERS[method % len(MARKERS)]}
            axes.plot(x, [100 * s for s in score], label=name, linewidth=1, markersize=4, **style)
        axes.set(xlabel=measure, ylabel="score, %")
        axes.set_title(title, fontsize=9)
        axes.grid(alpha=0.3)
    shown = {}
    for axes in sheet.axes:
        handles, labels = axes.get_legend_handles_labels()
        shown.update(zip(labels, handles, strict=True))
    sheet.legend(shown.values(), shown.keys(), fontsize=7, loc="outside right upper")
    sheet.savefig(file)


def draw_means(
    file: Path, panels: Mapping[str, tuple[float | None, Mapping[str, Sequence[tuple[float, float]]]]]
) -> None:
    """Draw a panel for each title: the score in percent against the share of entries kept.

    The full cache's score is a dashed horizontal line. Each method is a line of (kept, score) points, with its name at
    the smallest share.
    """
    sheet = figure(5.6, 3.7 * len(panels))
    for index, (title, (full, lines)) in enumerate(panels.items()):
        axes = sheet.add_subplot(len(panels), 1, index + 1)
        axes.set_xscale("log", base=2)
        ends = {}
        for place, (name, points) in enumerate(lines.items()):
            kept, score = zip(*sorted(points, reverse=True), strict=True)
            # the first color is the full cache's
            color, marker = COLORS[(place + 1) % len(COLORS)], MARKERS[(place + 1) % len(MARKERS)]
            axes.plot(kept, [100 * x for x in score], color=color, marker=marker, linewidth=1.5, markersize=4)
            ends[name] = 100 * score[-1], color
        if full is not None:
            axes.axhline(100 * full, color=COLORS[0], linewidth=1, linestyle="--")
            ends["full cache"] = 100 * full, COLORS[0]
        axes.invert_xaxis()
        axes.xaxis.set_major_formatter(_fraction)
        axes.set(xlabel="share of the entries kept", ylabel="score, %", title=title)
        axes.grid(alpha=0.3)
        _label_ends(axes, ends)
    sheet.savefig(file)


def _fraction(share: float, place: int | None = None) -> str:
    """Return a share as 1/4, or as 1."""
    return "1" if share == 1 else f"1/{1 / share:.3g}"


def _label_ends(axes: Any, ends: Mapping[str, tuple[float, str]]) -> None:
    """Write names to the right of the axes, at the scores where their lines end, but at least `APART` apart."""
    low, high = axes.get_ylim()
    y = -np.inf
    for name, (score, color) in sorted(ends.items(), key=lambda item: item[1]):
        y = max(score, y + APART * (high - low))
        name = name if len(name) <= LONGEST_LABEL else f"{name[: LONGEST_LABEL - 1]}…"
        axes.text(1.02, y, name, transform=axes.get_yaxis_transform(), color=color, fontsize=8, va="center")


def draw_kv_ratios(file: Path, title: str, maps: dict[str, dict[str, Float[np.ndarray, "l k"]]]) -> None:
    """Draw maps of kept entries by layer and kv head: a row of maps for each task, a column for each budget.

    maps: the ratios by task and budget.
    """
    columns = max(map(len, maps.values()))
    layers, heads = next(iter(next(iter(maps.values())).values())).shape
    sheet = figure(1.2 + columns * (1.4 + 0.12 * heads), 0.6 + len(maps) * (1.2 + 0.12 * layers))
    sheet.suptitle(title, fontsize=10)
    for row, (task, budgets) in enumerate(maps.items()):
        for column, (budget, ratios) in enumerate(budgets.items()):
            axes = sheet.add_subplot(len(maps), columns, row * columns + column + 1)
            image = draw_heads(axes, ratios, f"{task}, {budget}", most=1.0)
    sheet.colorbar(image, ax=sheet.axes, label="share of the entries kept")
    sheet.savefig(file)
