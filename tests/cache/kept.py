"""Which tokens the rows of a cache hold that keeps positions beside its entries, and those of a mask."""

import numpy as np

from kvjax import cache as caches


def positions(cache):
    """Where the stored entries stood, of every row: lists in order."""
    table = np.asarray(cache.layers.page_table)[..., caches.ring_pages(cache.window, cache.page_size) :]
    plane = np.asarray(cache.pages.planes["position"])
    length = np.asarray(cache.layers.length)
    return {
        row: sorted(plane[table[row].clip(max=len(plane) - 1)].reshape(-1)[: length[row]].tolist())
        for row in np.ndindex(length.shape)
    }


def lists(kept):
    """The same of a mask."""
    return {row: np.flatnonzero(kept[row]).tolist() for row in np.ndindex(kept.shape[:3])}
