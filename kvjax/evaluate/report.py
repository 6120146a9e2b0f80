"""report.md, pareto.png, mean.png and the maps of kept entries, from the results of results.jsonl."""

import platform
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import jax
import numpy as np

from kvjax.builtin import BUILTIN
from kvjax.evaluate import pictures
from kvjax.evaluate.compared import CALIBRATED
from kvjax.evaluate.config import EvaluateConfig
from kvjax.evaluate.footprint import critical_footprint
from kvjax.evaluate.recovery import Recovery, dense_results, recovery
from kvjax.evaluate.results import BUDGET, LAMBDA, Result
from kvjax.policies.make import format_policy, parse_policy
from kvjax.tasks.registry import suite_of

Item = TypeVar("Item")
Key = TypeVar("Key")

HOW_ASKED = {
    "each": "each question was asked by itself, of the same cache (multi-request)",
    "golden": "questions were asked in turn, after those before them and their true answers (multi-turn)",
    "own": "questions were asked in turn, after those before them and what the model had said to them",
}
"""Descriptions of the values of `--turns`."""
CRITICAL_SHARE = 0.9
"""Share of the full cache's score that a critical footprint keeps."""


def report(config: EvaluateConfig, results: Sequence[Result], command: str) -> str:
    """Write the report of all `results` into the folder, and return its tables."""
    dense = dense_results(config, results)
    scores = [
        _scores(config, own) if own[0].drawn is None else _pass_at_1(own, dense)
        for own in _panels(results).values()
    ]
    tables = "\n\n".join([*_overviews(results, dense), *scores, *_choices(results), *_speeds(results)])
    text = f"# Policies compared\n\n{_about(config, results)}\n\n{tables}\n\n{_environment(command)}\n"
    (config.out / "report.md").write_text(text, encoding="utf-8")
    _draw(config.out, results)
    return tables


def _grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def _panels(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Return the results of each task and length, by its title."""
    return _grouped(results, lambda result: f"{result.task}, {result.context} tokens")


def _by_policy(results: Sequence[Result]) -> dict[str, list[Result]]:
    return _grouped(results, lambda result: result.policy)


def _about(config: EvaluateConfig, results: Sequence[Result]) -> str:
    if any(result.drawn is not None for result in results):
        return _about_contests(config)
    if config.question_aware:
        how = (
            "**Question-aware**: each question was read with its context and both were compressed, observed by the "
            "whole question. Its last token was then asked anew of what was kept."
        )
    else:
        how = "**Question-independent**: contexts were read and compressed before any question was seen."
    lines = [
        how,
        f"Contexts were read in chunks of {config.chunk} tokens. A cell is the score in percent at its measured KV "
        "footprint: the entries held, summed over the query steps of context, question and answer, over those of full "
        "attention. As in PruLong, tokens that were read to look and dropped again (a chunk's patch, a question that "
        "is asked anew) are free; under Sizes and speeds a second footprint counts them and their steps. The last "
        f"column is the smallest footprint that keeps {100 * CRITICAL_SHARE:.0f}% of the full cache's score, on "
        "straight lines between budgets; < and >: below the smallest and above the largest that was measured; –: the "
        "full cache answered nothing, or was not measured.",
    ]
    if any("quest" in result.described for result in results):
        lines.append(
            "Quest frees nothing: its budget is what a query reads, its footprint that of the cache it reads from."
        )
    if any(result.described.partition(":")[0] == "kvzip" for result in results):
        lines.append(
            "KVzip has every context repeated before it compresses it, a part at a time behind all of it. Its "
            "footprint leaves that out; what it held is under Sizes and speeds: all that was held, and the peak."
        )
    if any(result.tau is not None for result in results):
        lines.append(
            "Two protocols for gates. wgkv:calibrated: τ is searched so that contexts of their own meet the budget; "
            "of several gates with the two whose own size is nearest to it, and those that answer more of further "
            "contexts are compared. wgkv: the τ that the gates were exported with, a cell for each λ, as in WG-KV's "
            "paper; their size is what it comes to. wgkv+NAME: at their own τ the most selective gates that let in as "
            "much as the budget. The second table of a task says which τ each had."
        )
    published = dict.fromkeys(result.task for result in results if result.published)
    for note, tasks in _grouped(published, lambda task: suite_of(task).note).items():
        if note:
            lines.append(note.format(tasks=", ".join(tasks), turns=HOW_ASKED[config.turns]))
    return "\n\n".join(lines)


def _about_contests(config: EvaluateConfig) -> str:
    dense = "this run's full cache" if config.dense is None else f"the full cache of {config.dense}"
    return (
        "**Answered at length**: the problem is the prompt, and the policy works while the answer is written. Every "
        "draw has a key of its own, of the seed, the problem and the draw, the same for all policies and in any batch. "
        "An answer that its length cuts off counts as wrong, and so does one without a box. pass@1 is in percent, the "
        "mean over problems and draws, ± its standard error over the draws of these problems. Relative recovery is "
        f"pass@1 over that of {dense}, ± its standard error, taking the draws of both as independent. A budget is a "
        "share of the tokens that a prompt with its answer may have, so many entries of a kv head at any time; "
        "evictions hold up to `every` (128) more between two compactions. The KV footprint is "
        "what was really held, summed "
        "over the query steps of prompt and answer, over full attention's at the same lengths."
    )


def _pass_at_1(results: list[Result], dense: Mapping[tuple[str, int], Result]) -> str:
    """Return a contest's table."""
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
            f"{_shown(recovery([result], dense))} | {100 * drawn.cut:.0f}% | "
            f"{100 * drawn.without:.0f}% | {result.footprint:.3f} | {result.peak_kv:.3f} |"
        )
    return "\n".join(lines)


def _shown(found: Recovery | None) -> str:
    return "–" if found is None else str(found)


ResultRows = dict[tuple[str, float], list[Result | None]]
"""The results of each policy and budget by task, None where one is missing."""


def _across(results: Sequence[Result]) -> Iterator[tuple[int, list[str], ResultRows]]:
    """Yield each length that has several tasks, with the tasks and their results side by side."""
    for context in dict.fromkeys(result.context for result in results):
        found = {
            (result.policy, result.budget, result.task): result
            for result in results
            if result.context == context
        }
        tasks = list(dict.fromkeys(task for _, _, task in found))
        if len(tasks) > 1:
            rows = dict.fromkeys((policy, budget) for policy, budget, _ in found)
            yield context, tasks, {row: [found.get((*row, task)) for task in tasks] for row in rows}


def _order(results: Sequence[Result | None]) -> tuple[bool, bool, float]:
    """Return the sort key of a policy at a budget in a table."""
    first = next(result for result in results if result is not None)
    return not first.is_full, first.sized_by == LAMBDA, first.budget


def _overviews(results: Sequence[Result], dense: Mapping[tuple[str, int], Result]) -> list[str]:
    """Return a table for each length that has several tasks: tasks side by side, policies of one budget together."""
    tables = []
    contests = any(result.drawn is not None for result in results)
    ahead = "relative recovery" if contests else "capped"
    beside = (
        "Relative recovery is that of the mean."
        if contests
        else "The mean is given with its 95% interval. Capped is the mean with every task counted up to the full "
        "cache's score at most."
    )
    for context, tasks, rows in _across(results):
        full = next((own for own in rows.values() if any(one is not None and one.is_full for one in own)), [])
        lines = [
            f"## All tasks, {context} tokens",
            "Scores in percent as below, the text's with its perplexity; mean, footprint and MiB of a context: means "
            f"over the tasks. {beside}",
            "",
            f"| policy | budget | {' | '.join(tasks)} | mean | {ahead} | footprint | MiB |",
            "|---" * (len(tasks) + 6) + "|",
        ]
        for row in sorted(rows, key=lambda row: _order(rows[row])):
            own = rows[row]
            known = [result for result in own if result is not None]
            size = np.mean([result.bytes for result in known]) / 2**20
            footprint = np.mean([result.footprint for result in known])
            scores = " | ".join("" if result is None else _score(result) for result in own)
            mean = against = ""
            if len(known) == len(tasks):
                mean = _mean_score(known)
                against = _shown(recovery(known, dense)) if contests else _capped(known, full)
            lines.append(
                f"| {row[0]} | {known[0].at} | {scores} | {mean} | {against} | {footprint:.2f} | {size:.1f} |"
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
    """Return the mean over tasks in percent, each counted up to the full cache's score; "–" without that score."""
    pairs = list(zip(results, full, strict=False))
    if len(pairs) < len(results) or any(whole is None for _, whole in pairs):
        return "–"
    return f"{100 * np.mean([min(own.score, whole.score) for own, whole in pairs if whole is not None]):.1f}"


def _scores(config: EvaluateConfig, results: list[Result]) -> str:
    first = results[0]
    budgets = sorted({result.budget for result in results if result.sized_by == BUDGET} or {1.0})
    full = next((result.score for result in results if result.is_full), None)
    most = max(result.samples for result in results)
    lines = [
        f"## {first.task}, {first.context} tokens",
        f"{first.metric}{'' if first.perplexity is None else ' (and perplexity)'}; {most} answers a cell. Brackets "
        "have 95% intervals, for which answers about one context are as alike as they were.",
        "",
        "| policy | "
        + " | ".join(f"{budget:g}" for budget in budgets)
        + f" | {100 * CRITICAL_SHARE:.0f}% at |",
        "|---" * (len(budgets) + 2) + "|",
    ]
    for name, own in _by_policy(results).items():
        if own[0].sized_by == LAMBDA:
            continue
        if own[0].sized_by != BUDGET:
            shown = [_score_and_footprint(own[0])] + [""] * (len(budgets) - 1)
            lines.append(f"| {name} | {' | '.join(shown)} | |")
            continue
        found = {result.budget: result for result in own}
        shown = [_score_and_footprint(found[budget]) if budget in found else "" for budget in budgets]
        points = [(result.footprint, result.score) for result in own]
        crossing = str(critical_footprint(points, full, CRITICAL_SHARE)) if full else "–"
        lines.append(f"| {name} | {' | '.join(shown)} | {crossing} |")
    return "\n".join([*lines, *_thresholds(results, full), *_commands(config, results)])


def _thresholds(results: Sequence[Result], full: float | None) -> list[str]:
    """Return the table of the policies with gates: the τ of each, and whether it was searched for."""
    gated = [result for result in results if result.tau is not None]
    if not gated:
        return []
    lines = ["", "| with gates | budget or λ | gates | τ | entries | score |", "|---" * 6 + "|"]
    for result in gated:
        tau = f"{result.tau:.9g}, {'searched' if CALIBRATED in result.described else 'their own'}"
        lines.append(
            f"| {result.policy} | {result.at} | {result.gates} | {tau} | {result.kv_ratio:.3f} | "
            f"{_score_and_footprint(result)} |"
        )
    swept = [(result.footprint, result.score) for result in gated if result.sized_by == LAMBDA]
    if swept and full:
        found = critical_footprint(swept, full, CRITICAL_SHARE)
        lines += ["", f"wgkv: {100 * CRITICAL_SHARE:.0f}% of the full cache's score at {found}."]
    return lines


def _commands(config: EvaluateConfig, results: Sequence[Result]) -> list[str]:
    """Return a command that generates with each τ that was searched for."""
    searched = [result for result in results if result.tau is not None and CALIBRATED in result.described]
    if not searched:
        return []
    return ["", "With these τ:", "", "```sh", *(_command(config, result) for result in searched), "```"]


def _command(config: EvaluateConfig, result: Result) -> str:
    """Return the command, followed by a shell comment with the share of the entries that its result kept."""
    own = {"tau": result.tau} | {
        x: y for x, y in parse_policy(result.described)["wgkv"].items() if x != CALIBRATED
    }
    model = [] if config.model == BUILTIN else ["--model", config.model]
    dtype = [] if config.dtype is None else ["--dtype", config.dtype]
    dtype += [] if config.weights is None else ["--weights", config.weights]
    dtype += [] if config.kv_cache_dtype is None else ["--kv-cache-dtype", config.kv_cache_dtype]
    force = ["--force"] if config.force else []
    words = [*model, *dtype, *force, "--policy", format_policy({"wgkv": own}), "--gates", result.gates or ""]
    size = f"budget {result.at}: {result.kv_ratio:.3f} of the entries"
    return f"python -m kvjax.generate {shlex.join(words)} --prompt-file FILE  # {size}"


def _score(result: Result) -> str:
    beside = "" if result.perplexity is None else f" ({result.perplexity:.2f})"
    return f"{100 * result.score:.1f}{beside}"


def _score_and_footprint(result: Result) -> str:
    if result.interval is None:
        return f"{_score(result)} at {result.footprint:.2f}"
    low, high = result.interval
    return f"{_score(result)} [{100 * low:.0f}–{100 * high:.0f}] at {result.footprint:.2f}"


def _choices(results: Sequence[Result]) -> list[str]:
    """Return the table of choices made on calibration contexts, if there were any."""
    lines = [
        "## Chosen on calibration contexts",
        "Of contexts that are not among those compared: which order of heads, how many sinks, which smallest window "
        "and which of several gates answer best, with the answers right of each that was tried. Orders: heads by the "
        "loss with one of them streaming, by that with one of them whole, by the gates' rates.",
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
    for context, found in _grouped(results, lambda result: result.context).items():
        own = _grouped(found, lambda result: (result.policy, result.at))
        lines = [
            f"## Sizes and speeds, {context} tokens",
            "Means over the tasks. Entries: share of the full cache's once the context was read, or a contest's answer "
            "written. MiB: its pages in use. Tokens per second: of a whole batch, rows that are done included, without "
            "compilation; –: methods that differ only once the context was read are read together, which says nothing "
            "of one alone.",
            "",
            "| policy | budget | entries | footprint | all that was held | peak | MiB a context | prefill tokens/s | "
            "decode tokens/s |",
            "|---" * 9 + "|",
        ]
        for (policy, budget), group in own.items():
            size = np.mean([result.bytes for result in group]) / 2**20
            names = "kv_ratio", "footprint", "footprint_held", "peak_kv"
            sizes = " | ".join(f"{np.mean([getattr(c, name) for c in group]):.3f}" for name in names)
            speeds = [_mean([getattr(c, name) for c in group]) for name in ("prefill_tok_s", "decode_tok_s")]
            lines.append(f"| {policy} | {budget} | {sizes} | {size:.2f} | {' | '.join(speeds)} |")
        tables.append("\n".join(lines))
    return tables


def _mean(speeds: Sequence[int | None]) -> str:
    known = [speed for speed in speeds if speed is not None]
    return f"{np.mean(known):.0f}" if known else "–"


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
    """Return the full cache's mean score, and the (kept, score) means of the first `pictures.FEW` other policies at the
    budgets at which all tasks were measured. Scores are capped at the full cache's. None: the full cache was not
    measured on all tasks, and no score is capped."""
    full = next((own for own in rows.values() if any(one is not None and one.is_full for one in own)), None)
    whole = None if full is None or None in full else [one.score for one in full if one is not None]
    points: dict[str, list[tuple[float, float]]] = {}
    for (policy, _), own in rows.items():
        known = [result for result in own if result is not None]
        if len(known) < len(own) or own is full:
            continue
        scores = [result.score for result in known]
        capped = scores if whole is None else np.minimum(scores, whole)
        kept = np.mean([result.kv_ratio for result in known])
        points.setdefault(policy, []).append((float(kept), float(np.mean(capped))))
    return None if whole is None else float(np.mean(whole)), dict(list(points.items())[: pictures.FEW])


def _point(result: Result) -> tuple[float, ...]:
    return result.footprint, result.kv_ratio, result.score


def _draw(out: Path, results: Sequence[Result]) -> None:
    panels = {
        f"{title}, {own[0].samples} answers": {
            name: [_point(result) for result in points] for name, points in _by_policy(own).items()
        }
        for title, own in _panels(results).items()
    }
    pictures.draw_tradeoff(out / "pareto.png", panels)
    found = {
        f"mean of {len(tasks)} tasks, {context:,} tokens": _means(rows)
        for context, tasks, rows in _across(results)
    }
    if means := {title: panel for title, panel in found.items() if panel[1]}:
        pictures.draw_means(out / "mean.png", means)
    for folder in ("kept", "needle"):
        (out / folder).mkdir(exist_ok=True)
    for name, own in _by_policy(results).items():
        maps = {
            title: {result.at: np.array(result.kept) for result in found}
            for title, found in _panels(own).items()
        }
        file = f"{name.replace('/', '_')}.png"
        pictures.draw_kv_ratios(out / "kept" / file, f"{name}: kept entries, by budget", maps)
        needles = [result for result in own if result.task == "needle"]
        if needles:
            depths = sorted(map(float, needles[0].by_kind))
            grid = np.array([[result.by_kind[f"{depth:g}"] for depth in depths] for result in needles])
            rows = [f"{result.context} ({result.kv_ratio:.2f})" for result in needles]
            pictures.draw_depths(
                out / "needle" / file, name, grid, rows, depths, "context (share of the cache)"
            )
