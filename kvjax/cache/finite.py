"""Numbers that are not finite: marked on the devices in the pool's free count, found by the host when it reads that."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.pages import Cache, Pages
from kvjax.errors import UserError
from kvjax.mesh import BATCH, SHARDS, P

NOT_FINITE = -(2**30)
"""Free count of a shard in which something was not finite: far below any debt. Like a debt it stays, and nothing is
compacted under it."""


def if_finite(pages: Pages, finite: Bool[Array, "..."]) -> Pages:
    """The pages of one shard, whose free count is `NOT_FINITE` unless all is `finite`."""
    return dataclasses.replace(pages, free_count=jnp.where(finite.all(), pages.free_count, NOT_FINITE))


def check_finite(cache: Cache, x: Float[Array, "b t d"], real: Bool[Array, "b t"]) -> Cache:
    """The cache, whose free count is `NOT_FINITE` if one of the `real` vectors of `x` is not finite. To be jitted."""

    def local(count, finite):
        return jnp.where(finite.all(), count, NOT_FINITE)

    finite = jax.sharding.reshard(jnp.isfinite(x).all(-1), P(BATCH, None)) | ~real
    count = jax.shard_map(local, out_specs=P(SHARDS))(cache.pages.free_count, finite)
    return dataclasses.replace(cache, pages=dataclasses.replace(cache.pages, free_count=count))


def free_counts(cache: Cache) -> Int[np.ndarray, " shards"]:
    """Free pages of each shard; a negative count is a debt. Waits for the device.

    Raises:
        UserError: something that was computed of the cache's tokens was not finite.
    """
    count = np.asarray(cache.pages.free_count)
    if (count < NOT_FINITE // 2).any():
        raise not_finite(cache.pages.dtype)
    return count


def not_finite(dtype: Any) -> UserError:
    """The error for a model in `dtype` that computed NaN or inf."""
    name = np.dtype(dtype).name
    if name == "float16":
        return UserError(
            "the model's activations are not finite (NaN or inf) in float16: load it with dtype='bfloat16' or 'float32'"
        )
    return UserError(
        f"the model's activations or the policy's scores are not finite (NaN or inf) in {name}: the weights of the "
        "model, its gates or its scorers are damaged"
    )
