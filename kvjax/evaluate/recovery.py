"""Relative recovery: pass@1 divided by that of the dense model, which is the full cache of the same run or of another
one (KVPOP's dense model is the model before it was trained for a small cache)."""

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
    """The ratio of two pass@1, with its standard error over the sampled answers of both."""

    ratio: float
    """The ratio; 1 is as good as the dense model."""
    error: float | None
    """The standard error to first order, taking the answers of both as independent. None if one of them has a single
    answer to each problem, and for the dense model itself."""

    def __str__(self) -> str:
        return f"{self.ratio:.2f}{'' if self.error is None else f' ± {self.error:.2f}'}"


def recovery(results: Sequence[Result], dense: Mapping[tuple[str, int], Result]) -> Recovery | None:
    """Return the recovery of the mean pass@1 of a policy's results, one for each contest. None: the dense model was not
    measured on one of them, or answered nothing right.

    dense: the dense model's results by task and length.
    """
    rivals = [dense.get((result.task, result.context)) for result in results]
    pairs = [(own, rival) for own, rival in zip(results, rivals, strict=True) if rival is not None]
    total = sum(rival.score for _, rival in pairs)
    if len(pairs) < len(results) or total == 0:
        return None
    if all(own == rival for own, rival in pairs):
        return Recovery(1.0, None)
    ratio = sum(own.score for own, _ in pairs) / total
    errors = [(_error(own), _error(rival)) for own, rival in pairs]
    squares = [a**2 + (ratio * b) ** 2 for a, b in errors if a is not None and b is not None]
    return Recovery(ratio, math.sqrt(sum(squares)) / total if len(squares) == len(pairs) else None)


def _error(result: Result) -> float | None:
    return None if result.drawn is None else result.drawn.error


def dense_results(config: EvaluateConfig, results: Sequence[Result]) -> Mapping[tuple[str, int], Result]:
    """Return the full cache's results by task and length: those of --dense if given, else those among `results`."""
    known = results if config.dense is None else _read(config.dense)
    return {(result.task, result.context): result for result in known if result.is_full}


def _read(folder: Path) -> list[Result]:
    file = folder / "results.jsonl"
    if not file.is_file():
        raise UserError(f"--dense {folder}: there is no results.jsonl, which an evaluation leaves")
    return list(read_results(file).values())


def check_dense(config: EvaluateConfig, tasks: Sequence[SizedTask]) -> None:
    """Raise UserError if the full cache of --dense did not answer the same problems, sampled in the same way."""
    if config.dense is None:
        return
    known = dense_results(config, [])
    for own in tasks:
        at = f"--dense {config.dense}: {own.name} at {own.length} tokens"
        result, metric = known.get((own.name, own.length)), metric_of(config, own)
        if result is None:
            raise UserError(f"{at} is not there, answered by the full cache")
        if result.contexts != own.digest:
            raise UserError(f"{at} is of other problems, or of another tokenizer's")
        if result.metric != metric:
            raise UserError(f"{at} is {result.metric}; expected {metric}")
