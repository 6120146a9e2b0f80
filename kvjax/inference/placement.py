"""Placing of KV heads: which device has which, so that all hold about as much of a ragged cache.

A mesh splits the KV heads of every layer in their order. Those that keep much may then be on one device, and the pool
of every device is as large as the fullest one's. Here whole groups (a KV head with its query heads) change places
within their layers, once the weights are loaded. What a user sees keeps the model's own order: policies, statistics,
saved caches, exports and fingerprints.

Placing evens memory over all layers. It does not even the time that devices wait for each other within one.
"""

import dataclasses

import jax
import numpy as np
from jaxtyping import Float

from kvjax.inference.allocation import token_bytes
from kvjax.mesh import HEADS, axis_size, use_mesh
from kvjax.models.decoder import Decoder
from kvjax.models.layout import reorder_heads
from kvjax.models.loading import model_shapes
from kvjax.policies.policy import Policy

GAIN = 0.01
"""The least share of the fullest device's entries that a placing must save."""


def with_placed_heads(model: Decoder, policy: Policy) -> Decoder:
    """Return the model with its KV heads placed so that the devices that split them hold about as many entries each, by
    what the policy expects of a sequence as long as the model's context. The model's arrays are taken over. If nothing
    is gained, or blocks of 8-bit weights are larger than a head's group, the model is returned as it is."""
    config = model.config
    group = config.num_heads // config.num_kv_heads * config.head_dim
    with use_mesh(model):
        if (devices := axis_size(*HEADS)) == 1 or not config.num_full_layers:
            return model
        if config.weight_block and group % config.weight_block:
            return model
        expected = policy.expected_entries(config.longest, token_bytes(config, model.dtype))
        order = even_order(np.broadcast_to(expected, config.head_at_place.shape), devices)
        return model if order is None else placed(model, order)


def even_order(entries: Float[np.ndarray, "l k"], devices: int) -> tuple[tuple[int, ...], ...] | None:
    """Return an order of each layer's heads by which all devices hold about as many entries. A device has the same
    number of heads in every layer: the first device has the first of the order. The result is None if that saves less
    than `GAIN`.

    entries: the number of entries that each head is expected to hold.
    """
    layers, heads = entries.shape
    held, order = np.zeros(devices), np.zeros((layers, heads), int)
    # layers with the largest differences first, so that the others even out what is left
    for layer in np.argsort(-np.ptp(entries, axis=1), kind="stable"):
        own: list[list[int]] = [[] for _ in range(devices)]
        for head in np.argsort(-entries[layer], kind="stable").tolist():
            free = [device for device in range(devices) if len(own[device]) < heads // devices]
            device = min(free, key=held.__getitem__)
            held[device] += entries[layer, head]
            own[device].append(head)
        order[layer] = np.concatenate([sorted(some) for some in own])
    before = entries.reshape(layers, devices, -1).sum((0, 2)).max()
    return None if held.max() > (1 - GAIN) * before else tuple(map(tuple, order.tolist()))


def placed(model: Decoder, order: tuple[tuple[int, ...], ...]) -> Decoder:
    """Return the model with its KV heads in this order (`ModelConfig.head_order`), on the current mesh. The model's
    arrays are taken over."""
    config = model.config

    def place(keys, x):
        path = jax.tree_util.keystr(keys, simple=True, separator=".").removesuffix(".value")
        return reorder_heads(path, x, config, np.array(order), consume=True)

    layers = jax.tree_util.tree_map_with_path(place, model.layers)
    own = jax.tree.map(lambda x: x, model)
    own.layers = layers
    like = model_shapes(dataclasses.replace(config, head_order=order), model.dtype)
    return jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(own))
