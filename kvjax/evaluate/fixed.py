"""What costs nothing to train, of a given size: sinks with a window, and whole heads beside streaming ones.

`Rivals` chooses what is free to choose (the order of the heads, sinks, windows) by the answers on calibration contexts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from kvjax.evaluate.head_order import Run
from kvjax.evaluate.teacher_forced import Outcome
from kvjax.models.decoder import Decoder
from kvjax.policies import Policy, make_policy
from kvjax.policies.admission.head_pattern import choose_heads

SINKS = (4, 16, 64, 128)
"""First tokens that may be kept, 128 as WG-KV's App. E has for both."""


@dataclass(frozen=True)
class Fixed:
    """The heads that are `whole`; the others keep `sink` first tokens and the last `window`."""

    whole: Bool[np.ndarray, "l k"]
    sink: int
    window: int

    def policy(self, model: Decoder) -> Policy:
        if not self.whole.any():
            return make_policy("streaming_llm", model=model, sink=self.sink, window=self.window)
        whole = self.whole.astype(float)
        return make_policy("head_pattern", model=model, pattern=whole, sink=self.sink, window=self.window)


def sink_and_window(shape: tuple[int, int], *, entries: float, sink: int) -> Fixed:
    """The window is as wide as `entries` of each kv head allow, 1 at least."""
    return Fixed(np.zeros(shape, bool), sink, _window(entries, sink))


def whole_heads(
    weights: Float[np.ndarray, "l k"], *, entries: float, context: int, window: int, sink: int
) -> Fixed:
    """As many heads keep everything, in the order of their `weights`, as leave the others `sink` and `window`; these
    windows are then widened until there are `entries` of each kv head of a context of `context` tokens on average."""
    heads, streaming = weights.size, sink + window - 1
    spare, more = max(0.0, entries - streaming), max(1, context - streaming)
    whole = min(heads - 1, int(heads * spare / more))
    share = (heads * entries - whole * context) / (heads - whole)
    return Fixed(choose_heads(weights, whole / heads), sink, _window(share, sink))


def _window(entries: float, sink: int) -> int:
    """The window that fills the entries: it counts the query's own token, which is not stored yet."""
    return max(1, round(entries) - sink + 1)


def narrowest(context: int) -> int:
    """The smallest window of streaming heads that is tried, where no gates have one."""
    return max(16, context // 32)


@dataclass(frozen=True)
class Choice:
    """What was chosen, and among what, in words."""

    fixed: Fixed
    said: str


@dataclass(frozen=True)
class Rivals:
    """The static policies of a size that answer best on calibration contexts.

    run: what comes of a pattern on contexts of about `context` tokens. orders: what heads are worth, by the orders'
    names. window: of streaming heads; a quarter of it and four times it are tried too.
    """

    run: Run
    orders: Mapping[str, Float[np.ndarray, "l k"]]
    context: int
    window: int
    shape: tuple[int, int]

    def sink_and_window(self, entries: float) -> Choice:
        def make(sinks: int) -> Fixed:
            return sink_and_window(self.shape, entries=entries, sink=sinks)

        return self._best(make, {"sinks": [x for x in SINKS if x == SINKS[0] or x < entries]})

    def head_pattern(self, entries: float) -> Choice:
        def make(order: str, sinks: int, window: int) -> Fixed:
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

    def _best(self, make: Callable[..., Fixed], options: dict[str, Sequence[Any]]) -> Choice:
        """One option after another, each at its best value given those before; the first once more at the end."""
        known: dict[Any, Outcome] = {}

        def outcome(chosen: dict[str, Any]) -> Outcome:
            fixed = make(**chosen)
            key = fixed.whole.tobytes(), fixed.sink, fixed.window
            if key not in known:
                known[key] = self.run(fixed.whole, fixed.sink, fixed.window)
            return known[key]

        chosen = {name: values[0] for name, values in options.items()}
        said = {}
        for name in (*options, next(iter(options))):
            found = {value: outcome(chosen | {name: value}) for value in options[name]}
            chosen[name] = max(found, key=lambda value: (found[value].score, -found[value].loss))
            tried = ", ".join(f"{value} {100 * one.score:.0f}%" for value, one in found.items())
            said[name] = f"{name} {chosen[name]} (of {tried})"
        fixed = make(**chosen)
        heads = f"{fixed.whole.sum()} of {fixed.whole.size} heads whole, " if "order" in options else ""
        return Choice(fixed, f"{heads}window {fixed.window}; {'; '.join(said.values())}")
