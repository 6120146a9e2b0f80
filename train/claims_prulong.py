"""Make the tables of docs/results.md for PruLong and DuoAttention on the built-in model.

    python train/claims_prulong.py --out runs/claims-prulong

Of each seed heads are ranked by every method, and each ranking is used at every sparsity; trained and asked by the
commands that anybody runs, which are printed. What is there already is kept, so that the same command goes on where it
was stopped.
"""

import dataclasses
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from claims import check_different, evaluated, run, spread, table

from kvjax.builtin import builtin_gates
from kvjax.command.launch import parse_command, run_command
from kvjax.evaluate.footprint import critical_footprint
from kvjax.exported.folder import describe
from kvjax.files import write_text
from kvjax.policies.admission.pattern_folder import write_pattern

TASKS = "recall", "copy", "needle", "text"
CONTEXT, CHUNK = 1024, 256
"""Tokens of a context, and of a call that reads it: a quarter, as 32K are of 128K."""
SPARSITIES = 0.3, 0.5, 0.7, 0.9
BUDGETS = 0.1, 0.2, 0.3, 0.5, 0.7
"""Of the cache, for what is no head pattern."""
RIVALS = "snapkv", "snapkv:when=chunk,observers=prompt,pyramidkv", "wgkv:calibrated", "fast_kvzip"
SINK, WINDOW = 4, 16
"""Of streaming heads, as trained here."""
AT = 0.7
"""The sparsity of what is compared at one, as in the paper."""
EACH = "PruLong, trained at each"
ONE = f"PruLong, trained at {AT:g}"
RANKINGS: dict[str, tuple[str, ...]] = {
    ONE: ("--method", "prulong", "--sparsity", f"{AT:g}"),
    "DuoAttention": ("--method", "duo_attention"),
}
"""By training, by its options."""
VARIANTS: dict[str, tuple[str, ...]] = {
    "PruLong, passkeys": (*RANKINGS[ONE], "--data-kind", "passkeys"),
    "PruLong, the model trained too": (*RANKINGS[ONE], "--no-frozen-model"),
    "DuoAttention, natural data": (*RANKINGS["DuoAttention"], "--data-kind", "natural"),
}
"""That are compared at one sparsity."""
Part = Literal["main", "variants"]


@dataclasses.dataclass(frozen=True)
class ClaimsConfig:
    """Make the tables of docs/results.md for PruLong and DuoAttention."""

    out: Path
    """Folder of everything: runs, cells, claims.md."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Of masks, contexts and draws; the tables show means, and the least and the most."""
    parts: tuple[Part, ...] = ("main", "variants")
    """What is measured."""
    samples: int = 96
    """Answers of a cell, at least."""

    def check(self) -> None:
        """Refuse what means nothing. Raises UserError."""
        check_different(seeds=self.seeds, parts=self.parts)


def trained(config: ClaimsConfig, name: str, options: Sequence[str], seed: int) -> Path:
    """A run, made if it is not there."""
    folder = config.out / f"seed-{seed}" / name.replace(",", "").replace(" ", "-")
    if not (folder / "pattern" / "config.json").exists():
        told = *options, "--mesh", "1", "--seed", str(seed), "--report", "none"
        again = ["--resume"] if (folder / "config.yaml").exists() else told
        run("-m", "kvjax.train", *again, "--out", str(folder))
    return folder


def asked(
    config: ClaimsConfig,
    seed: int,
    pattern: Path,
    sparsities: Sequence[float] = SPARSITIES,
) -> dict[float, dict[str, tuple[float, float]]]:
    """Of each sparsity and task the footprint and the score of a pattern as it is."""
    policies = [f"head_pattern:sparsity={x:g},gates={pattern}" for x in sparsities]
    own = pattern / "model"  # if the run trained it
    model = ["--model", str(own)] if own.is_dir() else []
    told = *model, *common(config, seed)
    of = "-".join((pattern.parent.name, pattern.name, *map(str, sparsities)))
    found = evaluated(config.out / f"seed-{seed}" / "asked" / of, policies, [1.0], TASKS, *told)
    by_policy = dict(zip(policies, sparsities, strict=True))
    cells: dict[float, dict[str, tuple[float, float]]] = {}
    for cell in found:
        place = cells.setdefault(by_policy[cell["policy"]], {})
        place[cell["task"]] = cell["footprint"], 100 * cell["score"]
    return cells


def common(config: ClaimsConfig, seed: int) -> tuple[str, ...]:
    """What every evaluation is told."""
    sizes = "--context", str(CONTEXT), "--chunk", str(CHUNK)
    return "--seed", str(seed), "--samples", str(config.samples), *sizes


def rankings(config: ClaimsConfig, seed: int) -> dict[str, Path]:
    """Pattern folders that hold one ranking of the heads, by what ranked them."""
    found = {name: trained(config, name, options, seed) / "pattern" for name, options in RANKINGS.items()}
    ranked = config.out / f"seed-{seed}" / "ranked"
    rates = ranked / "gates"
    if not (rates / "config.json").exists():
        write_pattern(rates, np.asarray(describe(builtin_gates())["rate"], np.float64), SINK, WINDOW)
    chance = ranked / "chance"
    if not (chance / "config.json").exists():
        weights = np.random.default_rng(seed).uniform(
            size=np.loadtxt(rates / "full_attention_heads.tsv").shape
        )
        write_pattern(chance, weights, SINK, WINDOW)
    return found | {"WG-KV's rates by head": rates} | ablated(config, seed) | {"chance": chance}


def ablated(config: ClaimsConfig, seed: int) -> dict[str, Path]:
    """The rankings by each head's own loss, alone streaming or alone whole, on records and copies: those that an
    evaluation measures where it is given no pattern."""
    folder, tasks = config.out / f"seed-{seed}" / "ablated", ("recall", "copy")
    evaluated(folder, ["head_pattern:calibrated"], [0.3], tasks, *common(config, seed))
    names = {"one_streaming": "each head streaming alone", "one_whole": "each head whole alone"}
    found = {}
    for name, words in names.items():
        for task in tasks:
            (own,) = (folder / "heads").glob(f"{task}-*/{name}")
            found[f"{words}, on {task}"] = with_sizes(own, config.out / f"seed-{seed}" / "ranked")
    return found


def with_sizes(pattern: Path, into: Path) -> Path:
    """The same ranking for the window of these tables."""
    folder = into / f"{pattern.parent.name}-{pattern.name}"
    if not (folder / "config.json").exists():
        write_pattern(folder, np.loadtxt(pattern / "full_attention_heads.tsv", ndmin=2), SINK, WINDOW)
    return folder


def full(config: ClaimsConfig, seed: int) -> dict[str, float]:
    """The full cache's score of each task."""
    folder = config.out / f"seed-{seed}" / "asked" / "full"
    found = evaluated(folder, ["full"], [1.0], TASKS, *common(config, seed))
    return {cell["task"]: 100 * cell["score"] for cell in found}


Sweeps = dict[str, dict[str, list[list[tuple[float, float]]]]]
"""By method and task: of each seed the sweep's (footprint, score)."""


def sweeps(config: ClaimsConfig) -> Sweeps:
    """Every method over its sizes."""
    swept: Sweeps = {}

    def add(name: str, cells: Sequence[Mapping[str, tuple[float, float]]]) -> None:
        for task in TASKS:
            swept.setdefault(name, {}).setdefault(task, []).append([cell[task] for cell in cells])

    for seed in config.seeds:
        each = [
            asked(config, seed, each_trained(config, share, seed) / "pattern", [share])[share]
            for share in SPARSITIES
        ]
        add(EACH, each)
        for name, pattern in rankings(config, seed).items():
            add(name, list(asked(config, seed, pattern).values()))
        found = evaluated(
            config.out / f"seed-{seed}" / "asked" / "rivals", RIVALS, BUDGETS, TASKS, *common(config, seed)
        )
        for rival in RIVALS:
            own = [cell for cell in found if cell["policy"] == rival]
            add(rival, [
                {x["task"]: (x["footprint"], 100 * x["score"]) for x in own if x["budget"] == budget}
                for budget in BUDGETS
            ])  # fmt: skip
    return swept


def each_trained(config: ClaimsConfig, share: float, seed: int) -> Path:
    """PruLong's run for a sparsity."""
    if share == AT:
        return trained(config, ONE, RANKINGS[ONE], seed)
    return trained(config, f"PruLong-{share:g}", ("--method", "prulong", "--sparsity", f"{share:g}"), seed)


def main_tables(config: ClaimsConfig) -> list[str]:
    """Whether the wanted sparsity is reached; scores by sparsity; critical footprints."""
    swept, dense = sweeps(config), [full(config, seed) for seed in config.seeds]
    patterns = [name for name in swept if name not in RIVALS]
    rows = []
    for task in TASKS:
        rows.append([task, "full", *[spread([one[task] for one in dense])] * len(SPARSITIES)])
        for name in patterns:
            by_size = zip(*swept[name][task], strict=True)
            rows.append([task, name, *(spread([score for _, score in own]) for own in by_size)])
    critical = []
    for name in swept:
        own = [name]
        for task in TASKS:
            crossings = [
                critical_footprint([(x, y) for x, y in points], whole[task])
                for points, whole in zip(swept[name][task], dense, strict=True)
            ]
            own.append(joined(crossings))
        critical.append(own)
    return [
        reached(config),
        trained_table(config),
        table(["task", "heads ranked by", *(f"{x:g}" for x in SPARSITIES)], rows),
        table(["critical footprint", *TASKS], critical),
    ]


def joined(crossings: Sequence[Any]) -> str:
    """The mean of the seeds' crossings, and the worst of those whose sweep does not cross."""
    crossed = [100 * x.footprint for x in crossings if x.relation == "="]
    beyond = [x for x in crossings if x.relation != "="]
    said = [f"{spread(crossed)}%"] if crossed else []
    if beyond:
        worst = str(max(beyond, key=lambda x: (x.relation == ">", x.footprint)))
        said.append(f"{worst} ({len(beyond)} of {len(crossings)} seeds)" if crossed else worst)
    return ", ".join(said)


def reached(config: ClaimsConfig) -> str:
    """The drawn masks' share of streaming heads over the last tenth of the updates, and the seed furthest from it."""
    rows = []
    for share in SPARSITIES:
        found = []
        for seed in config.seeds:
            file = each_trained(config, share, seed) / "metrics.jsonl"
            lines = [json.loads(line) for line in file.read_text().splitlines()]
            drawn = [line["streaming"] for line in lines if "streaming" in line]
            found.append(statistics.mean(drawn[-(len(drawn) // 10) :]))
        mean, low, high = statistics.mean(found), min(found), max(found)
        furthest = max(abs(x - share) for x in found)
        rows.append([f"{share:g}", f"{mean:.3f} ({low:.3f}–{high:.3f})", f"{furthest:.3f}"])
    return table(["wanted sparsity", "of the drawn masks, last tenth", "furthest"], rows)


def trained_table(config: ClaimsConfig) -> str:
    """Masks trained at every sparsity, used at one (PruLong, Fig. 5)."""
    runs: dict[str, Callable[[int], Path]] = {
        f"PruLong, trained at {share:g}": partial(each_trained, config, share) for share in SPARSITIES
    }
    name = "DuoAttention"
    runs[name] = partial(trained, config, name, RANKINGS[name])
    return at_one(config, runs)


def at_one(config: ClaimsConfig, runs: Mapping[str, Callable[[int], Path]]) -> str:
    """The scores of runs, by seed, whose patterns are all used at one sparsity."""
    rows = []
    for name, made in runs.items():
        found: dict[str, list[float]] = {}
        for seed in config.seeds:
            cells = asked(config, seed, made(seed) / "pattern", [AT])[AT]
            for task in TASKS:
                found.setdefault(task, []).append(cells[task][1])
        rows.append([name, *(spread(found[task]) for task in TASKS)])
    return table([f"at {AT:g}", *TASKS], rows)


def variant_table(config: ClaimsConfig) -> str:
    """Other data and unfrozen weights, at one sparsity."""
    runs = {name: partial(trained, config, name, options) for name, options in (RANKINGS | VARIANTS).items()}
    return at_one(config, runs)


def main(args: list[str] | None = None) -> None:
    """The command."""
    config = parse_command(ClaimsConfig, args)
    config.check()
    config.out.mkdir(parents=True, exist_ok=True)
    made = {
        "main": main_tables,
        "variants": lambda config: [variant_table(config)],
    }
    texts = [text for part, make in made.items() if part in config.parts for text in make(config)]
    write_text(config.out / "claims.md", "\n\n".join(texts) + "\n")
    print(f"{config.out / 'claims.md'}\n\n" + "\n\n".join(texts))


if __name__ == "__main__":
    run_command(main)
