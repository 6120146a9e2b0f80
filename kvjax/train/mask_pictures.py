"""Pictures of a run that learns a number for each head: the chosen heads, and the scalars over the updates."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float

from kvjax.evaluate.pictures import draw_heads, figure
from kvjax.policies.admission.head_pattern import heads_for


def draw_weights(file: Path, weights: Float[np.ndarray, "l k"], sparsity: float | None) -> None:
    """Draw the weights of all kv heads and, next to them, the heads that keep the whole context at this sparsity. With
    `sparsity` None these are the heads with a weight of at least 0.5."""
    layers, heads = weights.shape
    sheet = figure(2 * (2.2 + 0.3 * heads), 1.6 + 0.25 * layers)
    left, right = sheet.subplots(1, 2)
    sheet.colorbar(draw_heads(left, weights, "weight", least=None))
    whole = heads_for(weights, sparsity)
    draw_heads(right, whole.astype(np.float64), f"whole: {whole.sum()} of {whole.size}", 1.0)
    sheet.savefig(file)


def draw_course(file: Path, metrics: Path, panels: Sequence[Sequence[str]]) -> None:
    """Draw scalars from a run's metrics.jsonl over the updates. `panels`: the names of the scalars in each panel."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [line for line in lines if "validation" not in line]
    sheet = figure(3.6 * len(panels), 2.8)
    for index, names in enumerate(panels):
        axes = sheet.add_subplot(1, len(panels), index + 1)
        for name in names:
            axes.plot([x["step"] for x in steps], [x[name] for x in steps], linewidth=0.9, label=name)
        axes.set_xlabel("update")
        axes.legend(fontsize=7)
    sheet.savefig(file)
