"""Make the tables and the picture of docs/results.md for KVzip and Fast KVzip on the built-in model.

    python train/claims_fast_kvzip.py --out runs/claims-fast-kvzip

Gates are trained, compared and taken apart for each seed by the commands that anybody runs, which are printed; what is
there already is kept, so that the same command goes on where it was stopped.
"""

import dataclasses
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from claims import Scores, check_different, evaluated, gather, run, spread, table

from kvjax.command.launch import parse_command, run_command
from kvjax.files import write_text

TASKS = "recall", "needle", "copy", "text"
BUDGETS = 0.2, 0.3, 0.4, 0.5
POLICIES = (
    "full",
    "kvzip",
    "fast_kvzip",
    "snapkv",
    "expected_attention",
    "head_pattern:calibrated",
    "random_eviction",
)
TAUGHT = "fast_kvzip, KVzip's targets"
"""Of the main table: gates by the published target, beside those of the built-in model's own."""
OWN = "as trained here"
"""Of the ablations: the gates of the main table."""
ASKED = "target: questions alone"
"""Of the ablations: gates that long answers are tried with, too."""
ABLATIONS: dict[str, tuple[str, ...]] = {
    OWN: (),
    "target: KVzip's reconstruction": ("--target", "reconstruction"),
    "target: next tokens": ("--target", "next_token"),
    ASKED: ("--target", "answer"),
    "input: keys after RoPE": ("--inputs", "k"),
    "input: keys before RoPE": ("--inputs", "k_pre"),
    "gate: the paper's b ≥ 0": ("--form", "paper"),
    "gate: sigmoid, no sinks": ("--form", "sigmoid"),
    "gate: two-layer SwiGLU": ("--form", "mlp"),
    "gate: linear": ("--form", "linear"),
    "D' = 8": ("--dim", "8"),
    "D' = 32": ("--dim", "32"),
    "S = 1": ("--sinks", "1"),
    "S = 4": ("--sinks", "4"),
    "S = 64": ("--sinks", "64"),
}
"""Of the gates, by the options of the training."""
WINDOWS = 0.0, 0.05, 0.1
"""Of a prompt's tokens, beside the published fiftieth."""
ABLATED_AT = 0.2
"""Of the cache."""
Part = Literal["main", "ablations", "long", "prefill"]


@dataclasses.dataclass(frozen=True)
class ClaimsConfig:
    """Make the tables and the picture of docs/results.md for KVzip and Fast KVzip."""

    out: Path
    """Folder of everything: gates, cells, claims.md and claims.png."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Of gates, contexts and draws; the tables show means, and the least and the most."""
    parts: tuple[Part, ...] = ("main", "ablations", "long", "prefill")
    """What is measured."""
    samples: int = 192
    """Answers of a cell, at least."""

    def check(self) -> None:
        """Refuse what means nothing. Raises UserError."""
        check_different(seeds=self.seeds, parts=self.parts)


def gates_of(config: ClaimsConfig, seed: int, options: Sequence[str]) -> Path:
    """The folder of gates that were trained so, trained if there are none. Those whose target and input are one share
    what was computed of the contexts."""
    name = "-".join(option.strip("-") for option in options) or "own"
    folder = config.out / f"seed-{seed}" / "gates" / name
    if not (folder / "gates" / "config.json").exists():
        told = dict(zip(options[::2], options[1::2], strict=True))
        features = f"{told.get('--target', 'own')}-{told.get('--inputs', 'hidden')}"
        kept = "--targets", str(config.out / f"seed-{seed}" / "targets" / features), "--report", "none"
        of = "--method", "fast_kvzip", "--mesh", "1", "--seed", str(seed), *options
        run("-m", "kvjax.train", *of, *kept, "--out", str(folder))
    return folder / "gates"


def cells(
    config: ClaimsConfig, seed: int, name: str, policies: Sequence[str], budgets: Sequence[float], gates: Path
) -> list[dict[str, Any]]:
    """The results of an evaluation, run if they are not all there."""
    told = "--seed", str(seed), "--samples", str(config.samples), "--gates", str(gates)
    return evaluated(config.out / f"seed-{seed}" / name, policies, budgets, TASKS, *told)


def main_table(config: ClaimsConfig) -> tuple[str, Scores]:
    """Every method at every budget and task."""
    scores: Scores = {}
    for seed in config.seeds:
        gather(scores, None, cells(config, seed, "main", POLICIES, BUDGETS, gates_of(config, seed, ())))
        taught = gates_of(config, seed, ABLATIONS["target: KVzip's reconstruction"])
        gather(scores, TAUGHT, cells(config, seed, "main-taught", ["fast_kvzip"], BUDGETS, taught))
    rows = []
    for task in TASKS:
        for name, found in scores.items():
            own = [spread(found.get((task, b)) or found[task, 1.0]) for b in BUDGETS]
            rows.append([task, name, *own])
    return table(["task", "method", *(f"{b:g}" for b in BUDGETS)], rows), scores


def ablation_table(config: ClaimsConfig) -> str:
    """Gates that differ in one thing, and windows, at one budget."""
    scores: Scores = {}
    for seed in config.seeds:
        for name, options in ABLATIONS.items():
            folder = "ablations/" + ("-".join(x.strip("-") for x in options) or "own")
            gates = gates_of(config, seed, options)
            gather(scores, name, cells(config, seed, folder, ["fast_kvzip"], [ABLATED_AT], gates))
        for share in WINDOWS:
            own = gates_of(config, seed, ())
            found = cells(
                config,
                seed,
                f"ablations/window-{share:g}",
                [f"fast_kvzip:share={share:g}"],
                [ABLATED_AT],
                own,
            )
            gather(scores, f"window: {100 * share:.0f}% of a prompt, not 2%", found)
    rows = [[name, *(spread(found[task, ABLATED_AT]) for task in TASKS)] for name, found in scores.items()]
    return table([f"at {ABLATED_AT:g} of the cache", *TASKS], rows)


def program(
    config: ClaimsConfig, seed: int, name: str, gates: str, *options: str
) -> dict[str, dict[str, float]]:
    """What a program in infer/ found with these gates, run if it did not yet."""
    file = (
        config.out / f"seed-{seed}" / ("-".join((name, *(x.strip("-") for x in ABLATIONS[gates]))) + ".json")
    )
    if not file.exists():
        script = Path(__file__).resolve().parent.parent / "infer" / f"{name}.py"
        folder = gates_of(config, seed, ABLATIONS[gates])
        run(str(script), "--gates", str(folder), *options, "--json", str(file))
    return json.loads(file.read_text())


def long_table(config: ClaimsConfig) -> str:
    """Recall after a long answer; also with gates that learnt what questions pay alone."""
    found = []
    for seed in config.seeds:
        options = "--seed", str(seed), "--samples", str(config.samples)
        asked = program(config, seed, "long_answers", ASKED, "--policies", "fast_kvzip", *options)
        own = program(config, seed, "long_answers", OWN, *options)
        found.append({**own, f"fast_kvzip, {ASKED}": asked["fast_kvzip"]})
    rows = [
        [name, spread([100 * one[name]["right"] for one in found])]
        + [spread([one[name][key] for one in found]) for key in ("last", "most")]
        for name in found[0]
    ]
    return table(["method", "right, %", "entries held in the end", "at most"], rows)


def prefill_table(config: ClaimsConfig) -> str:
    """What reading costs."""
    found = program(config, config.seeds[0], "prefill", OWN)
    full = found["full"]["tokens_per_s"]
    rows = [
        [name, f"{full / row['tokens_per_s']:.2f}", f"{row['peak']:.2f}", f"{row['kept']:.2f}"]
        for name, row in found.items()
    ]
    return table(["method", "time, of full's", "largest cache, of full's", "kept"], rows)


def draw(file: Path, scores: Scores) -> None:
    """A panel a task: the mean over the seeds by budget, between the least and the most."""
    from kvjax.evaluate.pictures import COLORS, MARKERS, figure

    sheet = figure(4.2 * len(TASKS), 4.2)
    for index, task in enumerate(TASKS):
        axes = sheet.add_subplot(1, len(TASKS), index + 1)
        for place, (name, found) in enumerate(scores.items()):
            own = [found.get((task, b)) or found[task, 1.0] for b in BUDGETS]
            style = {"color": COLORS[place], "marker": MARKERS[place], "markersize": 4, "linewidth": 1}
            axes.plot(BUDGETS, [statistics.mean(x) for x in own], label=name, **style)
            axes.fill_between(
                BUDGETS, list(map(min, own)), list(map(max, own)), color=COLORS[place], alpha=0.15
            )
        axes.set(title=task, xlabel="of the cache", ylabel="score, %", ylim=(-3, 103))
        axes.grid(alpha=0.3)
    handles, labels = sheet.axes[0].get_legend_handles_labels()
    sheet.legend(handles, labels, fontsize=8, loc="outside lower center", ncols=len(labels))
    sheet.savefig(file)


def main(args: list[str] | None = None) -> None:
    """The command."""
    config = parse_command(ClaimsConfig, args)
    config.check()
    config.out.mkdir(parents=True, exist_ok=True)
    texts = []
    if "main" in config.parts:
        text, scores = main_table(config)
        texts.append(text)
        draw(config.out / "claims.png", scores)
    others = {"ablations": ablation_table, "long": long_table, "prefill": prefill_table}
    texts += [make(config) for part, make in others.items() if part in config.parts]
    write_text(config.out / "claims.md", "\n\n".join(texts) + "\n")
    print(f"{config.out / 'claims.md'}\n\n" + "\n\n".join(texts))


if __name__ == "__main__":
    run_command(main)
