"""`Calibrated`: a policy that is fitted on calibration contexts for each budget.

Heads: their order, sinks and windows are chosen by the answers (`Rivals`). The worth of a head is measured by a loss
(`teacher_forcing`), with all heads whole but one, or with all heads streaming but one. Gates: τ is searched for, and of
several gates those that answer best are taken.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from kvjax.checkpoints.fingerprint import MadeFor
from kvjax.errors import UserError
from kvjax.evaluate.teacher_forcing import Outcome
from kvjax.mesh import on_host
from kvjax.models.decoder import Decoder
from kvjax.policies import WGKV, Policy, make_policy
from kvjax.policies.admission.head_pattern import choose_heads
from kvjax.policies.admission.pattern_folder import read_pattern, write_pattern

LOWEST, HIGHEST = -60.0, 16.0
"""The range of logits in which τ is searched for. The logit of a float32 below 1 is at most 16.6."""
CLOSE = 0.02
"""The search ends at a size that differs from the wanted one by at most this share."""
STEPS = 24
"""The most sizes that are measured for a ratio."""
NEAREST = 2
"""The number of gates, among several, for which τ is searched at each size."""


Trial = Callable[[Bool[np.ndarray, "l k"], int, int], Outcome]
"""Run a head pattern, given its whole heads, sinks and window, and return its outcome."""

SINK = 4
"""Sinks of the streaming heads while heads are measured."""
MEASURED_TOKENS = 250_000
"""The tokens that all measurements of a model read in total by default."""


def one_streaming(run: Trial, whole: Bool[np.ndarray, "l k"], window: int) -> float:
    """Return the loss with these heads streaming and all others whole. It is higher for heads that are worth more."""
    return run(~whole, SINK, window).loss


def one_whole(run: Trial, whole: Bool[np.ndarray, "l k"], window: int) -> float:
    """Return the negative loss with these heads whole and all others streaming. It is higher for heads that are worth
    more."""
    return -run(whole, SINK, window).loss


MEASURES = {"one streaming": one_streaming, "one whole": one_whole}


def measure_heads(
    measure: Callable[..., float], run: Trial, shape: tuple[int, int], window: int
) -> Float[np.ndarray, "l k"]:
    """Return the worth of each head, from 0 for the least to 1 for the most."""
    worth = np.zeros(shape)
    for head in np.ndindex(shape):
        whole = np.zeros(shape, bool)
        whole[head] = True
        worth[head] = measure(run, whole, window)
    spread = worth.max() - worth.min()
    return (worth - worth.min()) / spread if spread > 0 else np.zeros(shape)


def orders(
    run: Trial,
    shape: tuple[int, int],
    window: int,
    folder: Path | None = None,
    made_for: MadeFor | None = None,
) -> dict[str, Float[np.ndarray, "l k"]]:
    """Return the worth of the heads by each measure's name. In `folder` each is saved as a DuoAttention pattern folder,
    and read from there if it was measured before. made_for: the model, which is then noted in these folders."""
    found = {}
    for name, measure in MEASURES.items():
        own = None if folder is None else folder / name.replace(" ", "_")
        if own is not None and (own / "config.json").is_file():
            found[name] = read_pattern(own).weights
            continue
        found[name] = measure_heads(measure, run, shape, window)
        if own is not None:
            write_pattern(own, found[name], SINK, window, made_for)
    return found


def default_contexts(heads: int, length: int) -> int:
    """Return the number of contexts of `length` tokens to measure heads on: 2 to 10, as `MEASURED_TOKENS` allow."""
    return int(np.clip(MEASURED_TOKENS // (len(MEASURES) * heads * length), 2, 10))


SINKS = (4, 16, 64, 128)
"""The numbers of sinks that are tried. 128 is that of the baselines in WG-KV's App. E."""


@dataclass(frozen=True)
class StaticPattern:
    """The heads that are `whole`; the others keep `sink` first tokens and the last `window`."""

    whole: Bool[np.ndarray, "l k"]
    """True for whole heads, by layer and kv head."""
    sink: int
    """First tokens of the others."""
    window: int
    """Last tokens of the others."""

    def policy(self, model: Decoder) -> Policy:
        """Return the pattern as a policy of the model."""
        arguments = {"sink": self.sink, "window": self.window}
        if not self.whole.any():
            return make_policy({"streaming_llm": arguments}, model=model)
        return make_policy({"head_pattern": arguments}, model=model, gates=self.whole.astype(float))


def sink_and_window(shape: tuple[int, int], *, entries: float, sink: int) -> StaticPattern:
    """Return a pattern of streaming heads alone, whose window is as wide as `entries` per kv head allow, at least 1."""
    return StaticPattern(np.zeros(shape, bool), sink, _window(entries, sink))


def whole_heads(
    weights: Float[np.ndarray, "l k"], *, entries: float, context: int, window: int, sink: int
) -> StaticPattern:
    """Return the pattern with the most whole heads, in the order of their `weights`, that leaves the others `sink` and
    `window`. Their windows are then widened until a context of `context` tokens has `entries` per kv head on
    average."""
    heads, streaming = weights.size, sink + window - 1
    spare, more = max(0.0, entries - streaming), max(1, context - streaming)
    whole = min(heads - 1, int(heads * spare / more))
    share = (heads * entries - whole * context) / (heads - whole)
    return StaticPattern(choose_heads(weights, whole), sink, _window(share, sink))


def _window(entries: float, sink: int) -> int:
    """Return the window that fills the entries. It counts the query's own token, which is not stored yet."""
    return max(1, round(entries) - sink + 1)


def narrowest(context: int) -> int:
    """Return the smallest window of streaming heads that is tried if no gates have one."""
    return max(16, context // 32)


@dataclass(frozen=True)
class Choice:
    """A chosen head pattern, with the candidates it was chosen from."""

    pattern: StaticPattern
    words: str
    """Description of the choice and its candidates."""


@dataclass(frozen=True)
class Rivals:
    """Chooses the static policies of a size that answer best on calibration contexts."""

    run: Trial
    """Runs a pattern on the calibration contexts."""
    orders: Mapping[str, Float[np.ndarray, "l k"]]
    """Worth of each head, by the orders' names."""
    context: int
    """The approximate number of tokens of a context."""
    window: int
    """Window of streaming heads. A quarter of it and four times it are tried, too."""
    shape: tuple[int, int]
    """Layers × kv heads."""

    def sink_and_window(self, entries: float) -> Choice:
        def make(sinks: int) -> StaticPattern:
            return sink_and_window(self.shape, entries=entries, sink=sinks)

        return self._best(make, {"sinks": [x for x in SINKS if x == SINKS[0] or x < entries]})

    def head_pattern(self, entries: float) -> Choice:
        def make(order: str, sinks: int, window: int) -> StaticPattern:
            return whole_heads(
                self.orders[order], entries=entries, context=self.context, window=window, sink=sinks
            )

        narrow = max(1, self.window // 4)
        options = {
            "order": list(self.orders),
            "sinks": [x for x in SINKS if x == SINKS[0] or x + narrow <= entries],
            "window": [
                x for x in (narrow, self.window, 4 * self.window) if x == narrow or SINKS[0] + x <= entries
            ],
        }
        return self._best(make, options)

    def _best(self, make: Callable[..., StaticPattern], options: dict[str, Sequence[Any]]) -> Choice:
        """Choose one option after another, each at its best value given the others, and the first again at the end."""
        known: dict[Any, Outcome] = {}

        def outcome(chosen: dict[str, Any]) -> Outcome:
            pattern = make(**chosen)
            key = pattern.whole.tobytes(), pattern.sink, pattern.window
            if key not in known:
                known[key] = self.run(pattern.whole, pattern.sink, pattern.window)
            return known[key]

        chosen = {name: values[0] for name, values in options.items()}
        words = {}
        for name in (*options, next(iter(options))):
            found = {value: outcome(chosen | {name: value}) for value in options[name]}
            chosen[name] = max(found, key=lambda value: (found[value].score, -found[value].loss))
            tried = ", ".join(f"{value} {100 * one.score:.0f}%" for value, one in found.items())
            words[name] = f"{name} {chosen[name]} (of {tried})"
        pattern = make(**chosen)
        heads = f"{pattern.whole.sum()} of {pattern.whole.size} heads whole, " if "order" in options else ""
        return Choice(pattern, f"{heads}window {pattern.window}; {'; '.join(words.values())}")


def own_tau(policy: Policy) -> float | None:
    """Return WG-KV's threshold, in the fewest digits that give the same float32; None for other policies."""
    gated = policy.admission
    return float(str(on_host(gated.tau).flat[0])) if isinstance(gated, WGKV) else None


def with_tau(policy: Policy, tau: float) -> Policy:
    """Return a wgkv policy with another threshold. The same programs run it."""
    gated = policy.admission
    assert isinstance(gated, WGKV)
    return dataclasses.replace(policy, admission=dataclasses.replace(gated, tau=tau))


class TauSearch:
    """A search for τ on one set of contexts, which remembers the sizes that it measured.

    Args:
        policy: wgkv, at any τ.
        size_of: the share of the entries that a policy keeps, which falls as τ rises.
    """

    def __init__(self, policy: Policy, size_of: Callable[[Policy], float]):
        gated = policy.admission
        assert isinstance(gated, WGKV)
        self._policy, self._size_of = policy, size_of
        self._start = float(np.clip(_logit(float(on_host(gated.tau).flat[0])), LOWEST, HIGHEST))
        self._known: dict[float, float] = {}

    @property
    def own(self) -> float:
        """The share of the entries that the policy keeps at the τ it has."""
        return self._size(self._start)

    def to(self, ratio: float) -> Policy:
        """Return the policy whose τ keeps `ratio` of the entries. The search starts at the policy's own τ, or at sizes
        measured before. It goes in growing steps of the logit until `ratio` is passed, then interpolates. If the size
        jumps past `ratio`, the policy with the nearest size is returned.

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
        """Return the place of `ratio` between two logits, from 0 to 1, as if the size's logarithm were linear."""
        above, below = (math.log(max(self._known[x], 1e-6)) for x in (low, high))
        return float(np.clip((above - math.log(ratio)) / max(above - below, 1e-6), 0.1, 0.9))

    def _size(self, logit: float) -> float:
        if logit not in self._known:
            self._known[logit] = self._size_of(with_tau(self._policy, _sigmoid(logit)))
        return self._known[logit]


def nearest(searches: Mapping[str, TauSearch], ratio: float) -> dict[str, Policy]:
    """Return the two gates that can keep `ratio` and whose own size is nearest to it, so that their τ moves least. They
    come by name with their policies, the nearest first.

    Raises UserError if no gates can keep it.
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


@dataclass(frozen=True)
class Candidate:
    """A policy made for a budget."""

    policy: Policy
    gates: str | None = None
    """The folder of WG-KV's gates; None for other policies."""
    choice: str = ""
    """Description of what was chosen on calibration contexts."""


@dataclass(frozen=True)
class Calibrated:
    """A policy that is fitted on calibration contexts for each budget: heads if there are `rivals`, else gates."""

    model: Decoder
    """The model, on its mesh."""
    rivals: Rivals | None
    """Chooses heads."""
    whole: bool
    """True if some heads are whole, False if all stream."""
    size: Callable[[Policy], float]
    """Returns the share of the entries that a policy keeps of calibration contexts."""
    score: Callable[[Policy], float]
    """Returns the score of a policy on further contexts, from 0 to 1."""
    searches: dict[str, TauSearch] = dataclasses.field(default_factory=dict)
    """The searches so far, by the gates' folder."""

    def fit(self, budget: float, entries: float, possible: Mapping[str, Policy]) -> Candidate:
        """Return the best policy of a budget, the share of the entries that is `entries` of each kv head. `possible`:
        the policy with each of the gates that may keep so few, by their folder.

        Raises:
            UserError: no gates can keep so few.
        """
        if self.rivals is not None:
            chosen = self.rivals.head_pattern(entries) if self.whole else self.rivals.sink_and_window(entries)
            return Candidate(chosen.pattern.policy(self.model), None, chosen.words)
        for folder, policy in possible.items():
            self.searches.setdefault(folder, TauSearch(policy, self.size))
        found = nearest({folder: self.searches[folder] for folder in possible}, budget)
        if len(found) == 1:
            ((gates, policy),) = found.items()
            return Candidate(policy, gates)
        scores = {name: self.score(policy) for name, policy in found.items()}
        best = max(scores, key=scores.__getitem__)
        tried = ", ".join(f"{name} {100 * score:.0f}%" for name, score in scores.items())
        return Candidate(found[best], best, f"gates {best} (of {tried})")
