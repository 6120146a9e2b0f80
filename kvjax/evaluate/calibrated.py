"""`Calibrated`: a policy that is fitted on calibration contexts for each budget.

Head patterns: `PatternSearch` chooses the order of the heads, their sinks and their windows by the scores of answers.
The importance of a head is measured by a loss (`teacher_forcing`), with this head alone streaming or alone whole.
Gates: `TauSearch` searches τ, and the best-scoring of several gates is used.
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
"""The range of logits in which τ is searched. The logit of a float32 below 1 is at most 16.6."""
CLOSE = 0.02
"""The search ends at a size that differs from the target by at most this share."""
STEPS = 24
"""The most sizes measured for a ratio."""
NEAREST = 2
"""The number of gates, among several, for which τ is searched at each ratio."""


Trial = Callable[[Bool[np.ndarray, "l k"], int, int], Outcome]
"""Runs a head pattern, given its whole heads, sinks and window, and returns its outcome."""

SINK = 4
"""Sinks of the streaming heads in measurements of importance."""
MEASURED_TOKENS = 250_000
"""The total number of tokens that all measurements of importance read by default."""


def one_streaming(run: Trial, whole: Bool[np.ndarray, "l k"], window: int) -> float:
    """Return the loss with these heads streaming and all others whole. It is higher for more important heads."""
    return run(~whole, SINK, window).loss


def one_whole(run: Trial, whole: Bool[np.ndarray, "l k"], window: int) -> float:
    """Return the negative loss with these heads whole and all others streaming. It is higher for more important
    heads."""
    return -run(whole, SINK, window).loss


MEASURES = {"one streaming": one_streaming, "one whole": one_whole}


def measure_heads(
    measure: Callable[..., float], run: Trial, shape: tuple[int, int], window: int
) -> Float[np.ndarray, "l k"]:
    """Return the importance of each head, from 0 for the least important to 1 for the most important."""
    importance = np.zeros(shape)
    for head in np.ndindex(shape):
        whole = np.zeros(shape, bool)
        whole[head] = True
        importance[head] = measure(run, whole, window)
    spread = importance.max() - importance.min()
    return (importance - importance.min()) / spread if spread > 0 else np.zeros(shape)


def orders(
    run: Trial,
    shape: tuple[int, int],
    window: int,
    folder: Path | None = None,
    made_for: MadeFor | None = None,
) -> dict[str, Float[np.ndarray, "l k"]]:
    """Return the importance of the heads by the name of each measure.

    folder: each order is saved there as a DuoAttention pattern folder, or read from it if it was measured before.
    made_for: the model, which is recorded in these folders.
    """
    importances = {}
    for name, measure in MEASURES.items():
        saved = None if folder is None else folder / name.replace(" ", "_")
        if saved is not None and (saved / "config.json").is_file():
            importances[name] = read_pattern(saved).weights
            continue
        importances[name] = measure_heads(measure, run, shape, window)
        if saved is not None:
            write_pattern(saved, importances[name], SINK, window, made_for)
    return importances


def default_contexts(heads: int, length: int) -> int:
    """Return the number of contexts of `length` tokens to measure heads on: 2 to 10, as `MEASURED_TOKENS` allows."""
    return int(np.clip(MEASURED_TOKENS // (len(MEASURES) * heads * length), 2, 10))


SINKS = (4, 16, 64, 128)
"""The numbers of sinks that are tried. The baselines in WG-KV's App. E have 128."""


@dataclass(frozen=True)
class StaticPattern:
    """A pattern of heads: some are whole; the others keep the first `sink` and the last `window` tokens."""

    whole: Bool[np.ndarray, "l k"]
    """True for whole heads, by layer and kv head."""
    sink: int
    """First tokens that streaming heads keep."""
    window: int
    """Last tokens that streaming heads keep."""

    def policy(self, model: Decoder) -> Policy:
        """Return the pattern as a policy of the model."""
        arguments = {"sink": self.sink, "window": self.window}
        if not self.whole.any():
            return make_policy({"streaming_llm": arguments}, model=model)
        return make_policy({"head_pattern": arguments}, model=model, gates=self.whole.astype(float))


def sink_and_window(shape: tuple[int, int], *, entries: float, sink: int) -> StaticPattern:
    """Return a pattern of streaming heads, with the widest window (at least 1) for `entries` per kv head."""
    return StaticPattern(np.zeros(shape, bool), sink, _window(entries, sink))


def whole_heads(
    weights: Float[np.ndarray, "l k"], *, entries: float, context: int, window: int, sink: int
) -> StaticPattern:
    """Return the pattern with the most whole heads that leaves the other heads `sink` and `window`.

    Heads with the highest `weights` are whole. The window of the others is then widened until a context of `context`
    tokens has `entries` per kv head on average.
    """
    heads, streaming = weights.size, sink + window - 1
    spare, extra_if_whole = max(0.0, entries - streaming), max(1, context - streaming)
    whole = min(heads - 1, int(heads * spare / extra_if_whole))
    streaming_entries = (heads * entries - whole * context) / (heads - whole)
    return StaticPattern(choose_heads(weights, whole), sink, _window(streaming_entries, sink))


def _window(entries: float, sink: int) -> int:
    """Return the window that fills the entries. It includes the query's own token, which is not stored yet."""
    return max(1, round(entries) - sink + 1)


def smallest_window(context: int) -> int:
    """Return the smallest window of streaming heads to try if no gates have a window."""
    return max(16, context // 32)


@dataclass(frozen=True)
class PatternSearch:
    """A search for the static policies that score best on calibration contexts, at a number of entries."""

    run: Trial
    """Runs a pattern on the calibration contexts."""
    orders: Mapping[str, Float[np.ndarray, "l k"]]
    """Importance of each head, by the name of the order."""
    context: int
    """The approximate number of tokens of a context."""
    window: int
    """Window of streaming heads. A quarter and four times of it are also tried."""
    shape: tuple[int, int]
    """Layers × kv heads."""

    def sink_and_window(self, entries: float) -> tuple[StaticPattern, str]:
        def make(sinks: int) -> StaticPattern:
            return sink_and_window(self.shape, entries=entries, sink=sinks)

        return self._best(make, {"sinks": [x for x in SINKS if x == SINKS[0] or x < entries]})

    def head_pattern(self, entries: float) -> tuple[StaticPattern, str]:
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

    def _best(
        self, make: Callable[..., StaticPattern], options: dict[str, Sequence[Any]]
    ) -> tuple[StaticPattern, str]:
        """Choose the options one after another, each given the others, and then the first one again.

        Returns the pattern, and the chosen values with the candidates and their scores.
        """
        outcomes: dict[Any, Outcome] = {}

        def outcome(chosen: dict[str, Any]) -> Outcome:
            pattern = make(**chosen)
            key = pattern.whole.tobytes(), pattern.sink, pattern.window
            if key not in outcomes:
                outcomes[key] = self.run(pattern.whole, pattern.sink, pattern.window)
            return outcomes[key]

        chosen = {name: values[0] for name, values in options.items()}
        descriptions = {}
        for name in (*options, next(iter(options))):
            tried = {value: outcome(chosen | {name: value}) for value in options[name]}
            chosen[name] = max(tried, key=lambda value: (tried[value].score, -tried[value].loss))
            scores = ", ".join(f"{value} {100 * tried[value].score:.0f}%" for value in tried)
            descriptions[name] = f"{name} {chosen[name]} (of {scores})"
        pattern = make(**chosen)
        heads = f"{pattern.whole.sum()} of {pattern.whole.size} heads whole, " if "order" in options else ""
        return pattern, f"{heads}window {pattern.window}; {'; '.join(descriptions.values())}"


def wgkv_tau(policy: Policy) -> float | None:
    """Return WG-KV's threshold, in the fewest digits that give the same float32; None for other policies."""
    wgkv = policy.admission
    return float(str(on_host(wgkv.tau).flat[0])) if isinstance(wgkv, WGKV) else None


def with_tau(policy: Policy, tau: float) -> Policy:
    """Return a wgkv policy with another threshold, which runs the same programs."""
    wgkv = policy.admission
    assert isinstance(wgkv, WGKV)
    return dataclasses.replace(policy, admission=dataclasses.replace(wgkv, tau=tau))


class TauSearch:
    """A search for τ on a set of contexts. It remembers the sizes that it measured.

    Args:
        policy: wgkv, at any τ.
        size_of: returns the share of the entries that a policy keeps, which falls as τ rises.
    """

    def __init__(self, policy: Policy, size_of: Callable[[Policy], float]):
        wgkv = policy.admission
        assert isinstance(wgkv, WGKV)
        self._policy, self._size_of = policy, size_of
        self._start = float(np.clip(_logit(float(on_host(wgkv.tau).flat[0])), LOWEST, HIGHEST))
        self._sizes: dict[float, float] = {}
        """Measured sizes by the logit of τ."""

    @property
    def initial_size(self) -> float:
        """The share of the entries that the policy keeps at its original τ."""
        return self._size(self._start)

    def find(self, ratio: float) -> Policy:
        """Return the policy with the τ that keeps `ratio` of the entries.

        The search starts at the original τ, takes growing steps of the logit until `ratio` is passed, then
        interpolates. If the size jumps past `ratio`, it returns the policy with the nearest size. The result does not
        depend on earlier searches.

        Raises UserError if even the highest τ keeps more.
        """
        low, high = -math.inf, math.inf
        logit, nearest, step = self._start, self._start, 1.0
        for _ in range(STEPS):
            size = self._size(logit)
            nearest = min(nearest, logit, key=lambda x: abs(self._size(x) - ratio))
            if abs(size - ratio) <= CLOSE * ratio:
                break
            if logit == HIGHEST and size > ratio:
                raise UserError(f"wgkv keeps at least {size:.3f} of the entries, got a budget of {ratio:g}")
            low, high = (logit, high) if size >= ratio else (low, logit)
            if high == math.inf:
                logit, step = min(low + step, HIGHEST), 2 * step
            elif low == -math.inf:
                logit, step = max(high - step, LOWEST), 2 * step
            else:
                logit = low + (high - low) * self._between(low, high, ratio)
        return with_tau(self._policy, _sigmoid(nearest))

    def _between(self, low: float, high: float, ratio: float) -> float:
        """Return the position of `ratio` between two logits, from 0 to 1, interpolating the size's logarithm."""
        above, below = (math.log(max(self._sizes[x], 1e-6)) for x in (low, high))
        return float(np.clip((above - math.log(ratio)) / max(above - below, 1e-6), 0.1, 0.9))

    def _size(self, logit: float) -> float:
        if logit not in self._sizes:
            self._sizes[logit] = self._size_of(with_tau(self._policy, _sigmoid(logit)))
        return self._sizes[logit]


def nearest_gates(searches: Mapping[str, TauSearch], ratio: float) -> dict[str, Policy]:
    """Return policies that keep `ratio`, by the folder of their gates.

    They use the `NEAREST` gates whose initial sizes are nearest, since their τ changes least. The nearest come first.
    Raises UserError if no gates can keep `ratio`.
    """

    def distance(gates: str) -> float:
        return 0.0 if len(searches) == 1 else abs(math.log(max(searches[gates].initial_size, 1e-6) / ratio))

    policies, errors = {}, []
    for gates in sorted(searches, key=distance):
        try:
            policies[gates] = searches[gates].find(ratio)
        except UserError as error:
            errors.append(error)
        if len(policies) == NEAREST:
            break
    if not policies:
        raise errors[0]
    return policies


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def _logit(p: float) -> float:
    return math.log(max(p, 1e-30) / max(1 - p, 1e-30))


@dataclass(frozen=True)
class Candidate:
    """A policy at a budget."""

    policy: Policy
    gates: str | None = None
    """The folder of WG-KV's gates; None for other policies."""
    choice: str = ""
    """Description of what was chosen on calibration contexts."""


@dataclass(frozen=True)
class Calibrated:
    """A policy that is fitted on calibration contexts for each budget: a head pattern, or gates."""

    model: Decoder
    """The model, on its mesh."""
    pattern_search: PatternSearch | None
    """Chooses a head pattern; None for gates."""
    has_whole_heads: bool
    """True if the pattern may have whole heads, False if all heads stream."""
    size: Callable[[Policy], float]
    """Returns the share of the entries that a policy keeps on calibration contexts."""
    score: Callable[[Policy], float]
    """Returns the score of a policy on other calibration contexts, from 0 to 1."""
    tau_searches: dict[str, TauSearch] = dataclasses.field(default_factory=dict)
    """The searches of τ so far, by the gates' folder."""

    def fit(self, budget: float, entries: float, possible: Mapping[str, Policy]) -> Candidate:
        """Return the best policy at a budget.

        Args:
            budget: the share of the entries to keep.
            entries: the same budget, as entries per kv head.
            possible: the policy with each of the gates that may meet the budget, by the gates' folder.

        Raises:
            UserError: no gates can meet the budget.
        """
        if (search := self.pattern_search) is not None:
            choose = search.head_pattern if self.has_whole_heads else search.sink_and_window
            pattern, description = choose(entries)
            return Candidate(pattern.policy(self.model), None, description)
        for folder, policy in possible.items():
            self.tau_searches.setdefault(folder, TauSearch(policy, self.size))
        policies = nearest_gates({folder: self.tau_searches[folder] for folder in possible}, budget)
        if len(policies) == 1:
            ((gates, policy),) = policies.items()
            return Candidate(policy, gates)
        scores = {folder: self.score(policy) for folder, policy in policies.items()}
        best = max(scores, key=scores.__getitem__)
        tried = ", ".join(f"{folder} {100 * score:.0f}%" for folder, score in scores.items())
        return Candidate(policies[best], best, f"gates {best} (of {tried})")
