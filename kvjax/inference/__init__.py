"""Running a model over its cache: functions on a model, tokens and a cache. `kvjax.LLM` puts them together.

prefill: prompts into a new cache. generate: answers, in blocks of tokens. decode: the program of a block. sampler: the
next token of each sequence. answers: tokens, texts and what ends them. saving: caches on the disk. forward: tokens
through all layers, over the cache. attention: of one layer. capture: arrays of layers, streamed to the host. eviction:
when the cache is compacted. compaction: how much stays, and which entries. reconstruction: prompts that are read
again to score their entries. allocation: the pages of a cache. checks: refusals before anything is run. footprint_log:
what the cache held at each call.
"""

from kvjax.inference.answers import Generation
from kvjax.inference.generate import generate, stream
from kvjax.inference.prefill import logits, prefill
from kvjax.inference.saving import load_cache, save_cache

__all__ = ["Generation", "generate", "load_cache", "logits", "prefill", "save_cache", "stream"]
