"""The report of an evaluation: report.md, pareto.png, mean.png and the maps of kept entries."""

import platform
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import jax
import numpy as np

from kvjax.builtin import BUILTIN
from kvjax.evaluate import pictures
from kvjax.evaluate.compared import CALIBRATED, parse_compared
from kvjax.evaluate.config import EvaluateConfig
from kvjax.evaluate.footprint import critical_footprint
from kvjax.evaluate.recovery import Recovery, dense_results, recovery
from kvjax.evaluate.results import BUDGET, LAMBDA, Result
from kvjax.files import file_name, write_text
from kvjax.policies.make import format_policy, parse_policy
from kvjax.tasks.registry import suite_of

Item = TypeVar("Item")
Key = TypeVar("Key")

HOW_ASKED = {
    "each": "each question was asked by itself, from the same cache (multi-request)",
    "golden": "questions were asked in turn, after the earlier questions and their true answers (multi-turn)",
    "own": "questions were asked in turn, after the earlier questions and the model's answers to them",
}
"""Descriptions of the values of `--turns`."""
CRITICAL_SHARE = 0.9
"""The share of the full cache's score that defines a critical footprint."""


def report(config: EvaluateConfig, results: Sequence[Result], command: str) -> str:
    """Write the report of all `results` into the folder, and return its tables."""
    dense = dense_results(config, results)
    scores = [
        _scores(config, panel) if panel[0].drawn is None else _pass_at_1(panel, dense)
        for panel in _panels(results).values()
    ]
    tables = "\n\n".join([*_overviews(results, dense), *scores, *_choices(results), *_speeds(results)])
    text = f"# Policies compared\n\n{_about(config, results)}\n\n{tables}\n\n{_environment(command)}\n"
    write_text(config.out / "report.md", text)
    _draw(config.out, results)
    return tables


def _grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def _panels(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Return the results of each task and length by a title."""
    return _grouped(results, lambda result: f"{result.task}, {result.context} tokens")


def _by_policy(results: Sequence[Result]) -> dict[str, list[Result]]:
    return _grouped(results, lambda result: result.policy)


def _about(config: EvaluateConfig, results: Sequence[Result]) -> str:
    if any(result.drawn is not None for result in results):
        return _about_contests(config)
    if config.question_aware:
        how = (
            "**Question-aware**: each question was read with its context, and both were compressed while the whole "
            "question was observed. Its last token was then fed again, to answer from the entries kept."
        )
    else:
        how = "**Question-independent**: contexts were read and compressed before any question was seen."
    lines = [
        how,
        f"Contexts were read in chunks of {config.chunk} tokens. Each cell has the score in percent at the measured KV "
        "footprint: the entries held, summed over the query steps of context, question and answer, relative to full "
        "attention. As in PruLong, tokens that were only read to observe others and then removed (a chunk's patch, a "
        "question that is asked again) are free; the second footprint under Sizes and speeds counts them and their "
        f"steps. The last column is the smallest footprint that keeps {100 * CRITICAL_SHARE:.0f}% of the full cache's "
        "score, interpolated linearly between budgets. < means below the smallest measured footprint, > above the "
        "largest. – means that the full cache has no right answer or was not measured.",
    ]
    if any("quest" in parse_policy(result.described) for result in results):
        lines.append(
            "Quest frees no memory. Its budget is the share of entries that a query reads; its footprint is that of "
            "the cache from which it reads."
        )
    if any(result.described.partition(":")[0] == "kvzip" for result in results):
        lines.append(
            "KVzip repeats every context before it compresses it, one part at a time after the whole context. Its "
            "footprint leaves this out. Under Sizes and speeds, `all that was held` and the peak include it."
        )
    if any(result.tau is not None for result in results):
        lines.append(
            "There are two protocols for gates. wgkv:calibrated: τ is searched so that calibration contexts meet the "
            "budget. With several gates, this is done for the two whose initial size is nearest to the budget, and the "
            "gates with the better score on other calibration contexts are compared. wgkv: the gates keep the τ that "
            "they were exported with, and there is one result for each λ, as in WG-KV's paper. wgkv+NAME: the most "
            "selective gates that admit at least the budget, at their exported τ. The second table of a task "
            "states each τ."
        )
    published = dict.fromkeys(result.task for result in results if result.published)
    for note, tasks in _grouped(published, lambda task: suite_of(task).note).items():
        if note:
            lines.append(note.format(tasks=", ".join(tasks), turns=HOW_ASKED[config.turns]))
    return "\n\n".join(lines)


def _about_contests(config: EvaluateConfig) -> str:
    dense = "this run's full cache" if config.dense is None else f"the full cache of {config.dense}"
    return (
        "**Answered at length**: the problem is the prompt, and the policy evicts while the answer is decoded. Every "
        "answer to a problem is a draw with its own random key, which is the same for all policies and in any batch. "
        "An answer that is cut off by the length limit counts as wrong, and so does one without a box. pass@1 is the "
        "mean over problems and draws in percent, ± its standard error over the draws of these problems. Relative "
        f"recovery is pass@1 divided by that of {dense}, ± its standard error, taking both sets of draws as "
        "independent. A budget is a share of the tokens that a prompt with its answer may have; a kv head holds that "
        "many entries at any time, and up to `every` (128) more between two compactions. The KV footprint is the "
        "entries held, summed over the query steps of prompt and answer, relative to full attention at the same "
        "lengths."
    )


def _pass_at_1(results: list[Result], dense: Mapping[tuple[str, int], Result]) -> str:
    """Return the table of a contest."""
    first = results[0]
    assert first.drawn is not None
    lines = [
        f"## {first.task}, {first.context} tokens",
        f"{first.metric}; {len(first.by_kind)} problems, {first.drawn.draws} draws of each.",
        "",
        "| policy | budget | entries of a kv head | pass@1 | relative recovery | cut off | without a box | footprint | "
        "peak |",
        "|---" * 9 + "|",
    ]
    for result in sorted(
        results, key=lambda result: (not result.is_full, result.sized_by == LAMBDA, result.budget)
    ):
        drawn = result.drawn
        assert drawn is not None
        error = "" if drawn.error is None else f" ± {100 * drawn.error:.1f}"
        entries = f"{result.budget * result.context:.0f}" if result.sized_by == BUDGET else ""
        lines.append(
            f"| {result.policy} | {result.at} | {entries} | {100 * result.score:.1f}{error} | "
            f"{_recovery_cell(recovery([result], dense))} | {100 * drawn.cut:.0f}% | "
            f"{100 * drawn.without:.0f}% | {result.footprint:.3f} | {result.peak_kv:.3f} |"
        )
    return "\n".join(lines)


def _recovery_cell(value: Recovery | None) -> str:
    return "–" if value is None else str(value)


ResultRows = dict[tuple[str, float], list[Result | None]]
"""The results of each policy and budget by task, None where one is missing."""


def _across(results: Sequence[Result]) -> Iterator[tuple[int, list[str], ResultRows]]:
    """Yield each length with several tasks, the tasks, and their results side by side."""
    for context in dict.fromkeys(result.context for result in results):
        by_key = {
            (result.policy, result.budget, result.task): result
            for result in results
            if result.context == context
        }
        tasks = list(dict.fromkeys(task for _, _, task in by_key))
        if len(tasks) > 1:
            rows = dict.fromkeys((policy, budget) for policy, budget, _ in by_key)
            yield context, tasks, {row: [by_key.get((*row, task)) for task in tasks] for row in rows}


def _is_full(row: Sequence[Result | None]) -> bool:
    """Return True if the results of a row are those of the full cache."""
    return any(result is not None and result.is_full for result in row)


def _order(results: Sequence[Result | None]) -> tuple[bool, bool, float]:
    """Return the sort key of a policy at a budget in a table."""
    first = next(result for result in results if result is not None)
    return not first.is_full, first.sized_by == LAMBDA, first.budget


def _overviews(results: Sequence[Result], dense: Mapping[tuple[str, int], Result]) -> list[str]:
    """Return a table for each length with several tasks: tasks side by side, policies of one budget together."""
    tables = []
    contests = any(result.drawn is not None for result in results)
    column = "relative recovery" if contests else "capped"
    explanation = (
        "Relative recovery is computed from the mean."
        if contests
        else "The mean has its 95% interval. Capped is the mean in which no task counts more than the full cache's "
        "score."
    )
    for context, tasks, rows in _across(results):
        full = next((row for row in rows.values() if _is_full(row)), [])
        lines = [
            f"## All tasks, {context} tokens",
            "Scores in percent as below, with the perplexity for text. Mean, footprint and MiB of a context are means "
            f"over the tasks. {explanation}",
            "",
            f"| policy | budget | {' | '.join(tasks)} | mean | {column} | footprint | MiB |",
            "|---" * (len(tasks) + 6) + "|",
        ]
        for row in sorted(rows, key=lambda row: _order(rows[row])):
            cells = rows[row]
            present = [result for result in cells if result is not None]
            size = np.mean([result.bytes for result in present]) / 2**20
            footprint = np.mean([result.footprint for result in present])
            scores = " | ".join("" if result is None else _score(result) for result in cells)
            mean = relative = ""
            if len(present) == len(tasks):
                mean = _mean_score(present)
                relative = _recovery_cell(recovery(present, dense)) if contests else _capped(present, full)
            lines.append(
                f"| {row[0]} | {present[0].at} | {scores} | {mean} | {relative} | {footprint:.2f} | {size:.1f} |"
            )
        tables.append("\n".join(lines))
    return tables


def _mean_score(results: Sequence[Result]) -> str:
    """Return the mean over tasks in percent, and half of its 95% interval."""
    mean = f"{100 * np.mean([result.score for result in results]):.1f}"
    widths = [result.interval[1] - result.interval[0] for result in results if result.interval is not None]
    if len(widths) < len(results):
        return mean
    return f"{mean} ± {50 * np.linalg.norm(widths) / len(widths):.1f}"


def _capped(results: Sequence[Result], full: Sequence[Result | None]) -> str:
    """Return the mean over tasks in percent, each capped at the full cache's score; "–" without that score."""
    caps = [result.score for result in full if result is not None]
    if len(caps) < len(results):
        return "–"
    return f"{100 * np.mean(np.minimum([result.score for result in results], caps)):.1f}"


def _scores(config: EvaluateConfig, results: list[Result]) -> str:
    first = results[0]
    budgets = sorted({result.budget for result in results if result.sized_by == BUDGET} or {1.0})
    full = next((result.score for result in results if result.is_full), None)
    most = max(result.samples for result in results)
    lines = [
        f"## {first.task}, {first.context} tokens",
        f"{first.metric}{'' if first.perplexity is None else ' (and perplexity)'}; {most} answers per cell. Brackets "
        "have 95% intervals, which account for the similarity of answers about one context.",
        "",
        "| policy | "
        + " | ".join(f"{budget:g}" for budget in budgets)
        + f" | {100 * CRITICAL_SHARE:.0f}% at |",
        "|---" * (len(budgets) + 2) + "|",
    ]
    for name, group in _by_policy(results).items():
        if group[0].sized_by == LAMBDA:
            continue
        if group[0].sized_by != BUDGET:
            cells = [_score_and_footprint(group[0])] + [""] * (len(budgets) - 1)
            lines.append(f"| {name} | {' | '.join(cells)} | |")
            continue
        by_budget = {result.budget: result for result in group}
        cells = [_score_and_footprint(by_budget[budget]) if budget in by_budget else "" for budget in budgets]
        points = [(result.footprint, result.score) for result in group]
        crossing = str(critical_footprint(points, full, CRITICAL_SHARE)) if full else "–"
        lines.append(f"| {name} | {' | '.join(cells)} | {crossing} |")
    return "\n".join([*lines, *_thresholds(results, full), *_commands(config, results)])


def _thresholds(results: Sequence[Result], full: float | None) -> list[str]:
    """Return the table of the policies with gates: their τ, and whether it was searched."""
    gated = [result for result in results if result.tau is not None]
    if not gated:
        return []
    lines = ["", "| with gates | budget or λ | gates | τ | entries | score |", "|---" * 6 + "|"]
    for result in gated:
        tau = (
            f"{result.tau:.9g}, {'searched' if parse_compared(result.described).calibrated else 'their own'}"
        )
        lines.append(
            f"| {result.policy} | {result.at} | {result.gates} | {tau} | {result.kv_ratio:.3f} | "
            f"{_score_and_footprint(result)} |"
        )
    for name, swept in _by_policy([result for result in gated if result.sized_by == LAMBDA]).items():
        if full:
            points = [(result.footprint, result.score) for result in swept]
            crossing = critical_footprint(points, full, CRITICAL_SHARE)
            lines += ["", f"{name}: {100 * CRITICAL_SHARE:.0f}% of the full cache's score at {crossing}."]
    return lines


def _commands(config: EvaluateConfig, results: Sequence[Result]) -> list[str]:
    """Return a command for generation with each τ that was searched."""
    searched = [
        result for result in results if result.tau is not None and parse_compared(result.described).calibrated
    ]
    if not searched:
        return []
    return ["", "With these τ:", "", "```sh", *(_command(config, result) for result in searched), "```"]


def _command(config: EvaluateConfig, result: Result) -> str:
    """Return the command, with the share of the entries kept as a shell comment."""
    arguments = {"tau": result.tau} | {
        x: y for x, y in parse_policy(result.described)["wgkv"].items() if x != CALIBRATED
    }
    model = [] if config.model == BUILTIN else ["--model", config.model]
    dtype = [] if config.dtype is None else ["--dtype", config.dtype]
    dtype += [] if config.weights is None else ["--weights", config.weights]
    dtype += [] if config.kv_cache_dtype is None else ["--kv-cache-dtype", config.kv_cache_dtype]
    force = ["--force"] if config.force else []
    words = [
        *model,
        *dtype,
        *force,
        "--policy",
        format_policy({"wgkv": arguments}),
        "--gates",
        result.gates or "",
    ]
    size = f"budget {result.at}: {result.kv_ratio:.3f} of the entries"
    return f"python -m kvjax.generate {shlex.join(words)} --prompt-file FILE  # {size}"


def _score(result: Result) -> str:
    perplexity = "" if result.perplexity is None else f" ({result.perplexity:.2f})"
    return f"{100 * result.score:.1f}{perplexity}"


def _score_and_footprint(result: Result) -> str:
    if result.interval is None:
        return f"{_score(result)} at {result.footprint:.2f}"
    low, high = result.interval
    return f"{_score(result)} [{100 * low:.0f}–{100 * high:.0f}] at {result.footprint:.2f}"


def _choices(results: Sequence[Result]) -> list[str]:
    """Return the table of choices made on calibration contexts, if there were any."""
    lines = [
        "## Chosen on calibration contexts",
        "The order of heads, the number of sinks, the smallest window and the gates with the best score on contexts "
        "that are not compared, with the score of each candidate. Heads are ordered by the loss with one of them "
        "streaming, by the loss with one of them whole, or by the gates' rates.",
        "",
        "| policy | budget | task | chosen |",
        "|---|---|---|---|",
        *(
            f"| {result.policy} | {result.budget:g} | {result.task}, {result.context} | {result.choice} |"
            for result in results
            if result.choice
        ),
    ]
    return ["\n".join(lines)] if any(result.choice for result in results) else []


def _speeds(results: Sequence[Result]) -> list[str]:
    """Return a table for each length: sizes and speeds, as means over its tasks."""
    tables = []
    for context, same_length in _grouped(results, lambda result: result.context).items():
        groups = _grouped(same_length, lambda result: (result.policy, result.at))
        lines = [
            f"## Sizes and speeds, {context} tokens",
            "Means over the tasks. Entries: share of the full cache's entries when the context (or a contest's answer) "
            "ends. MiB: the pages in use then. Tokens per second are those of a whole batch, including finished rows, "
            "without compilation. –: methods that share a reading of the contexts have no prefill speed of their own.",
            "",
            "| policy | budget | entries | footprint | all that was held | peak | MiB a context | prefill tokens/s | "
            "decode tokens/s |",
            "|---" * 9 + "|",
        ]
        for (policy, budget), group in groups.items():
            size = np.mean([result.bytes for result in group]) / 2**20
            names = "kv_ratio", "footprint", "footprint_held", "peak_kv"
            sizes = " | ".join(
                f"{np.mean([getattr(result, name) for result in group]):.3f}" for name in names
            )
            speeds = [
                _mean([getattr(result, name) for result in group])
                for name in ("prefill_tok_s", "decode_tok_s")
            ]
            lines.append(f"| {policy} | {budget} | {sizes} | {size:.2f} | {' | '.join(speeds)} |")
        tables.append("\n".join(lines))
    return tables


def _mean(speeds: Sequence[int | None]) -> str:
    present = [speed for speed in speeds if speed is not None]
    return f"{np.mean(present):.0f}" if present else "–"


def _environment(command: str) -> str:
    kind = jax.devices()[0].device_kind
    lines = [
        "## Made with",
        f"- command: `{command}`",
        f"- devices: {jax.device_count()} × {kind} ({jax.default_backend()})",
        f"- versions: jax {jax.__version__}, Python {platform.python_version()}",
    ]
    return "\n".join(lines)


def _means(rows: ResultRows) -> tuple[float | None, dict[str, list[tuple[float, float]]]]:
    """Return the full cache's mean score, and (kept, score) means of the first `pictures.FEW` other policies.

    The means are those of budgets at which all tasks were measured. Scores are capped at the full cache's. If the full
    cache was not measured on all tasks, its mean is None and no score is capped.
    """
    full = next((row for row in rows.values() if _is_full(row)), None)
    caps = None if full is None or None in full else [result.score for result in full if result is not None]
    points: dict[str, list[tuple[float, float]]] = {}
    for (policy, _), row in rows.items():
        present = [result for result in row if result is not None]
        if len(present) < len(row) or row is full:
            continue
        scores = [result.score for result in present]
        capped = scores if caps is None else np.minimum(scores, caps)
        kept = np.mean([result.kv_ratio for result in present])
        points.setdefault(policy, []).append((float(kept), float(np.mean(capped))))
    return None if caps is None else float(np.mean(caps)), dict(list(points.items())[: pictures.FEW])


def _draw(out: Path, results: Sequence[Result]) -> None:
    panels = {
        f"{title}, {panel[0].samples} answers": {
            name: [(result.footprint, result.kv_ratio, result.score) for result in group]
            for name, group in _by_policy(panel).items()
        }
        for title, panel in _panels(results).items()
    }
    pictures.draw_tradeoff(out / "pareto.png", panels)
    all_means = {
        f"mean of {len(tasks)} tasks, {context:,} tokens": _means(rows)
        for context, tasks, rows in _across(results)
    }
    if means := {title: panel for title, panel in all_means.items() if panel[1]}:
        pictures.draw_means(out / "mean.png", means)
    for folder in ("kept", "needle"):
        (out / folder).mkdir(exist_ok=True)
    for name, group in _by_policy(results).items():
        maps = {
            title: {result.at: np.array(result.kept) for result in panel}
            for title, panel in _panels(group).items()
        }
        file = f"{file_name(name)}.png"
        pictures.draw_kv_ratios(out / "kept" / file, f"{name}: kept entries, by budget", maps)
        needles = [result for result in group if result.task == "needle"]
        if needles:
            depths = sorted(map(float, needles[0].by_kind))
            grid = np.array([[result.by_kind[f"{depth:g}"] for depth in depths] for result in needles])
            rows = [f"{result.context} ({result.kv_ratio:.2f})" for result in needles]
            pictures.draw_depths(out / "needle" / file, name, grid, rows, depths)
