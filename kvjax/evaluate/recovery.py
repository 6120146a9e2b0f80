"""Relative recovery: pass@1 divided by the pass@1 of the dense model.

The dense model is the full cache of the same run or of another one. (KVPOP's dense model is the model before it was
trained for a small cache.)
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvjax.errors import UserError
from kvjax.evaluate.config import EvaluateConfig
from kvjax.evaluate.results import Result, metric_of, read_results
from kvjax.evaluate.sized_tasks import SizedTask


@dataclass(frozen=True)
class Recovery:
    """A ratio of two pass@1, with its standard error over the sampled answers of both models."""

    ratio: float
    """The ratio; 1 is as good as the dense model."""
    error: float | None
    """The standard error to first order, taking the answers of both models as independent. None if a model has a single
    answer to each problem, and for the dense model itself."""

    def __str__(self) -> str:
        return f"{self.ratio:.2f}{'' if self.error is None else f' ± {self.error:.2f}'}"


def recovery(results: Sequence[Result], dense: Mapping[tuple[str, int], Result]) -> Recovery | None:
    """Return the recovery of the mean pass@1 of a policy's results, one for each contest.

    Returns None if the dense model was not measured on one of them, or has no right answer. dense: the dense model's
    results by task and length.
    """
    references = [dense.get((result.task, result.context)) for result in results]
    pairs = [
        (own, reference) for own, reference in zip(results, references, strict=True) if reference is not None
    ]
    total = sum(reference.score for _, reference in pairs)
    if len(pairs) < len(results) or total == 0:
        return None
    if all(own == reference for own, reference in pairs):
        return Recovery(1.0, None)
    ratio = sum(own.score for own, _ in pairs) / total
    errors = [(_error(own), _error(reference)) for own, reference in pairs]
    squares = [a**2 + (ratio * b) ** 2 for a, b in errors if a is not None and b is not None]
    return Recovery(ratio, math.sqrt(sum(squares)) / total if len(squares) == len(pairs) else None)


def _error(result: Result) -> float | None:
    return None if result.drawn is None else result.drawn.error


def dense_results(config: EvaluateConfig, results: Sequence[Result]) -> Mapping[tuple[str, int], Result]:
    """Return the full cache's results by task and length, from --dense if given, else from `results`."""
    candidates = results if config.dense is None else _read(config.dense)
    return {(result.task, result.context): result for result in candidates if result.is_full}


def _read(folder: Path) -> list[Result]:
    file = folder / "results.jsonl"
    if not file.is_file():
        raise UserError(
            f"--dense {folder}: there is no results.jsonl, expected the --out folder of an evaluation"
        )
    return list(read_results(file).values())


def check_dense(config: EvaluateConfig, tasks: Sequence[SizedTask]) -> None:
    """Raise UserError if the full cache of --dense did not answer the same problems, sampled in the same way."""
    if config.dense is None:
        return
    dense = dense_results(config, [])
    for task in tasks:
        where = f"--dense {config.dense}: {task.name} at {task.length} tokens"
        result, metric = dense.get((task.name, task.length)), metric_of(config, task)
        if result is None:
            raise UserError(f"{where} has no result of the full cache")
        if result.contexts != task.digest:
            raise UserError(f"{where} has other problems or another tokenizer")
        if result.metric != metric:
            raise UserError(f"{where}: expected {metric}, got {result.metric}")
