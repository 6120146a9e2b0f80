"""The score loss: it compares a token that leaves the window with the retained one that it would displace."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.running_topk import running_topk
from pallas_kernels.running_topk.api import ranks


class Pairs(NamedTuple):
    """The boundary of every token: the retained token that it would displace when it leaves the window."""

    boundary: Int[Array, "b k t"]
    """The index of the boundary."""
    valid: Bool[Array, "b k t"]
    """True if there is a boundary: the token competes, it leaves the window within the sequence, and all places are
    taken by then."""


def boundary_pairs(
    target: Float[Array, "b k t"], competes: Bool[Array, "b k t"], max_entries: Int[Array, ""], window: int
) -> Pairs:
    """Pair each token with its boundary: among the `max_entries` best tokens that left the window before it, the one
    with the lowest target.

    In KVPOP's eq. 2 (Sec. 3.4) the token itself may be its boundary. The same tokens are kept either way. Here a kept
    token is paired with the one that it displaces, never with itself.

    Args:
        target: the value of each token. The order of the values is the same for all queries.
        competes: False for the sinks, which are always retained.
        max_entries: the number of competing tokens that are retained.
    """
    tokens = target.shape[-1]
    rank = ranks(target)
    # tau is the k-th best of the tokens that have left at each query. Token j leaves at query j + window, so at query
    # j + window − 1 only the tokens before it have left
    tau, _ = running_topk(rank, k=max_entries, window=window, competes=competes)
    index = jnp.arange(tokens)
    last = jnp.broadcast_to(tau[..., -1:], (*tau.shape[:-1], min(window - 1, tokens)))
    before = jnp.concatenate([tau[..., window - 1 :], last], -1)
    order = jnp.argsort(rank, axis=-1)
    boundary = jnp.take_along_axis(order, jnp.clip(before, 0, tokens - 1), -1)
    valid = competes & (index + window < tokens) & (before >= 0) & (before < tokens)
    return Pairs(boundary, valid)


def boundary_loss(
    score: Float[Array, "b k t"],
    target: Float[Array, "b k t"],
    competes: Bool[Array, "b k t"],
    max_entries: Int[Array, ""],
    *,
    window: int,
    temperature: float = 1.0,
) -> dict[str, Float[Array, "b k"]]:
    """Return the loss and figures of the pairs of a token and its boundary (KVPOP, Sec. 3.4 and App. D).

    `score_loss` is the mean logistic loss over the valid pairs, each weighted by the distance of its targets, at most
    1. `agreement` is the share of them that the scores order as the targets do. `pairs` is their number. Only `score`
    has a gradient.
    """
    score, target, competes = (x[:, :, None, None] for x in (score, jax.lax.stop_gradient(target), competes))

    def head(row: tuple[Array, Array, Array]) -> dict[str, Array]:
        return _head_loss(*row, max_entries, window, temperature)

    # one head at a time: libtpu 0.0.42 fails for v5p on the gathers of eight rows of 8,192 tokens
    rows = tuple(x.reshape(-1, *x.shape[2:]) for x in (score, target, competes))
    return {name: x.reshape(score.shape[:2]) for name, x in jax.lax.map(head, rows).items()}


def _head_loss(
    score: Array, target: Array, competes: Array, max_entries: Array, window: int, temperature: float
) -> dict[str, Array]:
    pairs = boundary_pairs(target, competes, max_entries, window)

    def gap(x: Float[Array, "b k t"]) -> Float[Array, "b k t"]:
        x = jnp.where(competes, x, 0)
        return x - jnp.take_along_axis(x, pairs.boundary, -1)

    # an infinite gap would make the gradient of an invalid pair NaN
    target_gap, score_gap = (jnp.where(pairs.valid, gap(x), 0) for x in (target, score))
    losses = jax.nn.softplus(-jnp.sign(target_gap) * score_gap / temperature) * jnp.minimum(
        1, jnp.abs(target_gap)
    )
    count = pairs.valid.sum(-1)

    def mean(x: Float[Array, "b k t"]) -> Float[Array, "b k"]:
        return jnp.where(pairs.valid, x, 0).sum(-1) / jnp.maximum(count, 1)

    agreeing = (jnp.sign(target_gap) == jnp.sign(score_gap)).astype(jnp.float32)
    return {"score_loss": mean(losses), "agreement": mean(agreeing), "pairs": count.astype(jnp.float32)}
