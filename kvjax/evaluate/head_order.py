"""What each kv head is worth to a task's answers, measured without training: orders in which heads may be kept whole.

Both orders come from one loss (`teacher_forced`): of all heads whole but one, and of all heads streaming but one.
"""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float

from kvjax.atomic import write_text
from kvjax.evaluate.teacher_forced import Outcome
from kvjax.policies.admission.head_pattern import read_pattern

Run = Callable[[Bool[np.ndarray, "l k"], int, int], Outcome]
"""What comes of some whole heads, the others at so many sinks and such a window."""

SINK = 4
"""Sinks of the streaming heads while heads are measured."""
MEASURED_TOKENS = 250_000
"""Tokens that all measurements of a model read together by default."""


def one_streaming(run: Run, whole: Bool[np.ndarray, "l k"], window: int) -> float:
    """How much the loss rises when these heads stream and all others are whole."""
    return run(~whole, SINK, window).loss


def one_whole(run: Run, whole: Bool[np.ndarray, "l k"], window: int) -> float:
    """How much the loss falls when these heads are whole and all others stream."""
    return -run(whole, SINK, window).loss


MEASURES = {"one streaming": one_streaming, "one whole": one_whole}


def measured(
    measure: Callable[..., float], run: Run, shape: tuple[int, int], window: int
) -> Float[np.ndarray, "l k"]:
    """What each head is worth, from 0 for the least to 1 for the most."""
    worth = np.zeros(shape)
    for head in np.ndindex(shape):
        whole = np.zeros(shape, bool)
        whole[head] = True
        worth[head] = measure(run, whole, window)
    spread = worth.max() - worth.min()
    return (worth - worth.min()) / spread if spread > 0 else np.zeros(shape)


def orders(
    run: Run, shape: tuple[int, int], window: int, folder: Path | None = None
) -> dict[str, Float[np.ndarray, "l k"]]:
    """Every measure's order by name. In `folder` each is kept as a DuoAttention pattern folder, and read where it was
    measured before."""
    found = {}
    for name, measure in MEASURES.items():
        own = None if folder is None else folder / name.replace(" ", "_")
        if own is not None and (own / "config.json").is_file():
            found[name] = read_pattern(own)[0]
            continue
        found[name] = measured(measure, run, shape, window)
        if own is not None:
            write_pattern(own, found[name], SINK, window)
    return found


def write_pattern(folder: Path, weights: Float[np.ndarray, "l k"], sink: int, window: int) -> None:
    """A DuoAttention pattern folder, as `read_pattern` reads it."""
    folder.mkdir(parents=True, exist_ok=True)
    np.savetxt(folder / "full_attention_heads.tsv", weights, delimiter="\t")
    # last: a folder that has it is whole
    write_text(folder / "config.json", json.dumps({"sink_size": sink, "recent_size": window}) + "\n")


def default_contexts(heads: int, length: int) -> int:
    """How many contexts of `length` tokens heads are measured on: 2 to 10, as `MEASURED_TOKENS` allow."""
    return int(np.clip(MEASURED_TOKENS // (len(MEASURES) * heads * length), 2, 10))
