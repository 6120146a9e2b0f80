"""Guidance tokens, which stand for the questions to come, observe a context when it is compressed (after OracleKV)."""

from kvjax.policies import Policy, Ratio, Schedule, SnapKV, Trigger

GUIDANCE = tuple(range(40, 52))
"""Token ids of an arbitrary text."""


def guided(*, model, ratio=0.25, chunk=0, tokens=GUIDANCE):
    """Return SnapKV with the guidance's queries, at the prompt's end or after every `chunk` tokens of it."""
    trigger = Trigger("chunk" if chunk else "prompt", chunk=chunk, observers=tokens)
    return Policy(
        eviction=SnapKV(observed=len(tokens)), schedule=Schedule(Ratio(ratio), trigger), name="guided"
    )
