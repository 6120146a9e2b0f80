"""Placement of KV heads on devices, so that all devices hold about as many entries of a ragged cache.

A mesh splits the KV heads of every layer in their order. Heads that keep many entries may then be on one device, and
every device's pool is as large as the fullest one's. Here groups (a KV head with its query heads) change places within
their layers, once the weights are loaded. Users still see the model's order in policies, statistics, saved caches,
exports and fingerprints.

Placement balances memory over all layers. It does not balance the time that devices wait for each other within a layer.
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
"""The smallest share of the fullest device's entries that a placement must save."""


def with_placed_heads(model: Decoder, policy: Policy) -> Decoder:
    """Return the model with its KV heads placed so that devices hold about as many entries each, by the policy's
    expectation for a sequence as long as the model's context. The model's arrays are donated. The model is returned
    unchanged if nothing is gained, or if blocks of 8-bit weights are larger than a head's group."""
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
    """Return an order of each layer's heads with which all devices hold about as many entries; None if it saves less
    than `GAIN`. All devices have the same number of heads in every layer. The first device has the first ones.

    entries: the number of entries that each head is expected to hold.
    """
    layers, heads = entries.shape
    held, order = np.zeros(devices), np.zeros((layers, heads), int)
    # layers with the largest differences first, so that the others can balance the rest
    for layer in np.argsort(-np.ptp(entries, axis=1), kind="stable"):
        heads_of_device: list[list[int]] = [[] for _ in range(devices)]
        for head in np.argsort(-entries[layer], kind="stable").tolist():
            free = [device for device in range(devices) if len(heads_of_device[device]) < heads // devices]
            device = min(free, key=held.__getitem__)
            held[device] += entries[layer, head]
            heads_of_device[device].append(head)
        order[layer] = np.concatenate([sorted(of_device) for of_device in heads_of_device])
    before = entries.reshape(layers, devices, -1).sum((0, 2)).max()
    return None if held.max() > (1 - GAIN) * before else tuple(map(tuple, order.tolist()))


def placed(model: Decoder, order: tuple[tuple[int, ...], ...]) -> Decoder:
    """Return the model with its KV heads in this order (`ModelConfig.head_order`), on the current mesh. The model's
    arrays are donated."""
    config = model.config

    def place(keys, x):
        path = jax.tree_util.keystr(keys, simple=True, separator=".").removesuffix(".value")
        return reorder_heads(path, x, config, np.array(order), consume=True)

    layers = jax.tree_util.tree_map_with_path(place, model.layers)
    copy = jax.tree.map(lambda x: x, model)
    copy.layers = layers
    like = model_shapes(dataclasses.replace(config, head_order=order), model.dtype)
    return jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(copy))
