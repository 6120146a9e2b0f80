"""The score loss: whether a token that leaves the window is worth more than the one whose place it would take."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.running_topk import running_topk
from pallas_kernels.running_topk.api import ranks


class Pairs(NamedTuple):
    """For every token, in order, the one whose place it would take when it leaves the window."""

    boundary: Int[Array, "b k t"]
    """Its index."""
    valid: Bool[Array, "b k t"]
    """Whether there is one: the token competes, leaves within the sequence, and all places are taken by then."""


def boundary_pairs(
    target: Float[Array, "b k t"], competes: Bool[Array, "b k t"], max_entries: Int[Array, ""], window: int
) -> Pairs:
    """Return, by the target, the lowest of the `max_entries` best that have left the window before a token does.

    KVPOP's eq. 2 (Sec. 3.4) takes the boundary among those eligible once the token has left, itself included. Whether
    the token is kept is the same. One that is kept is paired here with the one that it displaces, never with itself.

    Args:
        target: what each token is worth, in an order that no query changes.
        competes: not the sinks, which always stay.
        max_entries: how many of those that compete stay.
    """
    tokens = target.shape[-1]
    rank = ranks(target)
    # the best k of all that left so far, at each query; token j leaves at query j + window, so those before it are what
    # query j + window − 1 sees
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
    """`score_loss`, the logistic loss of each pair of a token and its boundary, weighted by how far apart their targets
    are, at most 1, over the pairs that there are (KVPOP, Sec. 3.4 and App. D); `agreement`, the share of them that the
    scores order as the target does; and `pairs`, how many there are. Only `score` has a gradient."""
    score, target, competes = (x[:, :, None, None] for x in (score, jax.lax.stop_gradient(target), competes))

    def head(row: tuple[Array, Array, Array]) -> dict[str, Array]:
        return _of_a_head(*row, max_entries, window, temperature)

    # one after another: libtpu 0.0.42 fails for v5p on the gathers of eight rows of 8,192 tokens
    rows = tuple(x.reshape(-1, *x.shape[2:]) for x in (score, target, competes))
    return {name: x.reshape(score.shape[:2]) for name, x in jax.lax.map(head, rows).items()}


def _of_a_head(
    score: Array, target: Array, competes: Array, max_entries: Array, window: int, temperature: float
) -> dict[str, Array]:
    pairs = boundary_pairs(target, competes, max_entries, window)

    def apart(x: Float[Array, "b k t"]) -> Float[Array, "b k t"]:
        x = jnp.where(competes, x, 0)
        return x - jnp.take_along_axis(x, pairs.boundary, -1)

    wanted, found = apart(target), apart(score)
    errors = jax.nn.softplus(-jnp.sign(wanted) * found / temperature) * jnp.minimum(1, jnp.abs(wanted))
    count = pairs.valid.sum(-1)
    mean = lambda x: jnp.where(pairs.valid, x, 0).sum(-1) / jnp.maximum(count, 1)  # noqa: E731
    agreeing = (jnp.sign(wanted) == jnp.sign(found)).astype(jnp.float32)
    return {"score_loss": mean(errors), "agreement": mean(agreeing), "pairs": count.astype(jnp.float32)}
