"""Running a model over its cache: functions on a model, tokens and a cache. `kvjax.LLM` puts them together.

prefill: prompts into a new cache. generate: answers, in blocks of tokens. decode: the program of a block. sampler: the
next token of each sequence. answers: tokens and texts of answers, and how they end. saving: caches on disk. forward:
tokens through all layers, over the cache. attention: attention of one layer. sliding: attention of sliding-window
layers. capture: arrays of layers, streamed to the host. scoring: log-probabilities of a prompt's tokens. triggers: when
the cache is compacted. compaction: how many and which entries stay. reconstruction: passes after a prompt that score
its entries. allocation: the pages of a cache. key_scale: scales of int8 keys. placement: KV heads on devices. checks:
refusals before anything is run. footprint_log: the entries of the cache at each call.
"""

from kvjax.inference.answers import Generation
from kvjax.inference.generate import generate, stream
from kvjax.inference.prefill import logits, prefill
from kvjax.inference.saving import load_cache, save_cache

__all__ = ["Generation", "generate", "load_cache", "logits", "prefill", "save_cache", "stream"]
