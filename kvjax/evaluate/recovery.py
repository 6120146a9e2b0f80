"""Relative recovery: pass@1 over that of the dense model, which is the full cache of the same run or of another's
(KVPOP's dense model is the one before it learned to live with a small cache)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvjax.errors import UserError
from kvjax.evaluate.config import EvaluateConfig
from kvjax.evaluate.results import Cell, metric_of, read_cells
from kvjax.evaluate.workloads import Workload


@dataclass(frozen=True)
class Recovery:
    """A ratio of two pass@1, and its standard error over the draws of both; None: one of them has but one draw."""

    ratio: float
    """1: as good as the dense model."""
    error: float | None
    """To first order, the draws of both being independent; none of the dense model itself."""

    def __str__(self) -> str:
        return f"{self.ratio:.2f}{'' if self.error is None else f' ± {self.error:.2f}'}"


def recovery(cells: Sequence[Cell], dense: Mapping[tuple[str, int], Cell]) -> Recovery | None:
    """Of the mean pass@1 of a policy's cells, one a contest. None: one has nothing to hold it against, or that answered
    nothing.

    dense: the dense model's cells by task and length.
    """
    rivals = [dense.get((cell.task, cell.context)) for cell in cells]
    pairs = [(own, rival) for own, rival in zip(cells, rivals, strict=True) if rival is not None]
    total = sum(rival.score for _, rival in pairs)
    if len(pairs) < len(cells) or total == 0:
        return None
    if all(own == rival for own, rival in pairs):
        return Recovery(1.0, None)
    ratio = sum(own.score for own, _ in pairs) / total
    errors = [(_error(own), _error(rival)) for own, rival in pairs]
    squares = [a**2 + (ratio * b) ** 2 for a, b in errors if a is not None and b is not None]
    return Recovery(ratio, math.sqrt(sum(squares)) / total if len(squares) == len(pairs) else None)


def _error(cell: Cell) -> float | None:
    return None if cell.drawn is None else cell.drawn.error


def dense_cells(config: EvaluateConfig, cells: Sequence[Cell]) -> Mapping[tuple[str, int], Cell]:
    """The full cache's cells by task and length, those of --dense if it is given, else those among `cells`."""
    known = cells if config.dense is None else _read(config.dense)
    return {(cell.task, cell.context): cell for cell in known if cell.is_full}


def _read(folder: Path) -> list[Cell]:
    file = folder / "results.jsonl"
    if not file.is_file():
        raise UserError(f"--dense {folder}: there is no results.jsonl, which an evaluation leaves")
    return list(read_cells(file).values())


def check_dense(config: EvaluateConfig, workloads: Sequence[Workload]) -> None:
    """Refuse a --dense whose full cache did not answer the same problems, drawn the same way.

    Raises UserError.
    """
    if config.dense is None:
        return
    known = dense_cells(config, [])
    for own in workloads:
        at = f"--dense {config.dense}: {own.task} at {own.length} tokens"
        cell, metric = known.get((own.task, own.length)), metric_of(config, own)
        if cell is None:
            raise UserError(f"{at} is not there, answered by the full cache")
        if cell.contexts != own.digest:
            raise UserError(f"{at} is of other problems, or of another tokenizer's")
        if cell.metric != metric:
            raise UserError(f"{at} is {cell.metric}; expected {metric}")
