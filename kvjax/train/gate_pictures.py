"""Pictures for gates that learn targets layer by layer: predictions at held-out positions, and losses over updates."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from kvjax.evaluate.pictures import figure

POINTS = 4000
"""The maximum number of points that are drawn for a layer."""
AXIS_MIN = 1e-4
"""The lower limit of the axes. Smaller scores are drawn at this limit."""
INCHES = 1.9
"""The width and height of a layer's axes."""
SMOOTHED = 50
"""The number of updates over which training losses are averaged, at most a twentieth of all updates."""


def _grid(layers: int) -> tuple[Any, list[Any]]:
    """Return a figure with axes for each layer."""
    columns = min(layers, 6)
    rows = -(-layers // columns)
    sheet = figure(INCHES * columns, INCHES * rows + 0.4)
    return sheet, [sheet.add_subplot(rows, columns, index + 1) for index in range(layers)]


def draw_predictions(
    file: Path, predicted: Float[np.ndarray, "n l k"], target: Float[np.ndarray, "n l k"], important: float
) -> None:
    """Draw predicted against target scores of held-out positions and all kv heads, one panel per layer. Lines mark
    `important`, the score from which a token counts as important."""
    sheet, panels = _grid(predicted.shape[1])
    for layer, axes in enumerate(panels):
        x, y = (np.ravel(scores[:, layer]) for scores in (target, predicted))
        sampled = np.linspace(0, len(x) - 1, min(len(x), POINTS)).astype(int)
        axes.scatter(*(np.maximum(z[sampled], AXIS_MIN) for z in (x, y)), s=2, alpha=0.25, linewidths=0)
        axes.plot([AXIS_MIN, 1], [AXIS_MIN, 1], color="black", linewidth=0.5)
        for line in (axes.axhline, axes.axvline):
            line(important, color="tab:orange", linewidth=0.7)
        agreeing = np.mean((x >= important) == (y >= important))
        axes.set(xscale="log", yscale="log", xlim=(AXIS_MIN, 1.2), ylim=(AXIS_MIN, 1.2))
        axes.set_title(f"layer {layer}: {100 * agreeing:.1f}% agree", fontsize=7)
        axes.tick_params(labelsize=6)
    sheet.supxlabel("target", fontsize=8)
    sheet.supylabel("predicted", fontsize=8)
    sheet.savefig(file)


def draw_losses(file: Path, metrics: Path, prefix: str) -> None:
    """Draw each layer's smoothed training loss and held-out loss over the updates, from a run's metrics.jsonl. The
    names of the layers' losses begin with `prefix`."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    validations = [line for line in lines if "validation" in line]
    steps = [line for line in lines if "validation" not in line]
    names = sorted(name for name in steps[-1] if name.startswith(prefix))
    sheet, panels = _grid(len(names))
    width = max(1, min(SMOOTHED, len(steps) // 20))
    for axes, name in zip(panels, names, strict=True):
        values = np.convolve([line[name] for line in steps], np.ones(width) / width, "valid")
        axes.plot([line["step"] for line in steps[width - 1 :]], values, linewidth=0.8, label="training")
        points = [(line["step"], line["validation"][name]) for line in validations]
        axes.plot(*zip(*points, strict=True), ".-", markersize=2, linewidth=0.8, label="held out")
        axes.set_yscale("log")
        axes.set_title(f"layer {int(name.removeprefix(prefix))}", fontsize=7)
        axes.tick_params(labelsize=6, which="both")
    panels[0].legend(fontsize=6)
    sheet.supxlabel("update", fontsize=8)
    sheet.supylabel("loss, summed over kv heads", fontsize=8)
    sheet.savefig(file)
