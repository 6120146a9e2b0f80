"""Checks before anything is run: policies and caches that do not fit are refused, in one line each."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from kvjax.cache import MAX_ENTRIES_METADATA, Cache, capacity_pages, check_alive
from kvjax.errors import UserError, one_of, shown, warn
from kvjax.mesh import batch_shards, on_host
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Decoder
from kvjax.policies.compiled import CompiledPolicy
from kvjax.policies.numbers import is_placed
from kvjax.policies.policy import Policy
from kvjax.policies.views import Shape
from pallas_kernels.vertical_slash.api import IMPLEMENTATIONS

_SAID: set[ModelConfig] = set()
"""Models whose users were warned of too many tokens."""


def check_length(
    model: Decoder,
    rows: Sequence[np.ndarray],
    new: int,
    cache: Cache | None = None,
    what: str = "new ones",
) -> None:
    """Warn, once for a model, if the longest prompt with its `new` tokens (and with those that a cache has read) is
    longer than the model is for: it runs, but its output may be meaningless. `what` names the new tokens."""
    shape = model.config
    read = np.array([row.size for row in rows])
    if cache is not None:
        read = read + on_host(cache.seen)[: len(rows)]
    most = int(read.max())
    if most + new > shape.longest and shape not in _SAID:
        _SAID.add(shape)
        more = f" and up to {new:,} {what}" if new else ""
        warn(
            f"{most:,} tokens{more} are more than the {shape.longest:,} that the model declares or was trained for: "
            "what it says may mean nothing",
            stacklevel=2,
        )


def check_arguments(
    where: str,
    model: Any,
    policy: Any = None,
    cache: Any = None,
    implementation: str | None = None,
) -> None:
    """Refuse arguments of other types, a cache that is gone, and a policy for another model."""
    for name, given, kind, source in (
        ("model", model, Decoder, "kvjax.load_model"),
        ("policy", policy, Policy | None, "kvjax.make_policy"),
        ("cache", cache, Cache | None, "prefill"),
    ):
        if not isinstance(given, kind):
            both = "; kvjax.load gives a model and its tokenizer" if isinstance(given, tuple) else ""
            raise UserError(f"{where}: {name} must come from {source}, got {shown(given)}{both}")
    if cache is not None:
        check_alive(where, cache)
    if implementation is not None:
        one_of(where, "implementation", implementation, tuple(IMPLEMENTATIONS))
    if policy is not None:
        layers, heads = model.config.num_full_layers, model.config.num_kv_heads
        placed = filter(is_placed, jax.tree.leaves(policy))
        fits = all(leaf.shape[0] == layers for leaf in placed)
        if not fits or policy.admission.admitted(1).shape[1] not in (1, heads):
            raise UserError(
                f"{where}: policy {policy.name} is for another model than this of {layers} layers × {heads} kv heads"
            )


def check_capacity(capacity: int | str) -> None:
    """Refuse a text or number that is no capacity for any model."""
    capacity_pages(capacity, rows=1, page_size=1, page_bytes=1)


def check_observers(policy: Policy, rows: list[np.ndarray], observers: list[np.ndarray]) -> None:
    """Refuse observers for a policy that observes no tokens, or not at a prompt's end."""
    if len(observers) != len(rows):
        raise UserError(f"prefill: observers are one row a prompt, got {len(observers)} for {len(rows)}")
    if policy.compacts_answers:
        raise UserError(
            f"prefill: observers look at a prompt's end, and {policy.name} compacts while it decodes"
        )
    if not policy.observes:
        why = "evicts nothing" if policy.schedule is None else "looks at what is stored alone"
        raise UserError(
            "prefill: observers are for an eviction that looks at tokens as they come, such as snapkv, and "
            f"{policy.name} {why}"
        )


def check_continues(cache: Cache, model: Decoder, policy: CompiledPolicy, rows: list[np.ndarray]) -> None:
    """Refuse a cache that was not made for this model, policy and batch."""
    check_fits(cache, model, policy)
    if -(-len(rows) // batch_shards()) * batch_shards() != cache.seen.shape[0]:
        raise UserError(
            f"the cache holds {cache.seen.shape[0]} sequences, got {len(rows)} prompts: share=True asks several of each"
        )


def check_in_front(where: str, cache: Cache) -> None:
    """Refuse a cache in which an empty sequence comes before one with tokens. Forks that are unequally spread over a
    mesh's devices leave such a cache, and a caller could not tell its sequences apart by place."""
    seen = on_host(cache.seen) > 0
    if (np.diff(seen.astype(np.int8)) > 0).any():
        raise UserError(
            f"{where}: this cache is of branches of which the mesh's devices have unequally many, and cannot be "
            "continued by place: ask as many of each context, or of the contexts' own cache"
        )


def check_fits(cache: Cache, model: Decoder, policy: CompiledPolicy) -> None:
    """Refuse a cache that was not made for this model and policy."""
    c, (layers, _, heads) = model.config, cache.layers.length.shape
    made_for = (layers, heads, cache.pages.pool.shape[-1] // 2)
    wanted = (c.num_full_layers, c.num_kv_heads, c.head_dim)
    if made_for != wanted:
        raise UserError(f"the cache is for (layers, kv heads, head_dim) = {made_for}, the model has {wanted}")
    if cache.head_order != c.head_order:
        raise UserError(
            "the cache has its kv heads at other places than the model: a model and its copy in an LLM may differ in "
            "this; save the cache with the one that it was made with, and load it with the other"
        )
    windows = 0 if cache.sliding is None else cache.sliding.shape[0], cache.sliding_window
    if windows != (len(c.sliding_layers), c.sliding_window):
        raise UserError(
            f"the cache is for {windows[0]} layers with a sliding window of {windows[1]}, the model has "
            f"{len(c.sliding_layers)} of {c.sliding_window}"
        )
    held, own = (np.dtype(x).name for x in (cache.pages.dtype, model.dtype))
    if held != own:
        raise UserError(f"the cache has entries in {held}, the model is in {own}")
    if cache.pages.int8 != c.int8_entries:
        held = "int8" if cache.pages.int8 else held
        raise UserError(
            f"the cache has entries in {held}, the model is loaded with kv_cache_dtype {c.kv_cache_dtype}"
        )
    host, later = policy.host, policy.decode
    if cache.window != host.window:
        raise UserError(f"the cache has window {cache.window}, policy {host.name} has {host.window}")
    shape = Shape(cache.seen.shape[0], heads, c.num_heads // heads, c.head_dim, model.dtype)
    needed = later.memory_shapes(shape, layers)
    held = cache.layers.state, cache.observations
    held = held if later.eviction is not None else (dataclasses.replace(held[0], eviction=()), ())
    sizes = [jax.tree.map(np.shape, memory) for memory in (held, needed)]
    if sizes[0] != sizes[1] or not set(later.metadata) <= set(cache.pages.metadata):
        raise UserError(
            f"the cache was not made with policy {host.name}, which needs to know more of its tokens"
        )
    has, needs = set(cache.pages.metadata) >= set(MAX_ENTRIES_METADATA), host.max_entries is not None
    if has != needs:
        its, own = ("with", "none") if has else ("without", "one")
        raise UserError(f"the cache was made {its} max_entries, policy {host.name} has {own}")
    if host.selection is not None and cache.pages.bounds is None:
        raise UserError(
            f"policy {host.name} selects pages by bounds of their keys, which this cache has none of: make it with a "
            f"policy that selects, too"
        )
