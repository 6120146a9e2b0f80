"""The gates that are compared at their own τ: a folder for each λ."""

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


def own_tau(policy: Policy) -> float | None:
    """The threshold of a policy with gates, in the fewest digits that give the same float32; None: it has none."""
    gated = policy.admission
    return float(str(np.asarray(gated.tau)[0])) if isinstance(gated, WGKV) else None
