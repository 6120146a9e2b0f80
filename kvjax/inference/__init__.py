"""Running a model over its cache.

sampling: prefill, logits, generation. forward: tokens through all layers, over the cache. attention: of one layer.
capture: what layers computed, streamed to the host. schedule: when the cache is compacted. reread: prompts that are
read again to score their entries. quota, compaction: how much stays, and what. room: space for what is to come.
warm_up: compiling ahead. checks: what is refused before anything is run. footprint_log: what the cache held at each
call.
"""
