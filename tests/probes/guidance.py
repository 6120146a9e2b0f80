"""Guidance: tokens that stand for the questions to come look at a context when it is compressed (after OracleKV)."""

from kvjax.policies import AtPrompt, EveryChunk, Policy, Ratio, SnapKV

GUIDANCE = tuple(range(40, 52))
"""Any text's token ids."""


def guided(*, model, ratio=0.25, chunk=0, tokens=GUIDANCE):
    """SnapKV by the guidance's queries, at the prompt's end or behind every `chunk` tokens of it."""
    when = EveryChunk(chunk, observers=tokens) if chunk else AtPrompt(observers=tokens)
    return Policy(eviction=SnapKV(observed=len(tokens)), budget=Ratio(ratio), when=when, name="guided")
