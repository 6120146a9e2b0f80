"""What costs nothing to train, sized to hold a given number of entries: sinks with a window, and a head pattern."""

import numpy as np
from jaxtyping import Float

from kvjax.models.decoder import Decoder
from kvjax.policies import Policy, make_policy

SINK = 4
"""First tokens that are kept, unless a pattern says otherwise."""


def sink_and_window(model: Decoder, *, entries: float, sink: int = SINK) -> Policy:
    """The window is as wide as `entries` of each kv head allow, 1 at least."""
    return make_policy("streaming_llm", model=model, sink=sink, window=_window(entries, sink))


def whole_heads(
    model: Decoder,
    weights: Float[np.ndarray, "l k"],
    *,
    entries: float,
    context: int,
    window: int,
    sink: int = SINK,
) -> Policy:
    """As many heads keep everything, in the order of their `weights`, as leave the others `sink` and `window`; these
    windows are then widened until there are `entries` of each kv head of a context of `context` tokens on average."""
    heads = weights.size
    spare, more = max(0.0, entries - sink - window), max(1, context - sink - window)
    whole = min(heads - 1, int(heads * spare / more))
    share = (heads * entries - whole * context) / (heads - whole)
    return make_policy(
        "head_pattern", model=model, pattern=weights, ratio=whole / heads, sink=sink,
        window=_window(share, sink),
    )  # fmt: skip


def _window(entries: float, sink: int) -> int:
    """The window that fills the entries: it counts the query's own token, which is not stored yet."""
    return max(1, round(entries) - sink + 1)
