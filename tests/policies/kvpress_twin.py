"""Compute the kept entries of a context and the next logits with kvpress, and the logits of heads that see exactly the
given entries with torch. Needs torch and kvpress."""

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface, AutoModelForCausalLM, DynamicCache

Kept = list[list[set[int]]]
"""Positions of the kept entries, by layer and kv head."""


@dataclass(frozen=True)
class Pressed:
    """A compressed context: its keys before compression by layer `[k t h]`, the kept entries, and the cache. The torch
    model holds a mask per head until its next prefill."""

    keys: list[np.ndarray]
    kept: Kept
    cache: DynamicCache


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()


@torch.no_grad()
def read(twin: Any, context: np.ndarray, press: Any = None) -> DynamicCache:
    cache = DynamicCache()
    with nullcontext() if press is None else press(twin):
        twin(torch.tensor(context)[None], past_key_values=cache)
    return cache


@torch.no_grad()
def read_padded(twin: Any, contexts: list[np.ndarray], press: Any) -> DynamicCache:
    """Read a batch under a press, padded on the left with zeros."""
    longest, cache = max(len(x) for x in contexts), DynamicCache()
    tokens = np.stack([np.pad(x, (longest - len(x), 0)) for x in contexts])
    real = np.stack([np.arange(longest) >= longest - len(x) for x in contexts])
    position = np.maximum(real.cumsum(1) - 1, 0)
    with press(twin):
        twin(
            torch.tensor(tokens),
            attention_mask=torch.tensor(real.astype(int)),
            position_ids=torch.tensor(position),
            past_key_values=cache,
        )
    return cache


def press_context(twin: Any, context: np.ndarray, press: Any) -> Pressed:
    whole, cache = keys(read(twin, context)), read(twin, context, press)
    kept = [
        [places(*row) for row in zip(left, every, strict=True)]
        for left, every in zip(keys(cache), whole, strict=True)
    ]
    for layer, gone in enumerate(masked(twin)):
        for _, head, place in gone:
            kept[layer][head].remove(place)
    return Pressed(whole, kept, cache)


def keys(cache: DynamicCache) -> list[np.ndarray]:
    """Return the first sequence's keys, by layer `[k s h]`."""
    return [layer.keys[0].numpy().copy() for layer in cache.layers]


def masked(twin: Any) -> list[list[tuple[int, int, int]]]:
    """Return by layer the (sequence, head, place) of the entries that the last prefill's press masked instead of
    removing."""
    indices = (layer.self_attn.masked_key_indices for layer in twin.model.layers)
    return [[] if x is None else list(zip(*(i.tolist() for i in x), strict=True)) for x in indices]


def places(kept: np.ndarray, keys: np.ndarray) -> set[int]:
    """Return the positions of kept keys [s h] among all keys [t h] of one head."""
    gap = np.abs(kept[:, None] - keys).max(-1)
    assert (gap.min(1) < 1e-4).all(), "the context does not have this key"
    positions = set(gap.argmin(1).tolist())
    assert len(positions) == len(kept), "a key occurs twice"
    return positions


@torch.no_grad()
def logits_after(twin: Any, cache: DynamicCache, context: np.ndarray, question: np.ndarray) -> np.ndarray:
    """Return the logits that follow a question about the context of this cache, asked as kvpress's pipeline does."""
    position = torch.arange(len(context), len(context) + len(question))[None]
    tokens = torch.tensor(question)[None]
    return twin(tokens, past_key_values=cache, position_ids=position).logits[0, -1].numpy()


def logits_over(twin: Any, context: np.ndarray, kept: Kept, question: np.ndarray) -> np.ndarray:
    """Return the same logits if each head sees exactly the entries of the context in `kept`, by masking the whole
    cache."""
    cache = read(twin, context)
    for layer, module in enumerate(twin.model.layers):
        module.self_attn.sees = torch.tensor(
            [[place in head for place in range(len(context))] for head in kept[layer]]
        )
    twin.set_attn_implementation("exactly_kept")
    try:
        return logits_after(twin, cache, context, question)
    finally:
        twin.set_attn_implementation("sdpa")


def _exactly_kept(module, query, key, value, attention_mask, scaling, **_):
    group, tokens = query.shape[1] // key.shape[1], query.shape[2]
    own = torch.ones(tokens, tokens, dtype=torch.bool).tril().expand(key.shape[1], -1, -1)
    sees = torch.cat([module.sees[:, None].expand(-1, tokens, -1), own], -1)
    key, value, sees = (x.repeat_interleave(group, -3) for x in (key, value, sees))
    p = (query @ key.transpose(2, 3) * scaling).masked_fill(~sees, -torch.inf).softmax(-1)
    return (p @ value).transpose(1, 2).contiguous(), p


AttentionInterface.register("exactly_kept", _exactly_kept)
