"""Make the tables of docs/results.md for KVPOP on the built-in model.

    python train/claims_kvpop.py --out runs/claims-kvpop

Of each seed one dense model, and from it one for each budget under the scored mask and under a fixed one, and one for
each thing that is taken away; trained and asked by the commands that anybody runs, which are printed. What is there
already is kept, so that the same command goes on where it was stopped.
"""

import dataclasses
import itertools
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from claims import Scores, check_different, evaluated, gather, run, spread, table

from kvjax.builtin import BUILTIN
from kvjax.command.launch import parse_command, run_command
from kvjax.files import write_text

TASKS = "recall", "copy", "needle", "text"
CONTEXT = 1024
"""Tokens of a context, and of a sequence that is trained on."""
BUDGETS = 0.25, 0.0625
"""Of the context: entries of each kv head."""
WINDOW = 1 / 8
"""Of a budget, as the paper's 64 of 512."""
OTHERS = "h2o", "r_kv", "tova"
"""Of the dense model, cut to the same size whenever `CHUNK` more tokens were read; Fast KVzip, which decides of each
token once, to the same share of what was read."""
CHUNK = 64
"""Tokens of a call: what those hold beside their budget."""
ABLATIONS: dict[str, tuple[str, ...]] = {
    "scored at once": ("--no-delayed",),
    "no Hedgehog features, xLSTM's normaliser": ("--features", "none", "--normaliser", "xlstm"),
    "xLSTM's normaliser": ("--normaliser", "xlstm"),
    "gates not capped": ("--no-capped",),
    "no decay": ("--no-decay",),
    "targets of attention over all tokens": ("--target", "all"),
}
"""Of the scorers, by the options of the training, at the first budget."""
FROM = 60
"""Updates after which the courses of two runs are compared."""
Part = Literal["main", "ablations", "courses", "cost"]


@dataclasses.dataclass(frozen=True)
class ClaimsConfig:
    """Make the tables of docs/results.md for KVPOP."""

    out: Path
    """Folder of everything: runs, cells, claims.md."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Of models, contexts and draws; the tables show means, and the least and the most."""
    parts: tuple[Part, ...] = ("main", "ablations", "courses", "cost")
    """What is measured."""
    samples: int = 192
    """Answers of a cell, at least."""

    def check(self) -> None:
        """Refuse what means nothing. Raises UserError."""
        check_different(seeds=self.seeds, parts=self.parts)


def trained(config: ClaimsConfig, seed: int, name: str, *options: str) -> Path:
    """The folder of a run's model and scorers, trained if there is none."""
    folder = config.out / f"seed-{seed}" / name
    if not (folder / "parameters" / "model").is_dir():
        of = "--method", "kvpop", "--mesh", "1", "--report", "none"
        again = ["--resume"] if (folder / "config.yaml").exists() else [*of, *options]
        run("-m", "kvjax.train", *again, "--out", str(folder))
    return folder / "parameters"


def uptrained(config: ClaimsConfig, seed: int) -> Path:
    """A seed's dense model."""
    return trained(config, seed, "uptrain", "--phase", "uptrain", "--seed", str(seed))


def sparsified(config: ClaimsConfig, seed: int, budget: float, *options: str) -> Path:
    """A model for a budget, from the seed's dense one, by other sequences than that was trained on."""
    dense = uptrained(config, seed).parent
    name = "-".join((f"sparsify-{budget:g}", *(option.strip("-") for option in options)))
    size = round(budget * CONTEXT)
    shape = "--budget", str(size), "--window", str(round(WINDOW * size)), "--sink", "4"
    told = "--phase", "sparsify", "--uptrained", str(dense), "--seed", str(1000 + seed), *shape
    return trained(config, seed, name, *told, *options)


def asked(
    config: ClaimsConfig, seed: int, trained: Path, policies: Sequence[str], budgets: Sequence[float]
) -> list[dict]:
    """What a model answers under policies."""
    gates = {"kvpop": str(trained), "fast_kvzip": BUILTIN}
    named = [word for name, of in gates.items() if name in policies for word in ("--gates", of)]
    told = "--model", str(trained / "model"), "--seed", str(seed), "--samples", str(config.samples), *named
    folder = trained.parent / "-".join(("asked", *policies))
    sizes = "--context", str(CONTEXT), "--chunk", str(CHUNK)
    return evaluated(folder, policies, budgets, TASKS, *told, *sizes)


def recovered(scores: Scores, dense: Scores, at: float) -> list[list[str]]:
    """Of each row the scores over the dense model's of the same seed, in percent: by task, and their mean."""
    rows = []
    for name, found in scores.items():
        if (TASKS[0], at) not in found:
            continue
        shares = [
            [100 * x / y for x, y in zip(found[task, at], dense["full"][task, 1.0], strict=True)]
            for task in TASKS
        ]
        rows.append([f"{at:g}", name, *map(spread, shares), spread(seed_means(shares))])
    return rows


def main_table(config: ClaimsConfig) -> str:
    """KVPOP, the same training under a fixed mask, and what costs no training, at both budgets."""
    dense, scores = Scores(), Scores()
    for seed in config.seeds:
        up = uptrained(config, seed)
        gather(dense, None, asked(config, seed, up, ["full"], BUDGETS[:1]))
        for budget in BUDGETS:
            own = sparsified(config, seed, budget)
            fixed = sparsified(config, seed, budget, "--mask", "streaming")
            gather(scores, "KVPOP", asked(config, seed, own, ["kvpop"], [budget]))
            gather(scores, "StreamLLM+", asked(config, seed, fixed, ["streaming_llm:calibrated"], [budget]))
        untrained = asked(config, seed, up, ["streaming_llm:calibrated", "fast_kvzip"], BUDGETS)
        gather(scores, "StreamingLLM, untrained", [x for x in untrained if x["policy"] != "fast_kvzip"])
        gather(scores, "fast_kvzip, untrained", [x for x in untrained if x["policy"] == "fast_kvzip"])
        for budget, name in itertools.product(BUDGETS, OTHERS):
            policy = f"{name}:when=chunk,entries={round(budget * CONTEXT)}"
            cells = [x | {"budget": budget} for x in asked(config, seed, up, [policy], [budget])]
            gather(scores, f"{name}, untrained", cells)
    rows = [row for at in BUDGETS for row in recovered(scores, dense, at)]
    own = [dense["full"][task, 1.0] for task in TASKS]
    everything = ["1", "dense, of 100", *map(spread, own), spread(seed_means(own))]
    return table(["of the context", "method", *TASKS, "mean"], [everything, *rows])


def seed_means(by_task: Sequence[Sequence[float]]) -> list[float]:
    """Of each seed the mean over the tasks."""
    return [statistics.mean(own) for own in zip(*by_task, strict=True)]


def ablation_table(config: ClaimsConfig) -> str:
    """Scorers that differ in one thing, at the larger budget."""
    dense, scores = Scores(), Scores()
    for seed in config.seeds:
        up = uptrained(config, seed)
        gather(dense, None, asked(config, seed, up, ["full"], BUDGETS[:1]))
        for name, options in ({"as trained here": ()} | ABLATIONS).items():
            own = sparsified(config, seed, BUDGETS[0], *options)
            gather(scores, name, asked(config, seed, own, ["kvpop"], BUDGETS[:1]))
    rows = recovered(scores, dense, BUDGETS[0])
    return table([f"at {BUDGETS[0]:g} of the context", *TASKS, "mean"], [row[1:] for row in rows])


def course(trained: Path) -> dict[int, dict[str, float]]:
    """What a run's updates after `FROM` found, by update."""
    lines = [json.loads(line) for line in (trained.parent / "metrics.jsonl").read_text().splitlines()]
    return {x["step"]: x for x in lines if x["step"] > FROM and "divergence" in x}


def course_table(config: ClaimsConfig) -> str:
    """Scorers that differ in one thing, by what updates on the same sequences found: far finer than answers are."""
    rows = []
    for name, options in ABLATIONS.items():
        more: dict[str, list[float]] = {"divergence": [], "cross_entropy": [], "agreement": []}
        for seed in config.seeds:
            usual = course(sparsified(config, seed, BUDGETS[0]))
            own = course(sparsified(config, seed, BUDGETS[0], *options))
            for key, found in more.items():
                found += [own[step][key] - usual[step][key] for step in own if step in usual]
        rows.append([name, *map(interval, more.values())])
    return table(["more than as trained here", "divergence", "cross-entropy", "agreement"], rows)


def interval(differences: Sequence[float]) -> str:
    """A mean with its 95% interval."""
    half = 1.96 * statistics.stdev(differences) / len(differences) ** 0.5
    return f"{statistics.mean(differences):+.4f} ± {half:.4f}"


def cost_table(config: ClaimsConfig) -> str:
    """What the phases take beside dense training, of the first seed."""
    seed, rows = config.seeds[0], []
    runs = {
        "uptrain (dense)": uptrained(config, seed),
        "sparsify": sparsified(config, seed, BUDGETS[0]),
        "sparsify, fixed mask": sparsified(config, seed, BUDGETS[0], "--mask", "streaming"),
    }
    for name, folder in runs.items():
        lines = [json.loads(line) for line in (folder.parent / "metrics.jsonl").read_text().splitlines()]
        speed = statistics.median(x["tokens_per_second"] for x in lines if "tokens_per_second" in x)
        rows.append([name, f"{speed:.0f}"])
    return table(["phase", "tokens/s"], rows)


def main(args: list[str] | None = None) -> None:
    """The command."""
    config = parse_command(ClaimsConfig, args)
    config.check()
    config.out.mkdir(parents=True, exist_ok=True)
    made = {
        "main": main_table,
        "ablations": ablation_table,
        "courses": course_table,
        "cost": cost_table,
    }
    texts = [make(config) for part, make in made.items() if part in config.parts]
    write_text(config.out / "claims.md", "\n\n".join(texts) + "\n")
    print(f"{config.out / 'claims.md'}\n\n" + "\n\n".join(texts))


if __name__ == "__main__":
    run_command(main)
