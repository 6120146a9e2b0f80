"""The gates of an evaluation: which method they belong to, and which of them a policy uses."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.checkpoints.folder import describe
from kvjax.checkpoints.torch_file import TorchFile, is_torch_file
from kvjax.errors import UserError
from kvjax.evaluate.compared import Compared, has_contests, parse_compared
from kvjax.evaluate.config import ANSWERING, POLICIES, EvaluateConfig
from kvjax.policies.admission.wgkv import files as wgkv
from kvjax.policies.eviction import trimkv
from kvjax.policies.eviction.fast_kvzip import files as fast_kvzip
from kvjax.policies.eviction.triattention import TriAttention
from kvjax.policies.eviction.trimkv import TrimKV
from kvjax.policies.registry import is_method

LEARNED = "prulong", "duo_attention"
"""Training recipes that export head patterns."""


def describe_gates(gates: str | Path) -> dict[str, Any]:
    """Return the description of gates: a folder's config.json, or the sizes in a .pt file of a method's authors.

    The layout of the .pt file identifies the method. Raises UserError if there are no gates.
    """
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


def gates_of_method(folders: Sequence[str], method: str) -> tuple[str, ...]:
    """Return the folders (or files) with gates of a method. NAME_eviction uses the gates of the admission NAME."""
    trained_method = method.removesuffix("_eviction")
    return tuple(folder for folder in folders if describe_gates(folder).get("method") == trained_method)


def gates_by_lambda(folders: Sequence[str]) -> dict[float, str]:
    """Return the folders by the λ that they were trained with. A single folder without a stated λ gets λ 1.

    Raises UserError for one of several folders that does not state its λ, and for two folders with the same λ.
    """
    by_lambda: dict[float, str] = {}
    for folder in folders:
        stated = describe_gates(folder).get("lambda")
        if not isinstance(stated, int | float):
            if len(folders) == 1:
                return {1.0: folder}
            raise UserError(
                f"--gates {folder}: its description has no lambda, which wgkv needs with several gates"
            )
        weight = float(stated)
        if weight in by_lambda:
            raise UserError(
                f"--gates {by_lambda[weight]} and {folder} both have λ {weight:g}; wgkv compares one for each λ"
            )
        by_lambda[weight] = folder
    return by_lambda


def most_selective(folders: Sequence[str], ratio: float, tokens: int) -> str:
    """Return the most selective gates that admit at least `ratio` of a context of `tokens` tokens.

    Another method then keeps, or reads, `ratio` of the entries out of those admitted. The exported rates decide; gates
    without rates count as admitting everything. If no gates admit enough, return those that admit most.
    """

    def admitted_share(folder: str) -> float:
        description = describe_gates(folder)
        window, rate = int(description["window"]), float(np.mean(description.get("rate", 1.0)))
        return (window + rate * max(0, tokens - window)) / max(window, tokens)

    sizes = {folder: admitted_share(folder) for folder in folders}
    enough = {folder: size for folder, size in sizes.items() if size >= ratio}
    return min(enough, key=enough.__getitem__) if enough else max(sizes, key=sizes.__getitem__)


def gates_for(config: EvaluateConfig, policy: Compared) -> tuple[str, ...]:
    """Return the folders of gates that a policy can use. Raises UserError if it needs gates and has none."""
    if policy.orders_heads:
        return gates_of_method(config.gates, "wgkv")
    name = policy.gated_method
    if name is None:
        return ()
    if not is_method(policy.methods[name]):
        return gates_of_method(config.gates, name) or config.gates
    if folders := gates_of_method(config.gates, name):
        return folders
    raise UserError(
        f"--policies {policy.label} needs --gates of {name}, a folder that training exported or the authors' file"
    )


def choose_default_policies(
    config: EvaluateConfig, log: Callable[[str], None] = lambda text: None
) -> EvaluateConfig:
    """Replace the default policies by those that fit the tasks and the gates. `log` gets a line about policies without
    gates, which are left out. Other policies stay as they are."""
    if config.policies != POLICIES:
        return config

    def runs(policy: str) -> bool:
        name = parse_compared(policy).gated_method
        return name is None or bool(gates_of_method(config.gates, name))

    learned = [folder for method in LEARNED for folder in gates_of_method(config.gates, method)]
    contests = has_contests(config)
    policies = ANSWERING if contests else (*POLICIES, *(f"head_pattern:gates={folder}" for folder in learned))
    if skipped := [policy for policy in policies if not runs(policy)]:
        log(f"not compared, since --gates has no gates for them: {', '.join(skipped)}")
    return replace(config, policies=tuple(filter(runs, policies)))
