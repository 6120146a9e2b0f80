r"""Make the tables of docs/results.md for OracleKV, with a command for each model.

    python train/claims_oraclekv.py --out runs/claims-oraclekv
    python train/claims_oraclekv.py --out runs/claims-oraclekv-smollm2 --documents text/heldout \
        --model models/SmolLM2-135M-Instruct.Q4_1.gguf --gates gates/smollm2-135m/*

Contexts are compressed before any question is known. The built-in model follows no instructions: its guidance are
questions of its own kinds, about tokens that no context is made for; the published texts are there to compare.
"""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from claims import Scores, check_different, evaluated, gather, spread, table

from kvjax.builtin import BUILTIN
from kvjax.command.launch import MeshShape, parse_command, run_command, start
from kvjax.errors import UserError
from kvjax.exported.folder import describe
from kvjax.files import write_text
from kvjax.policies.make import format_policy

BUDGETS = 0.1, 0.2, 0.4
"""Of the context's entries."""
PLAIN = {"SnapKV": "snapkv", "PyramidKV": "snapkv:pyramidkv", "AdaKV": "snapkv:adakv"}
"""By the context's own last tokens."""
ALLOCATIONS = {"uniform": "SnapKV", "pyramid": "PyramidKV", "ada": "AdaKV"}
"""Of OracleKV, and what each is without guidance."""
RIVALS = {"Fast KVzip": "fast_kvzip", "KVzip": "kvzip", "WG-KV": "wgkv:calibrated"}
"""Trained, reading twice, and admitting: for whom a question is not needed."""


def questions(keys: str) -> str:
    """A question of each kind in turn, about a record of each letter: the built-in model's guidance."""
    return "".join(f"<|question|>{key}<|{'FSR'[index % 3]}|>" for index, key in enumerate(keys))


OWN = {
    "six questions of its kinds": "<|record|>" + questions("abcdef"),
    "three": "<|record|>" + questions("abc"),
    "a record's mark": "<|record|>",
    "G1, in English": "G1",
}
"""What the built-in model may be guided by, the first in the main table."""
REMEMBER = "Please remember "
PUBLISHED = {
    "G1": "G1",
    "G6, a list of tasks": "G6",
    "G5, the longest list": "G5",
    "abstract": f"({REMEMBER}the specific details.)",
    "contextual": f"({REMEMBER}the numerical information.)",
    "specific": f"({REMEMBER}numerical information, such as timelines, birthdays, and percentages.)",
    "a summary will be asked (T1)": "T1",
    "a number (T2)": "T2",
}
"""The same of a model that follows instructions: general texts, the paper's three levels of detail (Fig. 18), and two
for one task each."""


@dataclasses.dataclass(frozen=True)
class ClaimsConfig:
    """Make the tables of docs/results.md for OracleKV."""

    out: Path
    """Folder of everything: cells, claims.md."""
    model: str = BUILTIN
    """A Hugging Face folder, a GGUF file, or `builtin`."""
    documents: Path | None = None
    """Another model: a folder of texts, which questions are asked of."""
    gates: tuple[str, ...] = ()
    """Another model: folders of gates for it, Fast KVzip's and WG-KV's; a method without any is not compared."""
    context: int = 1024
    """Tokens of a context."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Of contexts; the tables show means, and the least and the most."""
    samples: int = 96
    """Answers of a cell, at least."""

    def check(self) -> None:
        """Refuse what means nothing. Raises UserError."""
        check_different(seeds=self.seeds)

    @property
    def own(self) -> bool:
        """Whether it is the built-in model."""
        return self.model == BUILTIN

    @property
    def tasks(self) -> tuple[str, ...]:
        """What is asked, and a text that goes on."""
        return ("recall", "needle", "text") if self.own else ("documents", "needle", "text")

    @property
    def questions(self) -> tuple[str, ...]:
        """Those in which texts of guidance are compared: none helps another model to needles of seven digits."""
        return self.tasks[:2] if self.own else self.tasks[:1]

    @property
    def guidance(self) -> dict[str, str]:
        """Texts by what they are called, the first in the main table."""
        return OWN if self.own else PUBLISHED


def told(config: ClaimsConfig, seed: int) -> list[str]:
    """The evaluation's options of a seed."""
    options = {
        "model": config.model,
        "seed": seed,
        "samples": config.samples,
        "context": config.context,
        "documents": config.documents,
    }
    words = [word for name, x in options.items() if x is not None for word in (f"--{name}", str(x))]
    return [*words, *(("--gates", *config.gates) if config.gates else ())]


def asked(config: ClaimsConfig, part: str, names: dict[str, str], tasks: tuple[str, ...]) -> Scores:
    """The scores of policies by their row, at every budget and of all seeds."""
    scores: Scores = {}
    rows = {policy: name for name, policy in names.items()}
    for seed in config.seeds:
        folder = config.out / f"seed-{seed}" / part
        for cell in evaluated(folder, list(rows), BUDGETS, tasks, *told(config, seed)):
            gather(scores, rows[cell["policy"]], [cell])
    return scores


def kept(config: ClaimsConfig, text: str) -> Scores:
    """The scores where the text is written as a part of the context, whose last tokens look back, and stays: with the
    same number of entries, its own among them."""
    scores: Scores = {}
    for seed in config.seeds:
        file, options = config.out / f"seed-{seed}" / "kept.json", [text, *told(config, seed)]
        if not file.exists():
            cells = list(measured_kept(config, text, seed))
            write_text(file, json.dumps({"options": options, "cells": cells}) + "\n")
        found = json.loads(file.read_text())
        if found["options"] != options:
            raise UserError(
                f"{file}: measured with {found['options']}, asked for {options}: take another --out"
            )
        gather(scores, "the first, written and kept", found["cells"])
    return scores


def measured_kept(config: ClaimsConfig, text: str, seed: int) -> Iterator[dict[str, Any]]:
    """A cell for each task that is asked, and budget."""
    import jax
    import numpy as np

    import kvjax
    from kvjax.evaluate.config import default_chunk, parse
    from kvjax.evaluate.measuring import Manner, measure
    from kvjax.evaluate.workloads import workloads

    asks = ["--tasks", *config.questions, "--out", str(config.out), "--policies", "snapkv"]
    evaluation = parse([*told(config, seed), *asks])
    chunk = default_chunk(config.context)
    with jax.set_mesh(start(MeshShape())):
        model = kvjax.load_model(config.model)
        guided = {"oraclekv": {"ratio": 0.5, "guidance": text}}
        moment = kvjax.make_policy(guided, model=model, tokenizer=kvjax.load_tokenizer(config.model)).when
        assert moment is not None
        guidance = np.array(moment.guidance, np.int32)
        for load in workloads(evaluation):
            samples = [
                dataclasses.replace(x, context=np.concatenate([x.context, guidance])) for x in load.samples
            ]
            share = load.tokens / (load.tokens + len(guidance))
            for budget in BUDGETS:
                policy = kvjax.make_policy(
                    {"snapkv": {"ratio": budget * share, "observed": len(guidance)}}, model=model
                )
                score = measure(model, policy, samples, Manner(load.batch, chunk)).score
                yield {"task": load.task, "budget": budget, "score": score}


def rows_of(config: ClaimsConfig, scores: Scores) -> str:
    """A table: a row a method and budget, a column a task."""
    rows = [
        [
            f"{budget:g}",
            name,
            *(spread(own) if (own := found.get((task, budget))) else "–" for task in config.tasks),
        ]
        for budget in (1.0, *BUDGETS)
        for name, found in scores.items()
        if (config.tasks[0], budget) in found
    ]
    return table(["of the context", "method", *config.tasks], rows)


def methods(config: ClaimsConfig) -> str:
    """Guidance against none, by how the budget is shared, beside what needs no question."""
    text = next(iter(config.guidance.values()))
    names = {"all of it": "full"} | PLAIN
    names |= {
        f"{of} with guidance": format_policy({"oraclekv": {"guidance": text, "allocation": name}})
        for name, of in ALLOCATIONS.items()
    }
    trained = {"wgkv", "fast_kvzip"} if config.own else {describe(x).get("method") for x in config.gates}
    trained |= {"kvzip"}
    names |= {name: policy for name, policy in RIVALS.items() if policy.partition(":")[0] in trained}
    return rows_of(config, asked(config, "methods", names, config.tasks))


def texts(config: ClaimsConfig) -> str:
    """Texts of guidance, the budget each kv head's own; and the first as a part of the context."""
    names = {name: format_policy({"oraclekv": {"guidance": text}}) for name, text in config.guidance.items()}
    tasks = config.tasks if config.own else config.questions
    scores = asked(config, "texts", names, tasks) | kept(config, next(iter(config.guidance.values())))
    return rows_of(config, scores)


def main(args: list[str] | None = None) -> None:
    """The command."""
    config = parse_command(ClaimsConfig, args)
    config.check()
    config.out.mkdir(parents=True, exist_ok=True)
    made = "\n\n".join((methods(config), texts(config)))
    write_text(config.out / "claims.md", made + "\n")
    print(f"{config.out / 'claims.md'}\n\n{made}")


if __name__ == "__main__":
    run_command(main)
