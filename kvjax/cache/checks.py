"""Checks of a cache: numbers that are not finite, a pool that ran out, arrays that are gone.

Devices record the first two in the pool's free count, which the host reads.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.pages import Cache, Pages
from kvjax.cache.sizes import CapacityError
from kvjax.errors import UserError
from kvjax.mesh import BATCH, SHARDS, P, on_host

NOT_FINITE = -(2**30)
"""The free count of a shard that computed a number that is not finite. It is far below any debt. Like a debt it stays,
and no pages are freed from then on."""
SLACK = 1.05
"""The factor by which the capacity that an error names exceeds the pages that were needed."""


def if_finite(pages: Pages, finite: Bool[Array, "..."]) -> Pages:
    """Return the pages of one shard, with the free count `NOT_FINITE` unless `finite` is True everywhere."""
    return dataclasses.replace(pages, free_count=jnp.where(finite.all(), pages.free_count, NOT_FINITE))


def check_finite(cache: Cache, x: Float[Array, "b t d"], real: Bool[Array, "b t"]) -> Cache:
    """Return the cache, with the free count `NOT_FINITE` if one of the `real` vectors of `x` is not finite. Jit it."""

    def local(count, finite):
        return jnp.where(finite.all(), count, NOT_FINITE)

    finite = jax.sharding.reshard(jnp.isfinite(x).all(-1), P(BATCH, None)) | ~real
    count = jax.shard_map(local, out_specs=P(SHARDS))(cache.pages.free_count, finite)
    return dataclasses.replace(cache, pages=dataclasses.replace(cache.pages, free_count=count))


def free_counts(cache: Cache) -> Int[np.ndarray, " shards"]:
    """Return the free pages of each shard; a negative count is a debt. Waits for the device.

    Raises:
        UserError: a number that was computed from the cache's tokens was not finite.
    """
    count = on_host(cache.pages.free_count)
    if (count < NOT_FINITE // 2).any():
        raise not_finite(cache.pages.dtype)
    return count


def not_finite(dtype: Any) -> UserError:
    """Return the error for a model in `dtype` that computed NaN or inf."""
    name = np.dtype(dtype).name
    if name == "float16":
        return UserError(
            "the model's activations are not finite (NaN or inf) in float16: load it with dtype='bfloat16' or 'float32'"
        )
    return UserError(
        f"the model's activations or the policy's scores are not finite (NaN or inf) in {name}: the weights of the "
        "model, its gates or its scorers are damaged"
    )


def check_alive(where: str, cache: Cache) -> None:
    """Refuse a cache whose arrays were donated to a later call."""
    if any(getattr(leaf, "is_deleted", bool)() for leaf in jax.tree.leaves(cache)):
        raise UserError(
            f"{where}: the cache was donated to a later step and is gone: expected the last one that stream yielded"
        )


def check(cache: Cache, policy: str, new_tokens: int = 0) -> None:
    """Raise CapacityError if the pool ever ran out, UserError if a number was not finite. Waits for the device.

    Args:
        policy: the policy's name, for the error.
        new_tokens: further tokens of each sequence that the capacity in the error must be enough for.
    """
    count = free_counts(cache)
    if (count >= 0).all():
        return
    pool = cache.pages.pool
    pool_pages = pool.shape[0] // len(count)
    need = pool_pages - int(count.min())
    layers, batch, heads = cache.layers.length.shape
    head_caches = layers * batch * heads // len(count)
    # tokens without a page were not stored, so the next layers may have admitted other tokens
    pages = math.ceil(need * SLACK) + head_caches * -(-new_tokens // cache.page_size)
    raise CapacityError(
        f"policy {policy} needs at least {need} pages of {cache.page_size} tokens on a device for what was read, "
        f"the pool has {pool_pages} ({pool.nbytes / 2**20:.1f} MiB in all): give a capacity of "
        f"{-(-pages * cache.page_size // head_caches)} entries per kv head, which is enough for {new_tokens} more "
        "tokens too"
    )
