"""Steps of random content, and stored keys."""

import jax.numpy as jnp
import numpy as np

from kvjax.policies.views import Shape, Step, Stored


def step(positions, layer=0, heads=4, seed=0):
    """Return a step whose content is random, at the given positions."""
    rng = np.random.default_rng(seed)
    positions = jnp.asarray(positions, jnp.int32)
    b, t = positions.shape
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    return Step(
        hidden=draw(b, t, 32), q=draw(b, 2 * heads, t, 8), q_pre=draw(b, 2 * heads, t, 8),
        k=draw(b, heads, t, 8), k_pre=draw(b, heads, t, 8),
        v=draw(b, heads, t, 8), position=positions, layer=jnp.int32(layer), head=jnp.arange(heads),
        token=jnp.asarray(rng.integers(0, 61, (b, t)), jnp.int32),
    )  # fmt: skip


def shape_of(step: Step) -> Shape:
    """Return the shape of one device's part of a step."""
    batch, heads, _, head_dim = step.k.shape
    return Shape(batch, heads, step.q.shape[1] // heads, head_dim, step.k.dtype)


def from_start(step):
    """Return a method's arguments `seen` and `valid` for sequences that begin with this step."""
    b, t = step.position.shape
    return jnp.zeros(b, jnp.int32), jnp.full(b, t, jnp.int32)


def stored(k, frequencies, seen, *, scale=1.0, forced=None):
    """Return the view of a layer that stores exactly these keys [k s h], with two query heads for each kv head."""
    k = jnp.asarray(k, jnp.float32)[None]
    every = jnp.ones(k.shape[:3], bool)
    forced = ~every if forced is None else jnp.asarray(forced)[None]
    return Stored(
        k=k, v=k, place=jnp.broadcast_to(jnp.arange(k.shape[2]), every.shape), scored=every, eligible=every,
        forced=forced, count=jnp.ones((1, 1), jnp.int32), seen=jnp.array([seen]),
        output=jnp.zeros((2 * k.shape[1], k.shape[3], 4)), frequencies=jnp.asarray(frequencies, jnp.float32),
        rope_scale=jnp.float32(scale), layer=jnp.int32(0), head=jnp.arange(k.shape[1]), metadata={}, observations=(),
        causal=True,
    )  # fmt: skip
