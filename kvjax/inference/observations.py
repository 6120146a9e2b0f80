"""Memory of methods: the observation buffer of the last tokens, taken layer by layer and written for all layers at
once, and state that is dropped when no compaction will need it any more."""

import dataclasses

import jax
from jaxtyping import Array, Int

from kvjax.cache import MAX_ENTRIES_PLANES, Cache
from kvjax.cache.trail import newest, written
from kvjax.mesh import BATCH, HEADS, P, gather
from kvjax.policies.compiled import View
from kvjax.policies.interfaces import BIAS, Trail
from kvjax.policies.views import Step


def traces(view: View, step: Step, trail: Trail, valid: Int[Array, " b"]) -> Trail:
    """Return what one layer's tokens add to the cache's observation buffer, `trail`. Raises ValueError for an
    eviction whose trace is of another form than its trail."""
    if view.eviction is None:
        return ()

    def local(eviction, step, valid):
        found = eviction.trace(step)
        if jax.tree.structure(found) != jax.tree.structure(trail):
            raise ValueError(f"{eviction.label}: its trace is another pytree than its trail")
        return jax.tree.map(lambda x, slots: newest(x, slots, valid).astype(step.k.dtype), found, slots)

    slots = jax.tree.map(lambda ring: ring.shape[1], trail)
    specs = jax.tree.map(lambda ring: P(BATCH, HEADS) if ring.ndim == 5 else P(BATCH), trail)
    return jax.shard_map(local, out_specs=specs)(gather(view.eviction, "data", "fsdp"), step, valid)


def remembered(cache: Cache, new: Trail, valid: Int[Array, " b"]) -> Trail:
    """Return the cache's observation buffer with the `traces` of a call, which have a leading layer axis."""
    if not jax.tree.leaves(new):
        return cache.trail

    def local(trail, new, seen, valid):
        return jax.tree.map(lambda ring, x: written(ring, x, seen, valid), trail, new)

    specs = jax.tree.map(lambda ring: jax.typeof(ring).sharding.spec, cache.trail)
    return jax.shard_map(local, out_specs=specs)(cache.trail, new, cache.seen, valid)


def drop_observation_state(cache: Cache, later: View) -> Cache:
    """Return the cache (donated) without the memories and entry metadata of methods that `later`, which goes on with
    it, does not have. They would miss the tokens to come, and a method that had them again could not tell. Policies
    that only differ in an eviction whose work is done then run one program."""
    lasting = {*later.planes, *MAX_ENTRIES_PLANES, BIAS}
    numbers, planes = (
        {name: plane for name, plane in x.items() if name in lasting}
        for x in (cache.layers.numbers, cache.pages.planes)
    )
    layers, pages = cache.layers, dataclasses.replace(cache.pages, planes=planes)
    layers = dataclasses.replace(layers, numbers=numbers)
    if later.eviction is not None:
        return dataclasses.replace(cache, pages=pages, layers=layers)
    layers = dataclasses.replace(layers, state=dataclasses.replace(layers.state, eviction=()))
    return dataclasses.replace(cache, pages=pages, layers=layers, trail=())
