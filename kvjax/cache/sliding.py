"""The windows of sliding-window layers: their last tokens, in arrays without pages, since such a layer retains nothing
else.

Windows are [l b k s 2h]: keys after RoPE, followed by values. Position i is in slot i mod (window − 1). There are fewer
slots while all sequences are shorter. All layers of a token are written at once, after a call.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from kvjax.cache.observations import newest_indices
from pallas_kernels.bits import as_bits, as_floats

PAGE = 16
"""The number of slots of a page. Kernels read windows as pages."""


def slots_for(window: int, tokens: int) -> int:
    """Return the number of slots of windows for sequences of up to `tokens` tokens."""
    return -(-min(window - 1, tokens) // PAGE) * PAGE


def grown(windows: Shaped[Array, "l b k s kv"], window: int, tokens: int) -> Shaped[Array, "l b k s2 kv"]:
    """Return windows with slots for sequences of up to `tokens` tokens."""
    more = max(0, slots_for(window, tokens) - windows.shape[3])
    return jnp.pad(windows, ((0, 0), (0, 0), (0, 0), (0, more), (0, 0))) if more else windows


def used_slots(windows: Shaped[Array, "l b k s kv"], window: int) -> int:
    """Return the number of slots that tokens are written to in turn; the others only fill the last page."""
    return min(window - 1, windows.shape[3])


def recent(
    windows: Shaped[Array, "l b k s kv"],
    layer: Int[Array, ""],
    seen: Int[Array, " b"],
    window: int,
    dtype: Any,
) -> tuple[Float[Array, "b k r kv"], Bool[Array, "b r"]]:
    """Return the entries of one layer's last tokens in order of position, and a mask of those that exist."""
    slots = used_slots(windows, window)
    slot = (seen[:, None] + jnp.arange(slots)) % slots
    entries = windows[layer, jnp.arange(len(seen))[:, None], :, slot]
    return as_floats(jnp.moveaxis(entries, 1, 2), dtype), jnp.arange(slots) >= slots - seen[:, None]


def as_pages(
    windows: Shaped[Array, "l b k s kv"], layer: Int[Array, ""]
) -> tuple[Shaped[Array, "p page kv"], Int[Array, "b k c"]]:
    """Return all layers' windows as one pool of pages, and the page table of one layer."""
    batch, heads, slots = windows.shape[1:4]
    table = jnp.arange(batch * heads * (slots // PAGE), dtype=jnp.int32).reshape(batch, heads, -1)
    return windows.reshape(-1, PAGE, windows.shape[-1]), table + layer * table.size


def written(
    windows: Shaped[Array, "l b k s kv"],
    dropped: Bool[Array, "b s"] | None,
    new: Float[Array, "l b k n kv"],
    seen: Int[Array, " b"],
    valid: Int[Array, " b"],
    window: int,
) -> tuple[Shaped[Array, "l b k s kv"], Bool[Array, "b s"] | None]:
    """Return the windows, and the mask of their dropped tokens, after the newest of a call's first `valid` tokens were
    written (`kvjax.cache.observations.newest`). `seen`: tokens before the call."""
    slots, row = used_slots(windows, window), jnp.arange(len(seen))[:, None]
    index = newest_indices(new.shape[3], slots, valid)
    slot = jnp.where(index < valid[:, None], (seen[:, None] + index) % slots, windows.shape[3])
    new = as_bits(new) if windows.dtype == jnp.uint16 else new.astype(windows.dtype)
    windows = windows.at[:, row, :, slot].set(jnp.moveaxis(new, (1, 3), (0, 1)), mode="drop")
    return windows, None if dropped is None else dropped.at[row, slot].set(False, mode="drop")


def in_order(
    dropped: Bool[Array, "b s"], windows: Shaped[Array, "l b k s kv"], seen: Int[Array, " b"], window: int
) -> Bool[Array, "b r"]:
    """Return the mask of dropped tokens in the order of `recent`."""
    slots = used_slots(windows, window)
    return jnp.take_along_axis(dropped, (seen[:, None] + jnp.arange(slots)) % slots, 1)


def bias(dropped: Bool[Array, "b s"], windows: Shaped[Array, "l b k s kv"]) -> Float[Array, "p page"]:
    """Return the bias of the logits of the entries of `as_pages`: −inf for dropped tokens, 0 for others."""
    of_slot = jnp.where(dropped, -jnp.inf, 0.0).astype(jnp.float32)[None, :, None]
    return jnp.broadcast_to(of_slot, windows.shape[:4]).reshape(-1, PAGE)


def position_of_slot(slots: int, used: int, seen: Int[np.ndarray, " b"]) -> Int[np.ndarray, "b slots"]:
    """Return the position of the token in each slot; negative where there is none. Tokens are written to the first
    `used` slots in turn."""
    newest = seen[:, None] - 1
    return newest - (newest - np.arange(slots)) % max(used, 1)
