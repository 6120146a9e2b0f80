"""Checks before anything is run. Policies and caches that do not fit are refused with one line."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from kvjax.cache import MAX_ENTRIES_METADATA, Cache, check_alive
from kvjax.errors import UserError, shown, warn
from kvjax.mesh import batch_shards, on_host
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Decoder
from kvjax.policies.compiled import CompiledPolicy
from kvjax.policies.numbers import is_placed
from kvjax.policies.policy import Policy
from kvjax.policies.views import Shape

_WARNED: set[ModelConfig] = set()
"""Models for which a warning of too many tokens was given."""


def check_length(
    model: Decoder,
    rows: Sequence[np.ndarray],
    new_tokens: int,
    cache: Cache | None = None,
    kind: str = "new ones",
) -> None:
    """Warn, once per model, if the longest prompt with its `new_tokens`, and with the tokens of a cache, is longer than
    the model's context. It runs, but its output may be meaningless. `kind` describes the new tokens."""
    config = model.config
    read = np.array([row.size for row in rows])
    if cache is not None:
        read = read + on_host(cache.seen)[: len(rows)]
    longest = int(read.max())
    if longest + new_tokens > config.longest and config not in _WARNED:
        _WARNED.add(config)
        suffix = f" and up to {new_tokens:,} {kind}" if new_tokens else ""
        warn(
            f"{longest:,} tokens{suffix} are more than the {config.longest:,} that the model declares or was trained "
            "for: its output may be meaningless",
            stacklevel=2,
        )


def check_arguments(where: str, model: Any, policy: Any = None, cache: Any = None) -> None:
    """Refuse arguments of wrong types, a donated cache, and a policy for another model."""
    for name, value, type_, source in (
        ("model", model, Decoder, "kvjax.load_model"),
        ("policy", policy, Policy | None, "kvjax.make_policy"),
        ("cache", cache, Cache | None, "prefill"),
    ):
        if not isinstance(value, type_):
            hint = "; kvjax.load gives a model and its tokenizer" if isinstance(value, tuple) else ""
            raise UserError(f"{where}: {name} must come from {source}, got {shown(value)}{hint}")
    if cache is not None:
        check_alive(where, cache)
    if policy is not None:
        layers, heads = model.config.num_full_layers, model.config.num_kv_heads
        placed = filter(is_placed, jax.tree.leaves(policy))
        fits = all(leaf.shape[0] == layers for leaf in placed)
        if not fits or policy.admission.admitted(1).shape[1] not in (1, heads):
            raise UserError(
                f"{where}: policy {policy.name} is for another model than this of {layers} layers × {heads} kv heads"
            )


def check_observers(host: Policy, rows: list[np.ndarray], observers: list[np.ndarray]) -> None:
    """Refuse observers for a policy that does not observe tokens, or not at a prompt's end."""
    if len(observers) != len(rows):
        raise UserError(f"prefill: observers are one row a prompt, got {len(observers)} for {len(rows)}")
    if host.compacts_answers:
        raise UserError(
            f"prefill: observers look at a prompt's end, and {host.name} compacts while it decodes"
        )
    if not host.observes:
        reason = "evicts nothing" if host.schedule is None else "scores stored entries alone"
        raise UserError(
            "prefill: observers are for an eviction that observes tokens during prefill, such as snapkv, and "
            f"{host.name} {reason}"
        )


def check_continues(cache: Cache, model: Decoder, policy: CompiledPolicy, rows: list[np.ndarray]) -> None:
    """Refuse a cache that was not made for this model, policy and batch."""
    check_fits(cache, model, policy)
    seen = on_host(cache.seen)
    # a mesh adds empty sequences to the cache, and `share` empty prompts
    empty = any(row.size and not tokens for row, tokens in zip(rows, seen, strict=False))
    if empty or -(-len(rows) // batch_shards()) * batch_shards() != seen.size:
        raise UserError(
            f"the cache holds {np.count_nonzero(seen)} sequences, got {len(rows)} prompts: share=True asks several of "
            "each"
        )


def check_in_front(where: str, cache: Cache) -> None:
    """Refuse a cache in which an empty sequence comes before one with tokens. Forks that are unequally spread over a
    mesh's devices leave such a cache, and a caller could not tell its sequences apart by index."""
    seen = on_host(cache.seen) > 0
    if (np.diff(seen.astype(np.int8)) > 0).any():
        raise UserError(
            f"{where}: this cache holds forks that are unequally spread over the mesh's devices, and cannot be "
            "continued: ask as many questions of each context, or continue the contexts' own cache"
        )


def check_fits(cache: Cache, model: Decoder, policy: CompiledPolicy) -> None:
    """Refuse a cache that was not made for this model and policy."""
    config, (layers, _, heads) = model.config, cache.layers.length.shape
    made_for = (layers, heads, cache.pages.pool.shape[-1] // 2)
    wanted = (config.num_full_layers, config.num_kv_heads, config.head_dim)
    if made_for != wanted:
        raise UserError(f"the cache is for (layers, kv heads, head_dim) = {made_for}, the model has {wanted}")
    if cache.head_order != config.head_order:
        raise UserError(
            "the cache has its kv heads at other places than the model: a model and its copy in an LLM may differ in "
            "this; save the cache with the model that it was made with, and load it with the other"
        )
    windows = 0 if cache.sliding is None else cache.sliding.shape[0], cache.sliding_window
    if windows != (len(config.sliding_layers), config.sliding_window):
        raise UserError(
            f"the cache is for {windows[0]} layers with a sliding window of {windows[1]}, the model has "
            f"{len(config.sliding_layers)} of {config.sliding_window}"
        )
    cache_dtype, model_dtype = (np.dtype(x).name for x in (cache.pages.dtype, model.dtype))
    if cache_dtype != model_dtype:
        raise UserError(f"the cache has entries in {cache_dtype}, the model is in {model_dtype}")
    if cache.pages.int8 != config.int8_entries:
        cache_dtype = "int8" if cache.pages.int8 else cache_dtype
        raise UserError(
            f"the cache has entries in {cache_dtype}, the model is loaded with kv_cache_dtype {config.kv_cache_dtype}"
        )
    host, decoding = policy.host, policy.decode
    if cache.window != host.window:
        raise UserError(f"the cache has window {cache.window}, policy {host.name} has {host.window}")
    shape = Shape(cache.seen.shape[0], heads, config.num_heads // heads, config.head_dim, model.dtype)
    needed = decoding.memory_shapes(shape, layers)
    memories = cache.layers.state, cache.observations
    if decoding.eviction is None:
        memories = dataclasses.replace(cache.layers.state, eviction=()), ()
    shapes = [jax.tree.map(np.shape, memory) for memory in (memories, needed)]
    if shapes[0] != shapes[1] or not set(decoding.metadata) <= set(cache.pages.metadata):
        raise UserError(
            f"the cache was not made with policy {host.name}, which needs to know more of its tokens"
        )
    has_limit, needs_limit = (
        set(cache.pages.metadata) >= set(MAX_ENTRIES_METADATA),
        host.max_entries is not None,
    )
    if has_limit != needs_limit:
        made, needed = ("with", "none") if has_limit else ("without", "one")
        raise UserError(f"the cache was made {made} max_entries, policy {host.name} has {needed}")
    if host.selection is not None and cache.pages.bounds is None:
        raise UserError(
            f"policy {host.name} selects pages by bounds of their keys, and this cache has no bounds: make it with a "
            "policy that selects pages"
        )
