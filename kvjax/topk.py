"""Exact selection of the best scores by counting, without sorting and with little communication between devices."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from kvjax.mesh import HEADS
from pallas_kernels.choose import target

OVER = "head", "layer", "model"
"""The entries that compete with each other: those of a kv head, of all heads of a layer, or of the whole model."""
TIES = "first", "out", "in"
"""Rules for entries whose score equals the lowest selected score. "first": the first of them are selected. "out": none
of them is selected, unless all entries are. "in": all of them are selected."""

BITS = 8
"""Bits of the lowest selected score that a step determines on an accelerator, where a step costs more than comparing
scores with every value of these bits. On a CPU a step determines one bit."""


def top(
    scores: Float[Array, "l b k s"],
    eligible: Bool[Array, "l b k s"],
    count: Int[Array, "l b #k"],
    over: str,
    ties: str = "first",
    head_order: tuple[tuple[int, ...], ...] | None = None,
) -> Bool[Array, "l b k s"]:
    """Return a mask of the `count` best eligible entries. Among equal scores, entries of lower layers come first, then
    those of lower heads, then earlier ones.

    Call it inside `shard_map` over the mesh, since heads on other devices also compete. NaN is below every number.

    Args:
        count: the number of entries to select (int32), for each head or for all heads of a layer alike. With
            over="layer" the sum over a layer's heads is selected, with over="model" the sum over all layers and heads.
        ties: one of `TIES`; with over="head" it is always "first". With "out" and different scores, `count` − 1
            entries are selected.
        head_order: `ModelConfig.head_order`, if heads on devices are in another order than in the model's files.
    """
    ties = "first" if over == "head" else ties
    axes = {"head": (3,), "layer": (2, 3), "model": (0, 2, 3)}[over]
    total = count[..., None]
    if over != "head":
        total = (total * (scores.shape[2] // total.shape[2])).sum(2, keepdims=True)
        total = lax.psum(total, HEADS)
    if over == "model":
        total = total.sum(0, keepdims=True)

    def count_of(mask):
        local = mask.sum(axes, dtype=jnp.int32, keepdims=True)
        return local if over == "head" else lax.psum(local, HEADS)

    rank = jnp.where(eligible, _ordered(scores), jnp.uint32(0))

    bits = 1 if target().platform == "cpu" else BITS
    digits = jnp.arange(1, 1 << bits, dtype=jnp.uint32)

    def with_digit(i, floor):
        shift = jnp.uint32(32 - bits) - jnp.uint32(bits) * jnp.asarray(i, jnp.uint32)
        enough = jax.vmap(lambda digit: count_of(rank >= floor | (digit << shift)) >= total)(digits)
        return floor | (enough.sum(0, dtype=jnp.uint32) << shift)

    start = jnp.zeros_like(count_of(eligible), jnp.uint32)
    floor = lax.fori_loop(0, 32 // bits, with_digit, start, unroll=bits == BITS)
    above, equal = rank > floor, eligible & (rank == floor)
    if ties == "in":
        return above | equal
    if ties == "out":
        return jnp.where(count_of(eligible) <= total, eligible, above)
    remaining = total - count_of(above)
    return above | (equal & (_count_before(equal, over, head_order) < remaining))


def _ordered(x: Float[Array, "..."]) -> UInt32[Array, "..."]:
    """Map floats to positive unsigned integers in the same order. The two zeros are equal, and NaN comes first."""
    x = jnp.where(x == 0, 0, x.astype(jnp.float32))
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    ordered = jnp.where(bits >> 31, ~bits, bits | jnp.uint32(1 << 31))
    return jnp.where(jnp.isnan(x), jnp.uint32(1), jnp.maximum(ordered, 2))


def _count_before(
    equal: Bool[Array, "l b k s"], over: str, head_order: tuple[tuple[int, ...], ...] | None
) -> Int[Array, "l b k s"]:
    """Return the number of `equal` entries that come before each entry among its competitors: earlier in its head, in
    lower heads and in lower layers."""
    within = jnp.cumsum(equal, -1, dtype=jnp.int32) - equal
    if over == "head":
        return within
    by_head = equal.sum(-1, dtype=jnp.int32)
    # counts of the heads on all devices, in the order of heads
    everywhere = lax.all_gather(by_head, HEADS, axis=2, tiled=True)
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
    first_head = lax.axis_index(HEADS) * equal.shape[2]
    return within + lax.dynamic_slice_in_dim(before, first_head, equal.shape[2], 2)[..., None]
