"""Exact selection of the best scores by counting: no sort, and few numbers between devices."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from kvjax.mesh import HEADS
from pallas_kernels.choose import target

OVER = "head", "layer", "model"
"""The entries that compete for the places: those of one kv head, of a layer's heads, or of all layers and heads."""
TIES = "first", "out", "in"
"""Rules for entries with the last place's score. "first": the first of them get the places that are left. "out": all of
them go, unless there is a place for every entry. "in": all of them stay."""

BITS = 8
"""Bits of the last place's score that a step finds on an accelerator, where a step costs more than comparing with all
of their values. On a CPU a step finds one."""


def top(
    scores: Float[Array, "l b k s"],
    eligible: Bool[Array, "l b k s"],
    count: Int[Array, "l b #k"],
    over: str,
    ties: str = "first",
    head_order: tuple[tuple[int, ...], ...] | None = None,
) -> Bool[Array, "l b k s"]:
    """Return a mask of the `count` best of the eligible entries. Of equal scores those of lower layers win, then those
    of lower heads, then the earlier ones.

    Call it inside `shard_map` over the mesh: heads on other devices compete, too. NaN is below every number.

    Args:
        count: places (int32): each head's own or the same for all of a layer with over="head"; where heads share them,
            those of a layer with "layer", of all layers with "model", their sum.
        ties: one of `TIES`, where heads share places; with over="head" each head fills exactly its places. With "out"
            and different scores, one entry less than `count` stays.
        head_order: the own heads at the places of all devices' heads (`ModelConfig.head_order`); None: as they are.
    """
    ties = "first" if over == "head" else ties
    axes = {"head": (3,), "layer": (2, 3), "model": (0, 2, 3)}[over]
    wide = count[..., None]
    if over != "head":
        wide = (wide * (scores.shape[2] // wide.shape[2])).sum(2, keepdims=True)
        wide = lax.psum(wide, HEADS)
    if over == "model":
        wide = wide.sum(0, keepdims=True)

    def count_of(mask):
        found = mask.sum(axes, dtype=jnp.int32, keepdims=True)
        return found if over == "head" else lax.psum(found, HEADS)

    rank = jnp.where(eligible, _ordered(scores), jnp.uint32(0))

    bits = 1 if target().platform == "cpu" else BITS
    digits = jnp.arange(1, 1 << bits, dtype=jnp.uint32)

    def with_digit(i, floor):
        shift = jnp.uint32(32 - bits) - jnp.uint32(bits) * jnp.asarray(i, jnp.uint32)
        enough = jax.vmap(lambda digit: count_of(rank >= floor | (digit << shift)) >= wide)(digits)
        return floor | (enough.sum(0, dtype=jnp.uint32) << shift)

    start = jnp.zeros_like(count_of(eligible), jnp.uint32)
    floor = lax.fori_loop(0, 32 // bits, with_digit, start, unroll=bits == BITS)
    above, equal = rank > floor, eligible & (rank == floor)
    if ties == "in":
        return above | equal
    if ties == "out":
        return jnp.where(count_of(eligible) <= wide, eligible, above)
    left = wide - count_of(above)
    return above | (equal & (_before(equal, over, head_order) < left))


def _ordered(x: Float[Array, "..."]) -> UInt32[Array, "..."]:
    """Return unsigned numbers above 0 in the order of floats. The two zeros are one number, and NaN comes first."""
    x = jnp.where(x == 0, 0, x.astype(jnp.float32))
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    ordered = jnp.where(bits >> 31, ~bits, bits | jnp.uint32(1 << 31))
    return jnp.where(jnp.isnan(x), jnp.uint32(1), jnp.maximum(ordered, 2))


def _before(
    equal: Bool[Array, "l b k s"], over: str, head_order: tuple[tuple[int, ...], ...] | None
) -> Int[Array, "l b k s"]:
    """Return the number of competing entries before each entry: earlier in its head cache, in lower heads and in lower
    layers."""
    within = jnp.cumsum(equal, -1, dtype=jnp.int32) - equal
    if over == "head":
        return within
    rows = equal.sum(-1, dtype=jnp.int32)
    # rows of the heads on all devices, in the order of heads
    everywhere = lax.all_gather(rows, HEADS, axis=2, tiled=True)
    if head_order is not None:
        everywhere = jnp.take_along_axis(everywhere, jnp.argsort(jnp.array(head_order))[:, None], 2)
    if over == "layer":
        before = jnp.cumsum(everywhere, 2) - everywhere
    else:
        flat = jnp.moveaxis(everywhere, 1, 0).reshape(everywhere.shape[1], -1)
        before = jnp.cumsum(flat, -1) - flat
        before = jnp.moveaxis(before.reshape(-1, equal.shape[0], everywhere.shape[2]), 0, 1)
    if head_order is not None:
        before = jnp.take_along_axis(before, jnp.array(head_order)[:, None], 2)
    own = lax.axis_index(HEADS) * equal.shape[2]
    return within + lax.dynamic_slice_in_dim(before, own, equal.shape[2], 2)[..., None]
