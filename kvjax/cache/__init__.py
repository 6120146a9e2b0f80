"""The cache: a ring of the last tokens and a paged global region, ragged by layer, sequence and kv head.

pages: the pool, page tables and the cache as one pytree. ring: how tokens are written, leave the ring and are kept.
room: an empty cache, and pools that grow and shrink. sizes: capacities in pages. compaction: what an eviction leaves,
moved to the front. planes: the methods' own numbers of entries. stats: what a cache holds.
"""

from kvjax.cache.compaction import Quota
from kvjax.cache.pages import PAGE_SIZE, Cache, LayerCache, Pages
from kvjax.cache.ring import push, ring_entries, ring_pages, ring_priority
from kvjax.cache.room import Layout, empty, grown, trimmed
from kvjax.cache.sizes import MARGIN, CapacityError, largest_shard, pages_for, parse_capacity, rounded_up
from kvjax.cache.stats import Stats, check, stats

__all__ = [
    "MARGIN",
    "PAGE_SIZE",
    "Cache",
    "CapacityError",
    "LayerCache",
    "Layout",
    "Pages",
    "Quota",
    "Stats",
    "check",
    "empty",
    "grown",
    "largest_shard",
    "pages_for",
    "parse_capacity",
    "push",
    "ring_entries",
    "ring_pages",
    "ring_priority",
    "rounded_up",
    "stats",
    "trimmed",
]
