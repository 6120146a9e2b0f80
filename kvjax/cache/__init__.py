"""The KV cache: a local window of the last tokens and paged retained entries, ragged by layer, sequence and kv head.

pages: the page pool, page tables and the cache as one pytree. ring: the local window, and how tokens enter and leave
it. sizes: pool sizes, an empty cache, and copies with another pool. compaction: the choice of the entries that stay,
and their move to the front. dropping: spans of tokens that leave a sequence. metadata: entry metadata. observations:
observation buffers. max_entries: head caches that keep their best entries. sliding: the windows of sliding-window
layers. forks: sequences that share a context's pages. rollback: a cache as it was before. checks: numbers that are not
finite, and a pool that ran out. stats: the size of a cache. packed_entries, saved: a cache on the host and on disk.
"""

from kvjax.cache.checks import check, check_alive, check_finite, free_counts, if_finite, not_finite
from kvjax.cache.compaction import Quota
from kvjax.cache.dropping import Span, drop
from kvjax.cache.forks import copy_shared_pages, selected
from kvjax.cache.max_entries import METADATA as MAX_ENTRIES_METADATA
from kvjax.cache.max_entries import POSITION, PRIORITY, Turnover, ends, stored_entries, swap_worst
from kvjax.cache.pages import SCALE, Cache, LayerCache, Pages, default_page_size, entry_bytes, ring_pages
from kvjax.cache.ring import (
    Reserved,
    in_order,
    leaving,
    place_one,
    push,
    push_one,
    release_unused,
    reserve,
    ring_entries,
    ring_priority,
    slot_priority,
)
from kvjax.cache.sizes import (
    MARGIN,
    CapacityError,
    Layout,
    capacity_like,
    capacity_pages,
    check_capacity,
    device_bytes,
    empty,
    longest_lengths,
    parse_capacity,
    pool_size,
    resize,
    shard_pages,
    table_tokens,
    worth_shrinking,
)
from kvjax.cache.stats import Stats, stats

__all__ = [
    "MARGIN",
    "MAX_ENTRIES_METADATA",
    "POSITION",
    "PRIORITY",
    "SCALE",
    "Cache",
    "CapacityError",
    "LayerCache",
    "Layout",
    "Pages",
    "Quota",
    "Reserved",
    "Span",
    "Stats",
    "Turnover",
    "capacity_like",
    "capacity_pages",
    "check",
    "check_alive",
    "check_capacity",
    "check_finite",
    "copy_shared_pages",
    "default_page_size",
    "device_bytes",
    "drop",
    "empty",
    "ends",
    "entry_bytes",
    "free_counts",
    "if_finite",
    "in_order",
    "leaving",
    "longest_lengths",
    "not_finite",
    "parse_capacity",
    "place_one",
    "pool_size",
    "push",
    "push_one",
    "release_unused",
    "reserve",
    "resize",
    "ring_entries",
    "ring_pages",
    "ring_priority",
    "selected",
    "shard_pages",
    "slot_priority",
    "stats",
    "stored_entries",
    "swap_worst",
    "table_tokens",
    "worth_shrinking",
]
