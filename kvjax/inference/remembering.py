"""What an eviction remembers of the last tokens: taken layer by layer, written for all of them at once."""

import jax
from jaxtyping import Array, Int

from kvjax.cache import Cache
from kvjax.cache.trail import newest, written
from kvjax.mesh import BATCH, HEADS, P, gather
from kvjax.policies.compiled import View
from kvjax.policies.interfaces import Trail
from kvjax.policies.views import Step


def traces(view: View, step: Step, trail: Trail, valid: Int[Array, " b"]) -> Trail:
    """What of one layer's tokens is to be written to the cache's `trail`. Raises ValueError for an eviction whose trace
    is of another form than its trail."""
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
    """The cache's trail with the `traces` of a call, a leading axis for the layers."""
    if not jax.tree.leaves(new):
        return cache.trail

    def local(trail, new, seen, valid):
        return jax.tree.map(lambda ring, x: written(ring, x, seen, valid), trail, new)

    specs = jax.tree.map(lambda ring: jax.typeof(ring).sharding.spec, cache.trail)
    return jax.shard_map(local, out_specs=specs)(cache.trail, new, cache.seen, valid)
