"""What costs nothing to train, of a given size: sinks with a window, and whole heads beside streaming ones.

`Rivals` chooses what is free to choose by the answers on calibration contexts: the order of the heads, sinks, windows.
What a head is worth is measured by one loss (`teacher_forcing`): of all heads whole but one, and of all heads streaming
but one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from kvjax.evaluate.teacher_forcing import Outcome
from kvjax.exported.fingerprint import MadeFor
from kvjax.models.decoder import Decoder
from kvjax.policies import Policy, make_policy
from kvjax.policies.admission.head_pattern import choose_heads
from kvjax.policies.admission.pattern_folder import read_pattern, write_pattern

Trial = Callable[[Bool[np.ndarray, "l k"], int, int], Outcome]
"""What comes of some whole heads, the others at so many sinks and such a window."""

SINK = 4
"""Sinks of the streaming heads while heads are measured."""
MEASURED_TOKENS = 250_000
"""Tokens that all measurements of a model read together by default."""


def one_streaming(run: Trial, whole: Bool[np.ndarray, "l k"], window: int) -> float:
    """How much the loss rises when these heads stream and all others are whole."""
    return run(~whole, SINK, window).loss


def one_whole(run: Trial, whole: Bool[np.ndarray, "l k"], window: int) -> float:
    """How much the loss falls when these heads are whole and all others stream."""
    return -run(whole, SINK, window).loss


MEASURES = {"one streaming": one_streaming, "one whole": one_whole}


def measure_heads(
    measure: Callable[..., float], run: Trial, shape: tuple[int, int], window: int
) -> Float[np.ndarray, "l k"]:
    """What each head is worth, from 0 for the least to 1 for the most."""
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
    """Every measure's order by name. In `folder` each is kept as a DuoAttention pattern folder, and read where it was
    measured before. made_for: the model, which these then carry."""
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
    """How many contexts of `length` tokens heads are measured on: 2 to 10, as `MEASURED_TOKENS` allow."""
    return int(np.clip(MEASURED_TOKENS // (len(MEASURES) * heads * length), 2, 10))


SINKS = (4, 16, 64, 128)
"""First tokens that may be kept, 128 as WG-KV's App. E has for both."""


@dataclass(frozen=True)
class StaticPattern:
    """The heads that are `whole`; the others keep `sink` first tokens and the last `window`."""

    whole: Bool[np.ndarray, "l k"]
    """By layer and kv head."""
    sink: int
    """First tokens of the others."""
    window: int
    """Last tokens of the others."""

    def policy(self, model: Decoder, **arguments: Any) -> Policy:
        """arguments: more of `head_pattern`'s and `streaming_llm`'s."""
        arguments |= {"sink": self.sink, "window": self.window}
        if not self.whole.any():
            return make_policy({"streaming_llm": arguments}, model=model)
        return make_policy({"head_pattern": arguments}, model=model, gates=self.whole.astype(float))


def sink_and_window(shape: tuple[int, int], *, entries: float, sink: int) -> StaticPattern:
    """The window is as wide as `entries` of each kv head allow, 1 at least."""
    return StaticPattern(np.zeros(shape, bool), sink, _window(entries, sink))


def whole_heads(
    weights: Float[np.ndarray, "l k"], *, entries: float, context: int, window: int, sink: int
) -> StaticPattern:
    """As many heads keep everything, in the order of their `weights`, as leave the others `sink` and `window`; these
    windows are then widened until there are `entries` of each kv head of a context of `context` tokens on average."""
    heads, streaming = weights.size, sink + window - 1
    spare, more = max(0.0, entries - streaming), max(1, context - streaming)
    whole = min(heads - 1, int(heads * spare / more))
    share = (heads * entries - whole * context) / (heads - whole)
    return StaticPattern(choose_heads(weights, whole), sink, _window(share, sink))


def _window(entries: float, sink: int) -> int:
    """The window that fills the entries: it counts the query's own token, which is not stored yet."""
    return max(1, round(entries) - sink + 1)


def narrowest(context: int) -> int:
    """The smallest window of streaming heads that is tried, where no gates have one."""
    return max(16, context // 32)


@dataclass(frozen=True)
class Choice:
    """What was chosen, and among what, in words."""

    pattern: StaticPattern
    """What was chosen."""
    words: str
    """That, and among what."""


@dataclass(frozen=True)
class Rivals:
    """The static policies of a size that answer best on calibration contexts."""

    run: Trial
    """What comes of a pattern on them."""
    orders: Mapping[str, Float[np.ndarray, "l k"]]
    """What heads are worth, by the orders' names."""
    context: int
    """Tokens of a context, about."""
    window: int
    """Of streaming heads; a quarter of it and four times it are tried too."""
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
        """One option after another, each at its best value given those before; the first once more at the end."""
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
