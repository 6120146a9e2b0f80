"""kvjax's own attention: what is stored and what is new, merged."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.inference.attention import cached_attention
from kvjax.inference.room import empty_cache
from kvjax.mesh import BATCH, P, make_mesh, put
from kvjax.policies import make_policy
from kvjax.step import Step

HEADS = P(BATCH, "tensor", None, None)


def step_of(values):
    """Tokens that pay all they see the same attention, with one number as value, in bfloat16."""
    t = len(values)
    zeros = put(np.zeros((1, 1, t, 8), np.float32).astype(jnp.bfloat16), *HEADS)
    v = np.broadcast_to(np.reshape(values, (t, 1)), (1, 1, t, 8)).astype(jnp.bfloat16)
    return Step(
        hidden=put(np.zeros((1, t, 8), np.float32), BATCH, None, None), q=zeros, k=zeros, q_pre=zeros, k_pre=zeros,
        v=put(v, *HEADS), position=put(np.arange(t, dtype=np.int32)[None], BATCH, None), layer=jnp.int32(0),
        head=put(np.zeros(1, np.int32), "tensor"),
    )  # fmt: skip


def test_what_is_stored_and_what_is_new_are_rounded_once():
    """Two stored values of 1, five new ones of mean 1 + 1.2/256: in all 1 + 0.86/256, which is 1 in bfloat16. Were the
    new ones rounded by themselves, to 1 + 2/256, it would be 1 + 1.43/256, and so 1 + 2/256."""
    with jax.set_mesh(make_mesh(devices=jax.devices()[:1])):
        policy = make_policy("full")
        sizes = {"batch": 1, "layers": 1, "kv_heads": 1, "head_dim": 8, "tokens": 16}
        cache = empty_cache(policy, **sizes, dtype=jnp.bfloat16)
        pages, layer = cache.pages, jax.tree.map(lambda x: x[0], cache.layers)
        attend = jax.jit(functools.partial(cached_attention, policy, implementation="xla"))
        two, five = (jnp.full_like(cache.seen, n) for n in (2, 5))
        _, pages, layer = attend(step_of([1] * 5), pages, layer, seen=cache.seen, valid=two)
        o, _, _ = attend(step_of([1 + 2 / 256] * 3 + [1] * 2), pages, layer, seen=two, valid=five)
    assert o.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(o, np.float32)[0, 0, -1], 1)
