"""List the tokens that each head cache holds, for a cache that stores the position of each entry, and for a mask."""

import numpy as np

from kvjax import cache as caches


def positions(cache):
    """Return the positions of the stored entries, as a sorted list for each head cache."""
    table = np.asarray(cache.layers.page_table)[..., caches.ring_pages(cache.window, cache.page_size) :]
    position = np.asarray(cache.pages.metadata["position"])
    length = np.asarray(cache.layers.length)
    return {
        row: sorted(position[table[row].clip(max=len(position) - 1)].reshape(-1)[: length[row]].tolist())
        for row in np.ndindex(length.shape)
    }


def lists(kept):
    """Return the positions that are set in a mask, in the same form."""
    return {row: np.flatnonzero(kept[row]).tolist() for row in np.ndindex(kept.shape[:3])}
