"""The matrix products of a traced program, by hand."""

import jax
import jax.numpy as jnp
import pytest

from kvjax.mesh import P, make_mesh
from kvjax.plan.products import flops

ONE = 2 * 8 * 16 * 32
"""Of [8, 16] · [16, 32]."""


def looped(x, w):
    return jax.lax.scan(lambda carry, _: (carry, x @ w), 0.0, None, length=5)[1]


def branched(x, w):
    return jax.lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: jnp.zeros((8, 32)))


def recomputed(x, w):
    """Forwards, forwards once more, and two products backwards."""
    layer = jax.checkpoint(lambda x, w: jnp.sin(jnp.sin(x @ w)))
    return jax.grad(lambda x, w: layer(x, w).sum(), (0, 1))(x, w)


CASES = {
    "once": (lambda x, w: x @ w, 1),
    "looped": (looped, 5),
    "branched": (branched, 1),
    "recomputed": (recomputed, 4),
}


@pytest.mark.parametrize("name", CASES)
def test_each_product_counts_as_often_as_it_is_made(name):
    program, times = CASES[name]
    x, w = jnp.ones((8, 16)), jnp.ones((16, 32))
    assert flops(jax.make_jaxpr(program)(x, w).jaxpr) == times * ONE


def test_a_device_makes_its_part():
    """Rows over two devices and columns over two; and the same within a `shard_map`."""
    with jax.set_mesh(make_mesh(fsdp=2, tensor=2)):
        x, w = (
            jax.device_put(jnp.ones((8, 16)), P("fsdp")),
            jax.device_put(jnp.ones((16, 32)), P(None, "tensor")),
        )
        outer = jax.make_jaxpr(lambda x, w: jnp.einsum("ab,bc->ac", x, w, out_sharding=P("fsdp", "tensor")))(
            x, w
        )
        inner = jax.make_jaxpr(jax.shard_map(lambda x, w: x @ w, out_specs=P("fsdp", "tensor")))(x, w)
    assert flops(outer.jaxpr) == flops(inner.jaxpr) == ONE / 4
