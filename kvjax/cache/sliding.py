"""The windows of sliding-window layers: their last tokens, in no pages, since such a layer retains nothing else.

Windows are [l b k s 2h]: keys after RoPE, followed by values. Position i is in slot i mod (window − 1), of which there
are fewer while no sequence is longer. All layers of a token are written at once, after a call.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from pallas_kernels.bits import as_bits, as_floats

PAGE = 16
"""Kernels read windows as pages of so many slots."""


def slots_for(window: int, tokens: int) -> int:
    """Return the slots of windows for sequences of up to `tokens` tokens."""
    return -(-min(window - 1, tokens) // PAGE) * PAGE


def grown(windows: Shaped[Array, "l b k s kv"], window: int, tokens: int) -> Shaped[Array, "l b k s2 kv"]:
    """Return windows with slots for sequences of up to `tokens` tokens."""
    more = max(0, slots_for(window, tokens) - windows.shape[3])
    return jnp.pad(windows, ((0, 0), (0, 0), (0, 0), (0, more), (0, 0))) if more else windows


def turns(windows: Shaped[Array, "l b k s kv"], window: int) -> int:
    """Return the number of slots that take turns."""
    return min(window - 1, windows.shape[3])


def recent(
    windows: Shaped[Array, "l b k s kv"],
    layer: Int[Array, ""],
    seen: Int[Array, " b"],
    window: int,
    dtype: Any,
) -> tuple[Float[Array, "b k r kv"], Bool[Array, "b r"]]:
    """Return the entries of one layer's last tokens in order of position, and a mask of those that exist."""
    slots = turns(windows, window)
    slot = (seen[:, None] + jnp.arange(slots)) % slots
    own = windows[layer, jnp.arange(len(seen))[:, None], :, slot]
    return as_floats(jnp.moveaxis(own, 1, 2), dtype), jnp.arange(slots) >= slots - seen[:, None]


def as_pages(
    windows: Shaped[Array, "l b k s kv"], layer: Int[Array, ""]
) -> tuple[Shaped[Array, "p page kv"], Int[Array, "b k c"]]:
    """Return all layers' windows as one pool of pages, and the page table of one layer."""
    batch, heads, slots = windows.shape[1:4]
    table = jnp.arange(batch * heads * (slots // PAGE), dtype=jnp.int32).reshape(batch, heads, -1)
    return windows.reshape(-1, PAGE, windows.shape[-1]), table + layer * table.size


def written(
    windows: Shaped[Array, "l b k s kv"],
    new: Float[Array, "l b k n kv"],
    seen: Int[Array, " b"],
    valid: Int[Array, " b"],
    window: int,
) -> Shaped[Array, "l b k s kv"]:
    """Return the windows with the newest of a call's first `valid` tokens (`kvjax.cache.trail.newest`), before which
    there were `seen`."""
    slots = turns(windows, window)
    index = jnp.arange(new.shape[3]) + jnp.maximum(valid - slots, 0)[:, None]
    slot = jnp.where(index < valid[:, None], (seen[:, None] + index) % slots, windows.shape[3])
    new = as_bits(new) if windows.dtype == jnp.uint16 else new.astype(windows.dtype)
    return windows.at[:, jnp.arange(len(seen))[:, None], :, slot].set(
        jnp.moveaxis(new, (1, 3), (0, 1)), mode="drop"
    )
