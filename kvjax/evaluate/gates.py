"""Which of several gates are compared: at their own τ a folder for each λ, under an eviction the smallest that fill a
budget."""

from collections.abc import Sequence

import numpy as np

from kvjax.errors import UserError
from kvjax.evaluate.config import FIXED_TAU
from kvjax.policies import Policy
from kvjax.policies.admission.wgkv import WGKV, describe_gates


def by_lambda(folders: Sequence[str]) -> dict[float, str]:
    """The folders by the λ that they were trained with.

    Raises UserError for none, for a folder that does not say its λ, and for two of one λ.
    """
    if not folders:
        raise UserError(f"{FIXED_TAU} needs --gates, a folder that training exported, or several")
    found: dict[float, str] = {}
    for folder in folders:
        described = describe_gates(folder)
        if not isinstance(described.get("lambda"), int | float):
            raise UserError(f"--gates {folder}: config.json does not say with which lambda they were trained")
        name = float(described["lambda"])
        if name in found:
            raise UserError(
                f"--gates {found[name]} and {folder} have both λ {name:g}, by which {FIXED_TAU} tells gates apart"
            )
        found[name] = folder
    return found


def above(folders: Sequence[str], ratio: float, tokens: int) -> str:
    """The gates for a method that keeps, or reads, `ratio` of the entries out of what gates let in.

    Of those that let in as much of contexts of `tokens` tokens, by the rates that they were exported with, the most
    selective; if none does, those that let in most. Gates that do not say their rates count as letting in everything.
    """

    def size(folder: str) -> float:
        described = describe_gates(folder)
        window, rate = int(described["window"]), float(np.mean(described.get("rate", 1.0)))
        return (window + rate * max(0, tokens - window)) / max(window, tokens)

    sizes = {folder: size(folder) for folder in folders}
    enough = {folder: own for folder, own in sizes.items() if own >= ratio}
    return min(enough, key=enough.__getitem__) if enough else max(sizes, key=sizes.__getitem__)


def own_tau(policy: Policy) -> float | None:
    """The threshold of a policy with gates, in the fewest digits that give the same float32; None: it has none."""
    gated = policy.admission
    return float(str(np.asarray(gated.tau)[0])) if isinstance(gated, WGKV) else None
