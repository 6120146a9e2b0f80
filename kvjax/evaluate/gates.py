"""Which of several gates are compared, and at which τ.

At their own τ a folder for each λ; under an eviction the most selective that fill a budget; alone those whose τ has to
be moved least to keep a budget, searched for on calibration contexts.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.errors import UserError
from kvjax.evaluate.config import FIXED_TAU
from kvjax.exported.folder import describe
from kvjax.exported.torch_file import TorchFile, is_torch_file
from kvjax.mesh import put, use_mesh
from kvjax.policies import Policy
from kvjax.policies.admission.wgkv import WGKV
from kvjax.policies.admission.wgkv import files as wgkv
from kvjax.policies.eviction.fast_kvzip import files as fast_kvzip

LOWEST, HIGHEST = -60.0, 16.0
"""Logits between which τ is searched for; a float32 below 1 is at most that of 16.6."""
CLOSE = 0.02
"""Of the wanted size: the search ends there."""
STEPS = 24
"""Sizes that are measured for a ratio at most."""
NEAREST = 2
"""Gates of several that are brought to a size."""


def described(gates: str | Path) -> dict[str, Any]:
    """What a folder's config.json says of its gates; of a file of the authors', by whose layout the method is known,
    what is in the file. Raises UserError for what are no gates."""
    if not is_torch_file(gates):
        return describe(gates)
    with TorchFile(gates) as opened:
        layered = isinstance(opened.content, dict) and "module" in opened.content
    if layered:
        return {"method": fast_kvzip.METHOD} | fast_kvzip.gate_sizes(gates)._asdict()
    return {"method": "wgkv"} | wgkv.gate_sizes(gates)._asdict() | wgkv.PUBLISHED


def of_method(folders: Sequence[str], method: str) -> tuple[str, ...]:
    """Those of the folders (or files) whose gates are of a method."""
    return tuple(folder for folder in folders if described(folder).get("method") == method)


def by_lambda(folders: Sequence[str]) -> dict[float, str]:
    """The folders by the λ that they were trained with.

    Raises UserError for none, for a folder that does not say its λ, and for two of one λ.
    """
    if not folders:
        raise UserError(f"{FIXED_TAU} needs --gates, a folder that training exported, or several")
    found: dict[float, str] = {}
    for folder in folders:
        said = described(folder).get("lambda")
        if not isinstance(said, int | float):
            raise UserError(f"--gates {folder}: nothing there says with which lambda they were trained")
        name = float(said)
        if name in found:
            raise UserError(
                f"--gates {found[name]} and {folder} have both λ {name:g}, by which {FIXED_TAU} tells gates apart"
            )
        found[name] = folder
    return found


def most_selective(folders: Sequence[str], ratio: float, tokens: int) -> str:
    """The gates for a method that keeps, or reads, `ratio` of the entries out of what gates let in.

    Of those that let in as much of contexts of `tokens` tokens, by the rates that they were exported with, the most
    selective; if none does, those that let in most. Gates that do not say their rates count as letting in everything.
    """

    def size(folder: str) -> float:
        said = described(folder)
        window, rate = int(said["window"]), float(np.mean(said.get("rate", 1.0)))
        return (window + rate * max(0, tokens - window)) / max(window, tokens)

    sizes = {folder: size(folder) for folder in folders}
    enough = {folder: own for folder, own in sizes.items() if own >= ratio}
    return min(enough, key=enough.__getitem__) if enough else max(sizes, key=sizes.__getitem__)


def own_tau(policy: Policy) -> float | None:
    """The threshold of a policy with gates, in the fewest digits that give the same float32; None: it has none."""
    gated = policy.admission
    return float(str(np.asarray(gated.tau).flat[0])) if isinstance(gated, WGKV) else None


def with_tau(policy: Policy, tau: float) -> Policy:
    """A wgkv policy with another threshold; the same programs run it."""
    gated = policy.admission
    assert isinstance(gated, WGKV)
    with use_mesh(gated):
        threshold = put(np.full(gated.tau.shape, tau, np.float32))
    return dataclasses.replace(policy, admission=dataclasses.replace(gated, tau=threshold))


class TauSearch:
    """Sizes that were measured for one set of contexts, and the search for more.

    Args:
        policy: wgkv, at any τ.
        size_of: the share of the entries that a policy keeps, which falls as τ rises.
    """

    def __init__(self, policy: Policy, size_of: Callable[[Policy], float]):
        gated = policy.admission
        assert isinstance(gated, WGKV)
        self._policy, self._size_of = policy, size_of
        self._start = float(np.clip(_logit(float(np.asarray(gated.tau).flat[0])), LOWEST, HIGHEST))
        self._known: dict[float, float] = {}

    @property
    def own(self) -> float:
        """The share of the entries that the policy keeps at the τ it has."""
        return self._size(self._start)

    def to(self, ratio: float) -> Policy:
        """The policy whose τ keeps `ratio` of the entries, searched for from the τ that it has on: in growing steps of
        its logit until the size is passed, then by interpolation. Where the size jumps past it, the nearest.

        Raises UserError if even the highest τ keeps more.
        """
        low = max((x for x, size in self._known.items() if size >= ratio), default=None)
        high = min((x for x, size in self._known.items() if size < ratio), default=None)
        step = 1.0
        for _ in range(STEPS):
            for logit, size in self._known.items():
                if abs(size - ratio) <= CLOSE * ratio:
                    return with_tau(self._policy, _sigmoid(logit))
            if low is not None and high is not None:
                logit = low + (high - low) * self._between(low, high, ratio)
            elif low is not None:
                logit, step = min(low + step, HIGHEST), 2 * step
            elif high is not None:
                logit, step = max(high - step, LOWEST), 2 * step
            else:
                logit = self._start
            size = self._size(logit)
            if logit == HIGHEST and size > ratio * (1 + CLOSE):
                raise UserError(f"wgkv keeps at least {size:.3f} of the entries, got a budget of {ratio:g}")
            low, high = (logit, high) if size >= ratio else (low, logit)
        return with_tau(self._policy, _sigmoid(min(self._known, key=lambda x: abs(self._known[x] - ratio))))

    def _between(self, low: float, high: float, ratio: float) -> float:
        """Where `ratio` is expected between two logits, from 0 to 1: as if the size's logarithm were linear."""
        above, below = (math.log(max(self._known[x], 1e-6)) for x in (low, high))
        return float(np.clip((above - math.log(ratio)) / max(above - below, 1e-6), 0.1, 0.9))

    def _size(self, logit: float) -> float:
        if logit not in self._known:
            self._known[logit] = self._size_of(with_tau(self._policy, _sigmoid(logit)))
        return self._known[logit]


def nearest(searches: Mapping[str, TauSearch], ratio: float) -> dict[str, Policy]:
    """Of the gates that can keep `ratio` the two whose own size is nearest to it, whose τ has to be moved least: their
    names and policies, the nearest first.

    Raises UserError if none can.
    """

    def distance(gates: str) -> float:
        return 0.0 if len(searches) == 1 else abs(math.log(max(searches[gates].own, 1e-6) / ratio))

    found, errors = {}, []
    for gates in sorted(searches, key=distance):
        try:
            found[gates] = searches[gates].to(ratio)
        except UserError as error:
            errors.append(error)
        if len(found) == NEAREST:
            break
    if not found:
        raise errors[0]
    return found


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def _logit(p: float) -> float:
    return math.log(max(p, 1e-30) / max(1 - p, 1e-30))
