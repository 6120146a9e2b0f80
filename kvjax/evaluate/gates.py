"""The gates of an evaluation: the method that they belong to, and the choice of gates for a policy."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.checkpoints.folder import describe
from kvjax.checkpoints.torch_file import TorchFile, is_torch_file
from kvjax.errors import UserError
from kvjax.evaluate.compared import Compared, answers_contests, compared_of
from kvjax.evaluate.config import ANSWERING, POLICIES, EvaluateConfig
from kvjax.policies.admission.wgkv import files as wgkv
from kvjax.policies.eviction import trimkv
from kvjax.policies.eviction.fast_kvzip import files as fast_kvzip
from kvjax.policies.eviction.triattention import TriAttention
from kvjax.policies.eviction.trimkv import TrimKV
from kvjax.policies.registry import is_method

LEARNED = "prulong", "duo_attention"
"""Training recipes that export head patterns."""


def described(gates: str | Path) -> dict[str, Any]:
    """Return the description of gates: a folder's config.json, or the sizes found in a .pt file of a method's authors,
    whose layout tells the method. Raises UserError if there are no gates."""
    if not is_torch_file(gates):
        return describe(gates)
    with TorchFile(gates) as opened:
        names = [str(name) for name in opened.content] if isinstance(opened.content, dict) else []
    if "module" in names:
        return {"method": fast_kvzip.METHOD} | fast_kvzip.gate_sizes(gates)._asdict()
    if "stats" in names:
        return {"method": TriAttention.name}
    if any(trimkv.PREFIX.fullmatch(name) for name in names):
        return {"method": TrimKV.name}
    return {"method": "wgkv"} | wgkv.gate_sizes(gates)._asdict() | wgkv.PUBLISHED


def of_method(folders: Sequence[str], method: str) -> tuple[str, ...]:
    """Return the folders (or files) whose gates belong to a method. An eviction whose name ends in "_eviction" takes
    those of the admission that the name begins with."""
    owner = method.removesuffix("_eviction")
    return tuple(folder for folder in folders if described(folder).get("method") == owner)


def by_lambda(folders: Sequence[str]) -> dict[float, str]:
    """Return the folders by the λ that they were trained with.

    Raises UserError for a folder that does not state its λ, and for two folders with the same λ.
    """
    found: dict[float, str] = {}
    for folder in folders:
        weight = described(folder).get("lambda")
        if not isinstance(weight, int | float):
            raise UserError(f"--gates {folder}: nothing there says with which lambda they were trained")
        name = float(weight)
        if name in found:
            raise UserError(
                f"--gates {found[name]} and {folder} have both λ {name:g}, by which wgkv tells gates apart"
            )
        found[name] = folder
    return found


def most_selective(folders: Sequence[str], ratio: float, tokens: int) -> str:
    """Return the gates for a method that keeps, or reads, `ratio` of the entries out of those that gates admit.

    These are the most selective gates that admit at least `ratio` of a context of `tokens` tokens, by the rates that
    they were exported with. If none does, these are the gates that admit most. Gates without rates count as admitting
    everything.
    """

    def size(folder: str) -> float:
        description = described(folder)
        window, rate = int(description["window"]), float(np.mean(description.get("rate", 1.0)))
        return (window + rate * max(0, tokens - window)) / max(window, tokens)

    sizes = {folder: size(folder) for folder in folders}
    enough = {folder: own for folder, own in sizes.items() if own >= ratio}
    return min(enough, key=enough.__getitem__) if enough else max(sizes, key=sizes.__getitem__)


def gates_for(config: EvaluateConfig, one: Compared) -> tuple[str, ...]:
    """Return the folders of gates that a policy can take. Raises UserError if it needs some and there are none."""
    if one.orders_heads:
        return of_method(config.gates, "wgkv")
    name = one.takes_gates
    if name is None:
        return ()
    found = of_method(config.gates, name)
    if found or not is_method(one.kinds[name]):
        return found or config.gates
    raise UserError(
        f"--policies {one.label} needs --gates of {name}, a folder that training exported or the authors' file"
    )


def own_gates_by_lambda(folders: Sequence[str]) -> dict[float, str]:
    """Return the folders of gates at their own τ, by λ. A single folder need not state its λ, which is then 1."""
    alone = len(folders) == 1 and not isinstance(described(folders[0]).get("lambda"), int | float)
    return {1.0: folders[0]} if alone else by_lambda(folders)


def with_gates(config: EvaluateConfig, say: Callable[[str], None] = lambda text: None) -> EvaluateConfig:
    """Replace the default policies by those for the tasks that need no gates or have some. `say` gets a line about the
    policies left out."""
    if config.policies != POLICIES:
        return config

    def runs(policy: str) -> bool:
        name = compared_of(policy).takes_gates
        return name is None or bool(of_method(config.gates, name))

    learned = [folder for method in LEARNED for folder in of_method(config.gates, method)]
    contests = answers_contests(config)
    policies = ANSWERING if contests else (*POLICIES, *(f"head_pattern:gates={folder}" for folder in learned))
    if without := [policy for policy in policies if not runs(policy)]:
        say(f"not compared, since --gates names nothing that was trained for them: {', '.join(without)}")
    return replace(config, policies=tuple(filter(runs, policies)))
