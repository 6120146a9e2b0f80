"""The threshold at which gates keep a given share of the entries."""

import dataclasses
import math
from collections.abc import Callable, Mapping

import numpy as np

from kvjax.errors import UserError
from kvjax.mesh import put, use_mesh
from kvjax.policies.admission.wgkv import WGKV
from kvjax.policies.policy import Policy

LOWEST, HIGHEST = -60.0, 16.0
"""Logits between which τ is searched for; a float32 below 1 is at most that of 16.6."""
CLOSE = 0.02
"""Of the wanted size: the search ends there."""
STEPS = 24
"""Sizes that are measured for a ratio at most."""
NEAREST = 2
"""Gates of several that are brought to a size."""


def with_tau(policy: Policy, tau: float) -> Policy:
    """A wgkv policy with another threshold; the same programs run it."""
    gated = policy.admission
    assert isinstance(gated, WGKV)
    with use_mesh(gated):
        threshold = put(np.full(gated.tau.shape, tau, np.float32))
    return dataclasses.replace(policy, admission=dataclasses.replace(gated, tau=threshold))


class Calibration:
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


def nearest(searches: Mapping[str, Calibration], ratio: float) -> dict[str, Policy]:
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
