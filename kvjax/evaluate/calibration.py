"""The threshold at which gates keep a given share of the entries."""

import dataclasses
import functools
import math
from collections.abc import Callable

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
        self._policy, self._size_of = policy, size_of
        self._known: dict[float, float] = {}

    @functools.cached_property
    def own(self) -> float:
        """The share of the entries that the policy keeps at the τ it has."""
        return self._size_of(self._policy)

    def to(self, ratio: float) -> Policy:
        """The policy whose τ keeps `ratio` of the entries, by bisection on τ's logit.

        Raises UserError if even the highest τ keeps more.
        """
        low = max((x for x, size in self._known.items() if size >= ratio), default=LOWEST)
        high = min((x for x, size in self._known.items() if size < ratio), default=HIGHEST)
        if high == HIGHEST and (least := self._size(HIGHEST)) > ratio * (1 + CLOSE):
            raise UserError(f"wgkv keeps at least {least:.3f} of the entries, got a budget of {ratio:g}")
        for _ in range(STEPS):
            close = [x for x, size in self._known.items() if abs(size - ratio) <= CLOSE * ratio]
            if close:
                return with_tau(self._policy, _sigmoid(close[-1]))
            middle = (low + high) / 2
            low, high = (middle, high) if self._size(middle) >= ratio else (low, middle)
        return with_tau(self._policy, _sigmoid(high))

    def _size(self, logit: float) -> float:
        if logit not in self._known:
            self._known[logit] = self._size_of(with_tau(self._policy, _sigmoid(logit)))
        return self._known[logit]


def nearest(searches: dict[str, Calibration], ratio: float) -> str:
    """The gates whose own size is nearest to `ratio`: their τ has to be moved least."""
    if len(searches) == 1:
        return next(iter(searches))
    return min(searches, key=lambda gates: abs(math.log(searches[gates].own / ratio)))


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))
