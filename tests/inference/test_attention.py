"""Tests of kvjax's own attention, which merges stored and new entries without a collective."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.inference.allocation import empty_cache
from kvjax.inference.attention import cached_attention, masked_attention
from kvjax.mesh import BATCH, HEADS, P, make_mesh, put
from kvjax.policies import make_policy
from kvjax.policies.base import Mask
from kvjax.policies.compiled import compile_policy
from kvjax.policies.views import Step
from kvjax.struct import struct
from pallas_kernels.vertical_slash import ends, vertical_slash
from tests.tiny_models import policies_for, tiny_model

SPLIT = P(BATCH, HEADS, None, None)


def step_of(values):
    """Return a step whose tokens attend equally to all they see, with one number as value, in bfloat16."""
    t = len(values)
    zeros = put(np.zeros((1, 1, t, 8), np.float32).astype(jnp.bfloat16), *SPLIT)
    v = np.broadcast_to(np.reshape(values, (t, 1)), (1, 1, t, 8)).astype(jnp.bfloat16)
    return Step(
        hidden=put(np.zeros((1, t, 8), np.float32), BATCH, None, None), q=zeros, k=zeros, q_pre=zeros, k_pre=zeros,
        v=put(v, *SPLIT), position=put(np.arange(t, dtype=np.int32)[None], BATCH, None), layer=jnp.int32(0),
        head=put(np.zeros(1, np.int32), HEADS),
    )  # fmt: skip


def test_attention_to_stored_and_new_entries_is_rounded_once():
    """Two stored values of 1 and five new ones of mean 1 + 1.2/256 have the mean 1 + 0.86/256, which is 1 in bfloat16.
    If the new ones were rounded by themselves, to 1 + 2/256, it would be 1 + 1.43/256, and so 1 + 2/256."""
    with jax.set_mesh(make_mesh(devices=jax.devices()[:1])):
        policy = compile_policy(make_policy("full"), 1, 1)
        sizes = {"batch": 1, "layers": 1, "kv_heads": 1, "head_dim": 8, "tokens": 16}
        cache = empty_cache(policy, **sizes, dtype=jnp.bfloat16)
        pages, layer = cache.pages, jax.tree.map(lambda x: x[0], cache.layers)
        attend = jax.jit(functools.partial(cached_attention, policy.read))
        two, five = (jnp.full_like(cache.seen, n) for n in (2, 5))
        none = {"seen": cache.seen, "counted": cache.seen}
        _, _, pages, layer = attend(step_of([1] * 5), pages, layer, **none, valid=two)
        after = {"seen": two, "counted": two}
        o, _, _, _ = attend(step_of([1 + 2 / 256] * 3 + [1] * 2), pages, layer, **after, valid=five)
    assert o.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(o, np.float32)[0, 0, -1], 1)


@struct
class TwoMasks:
    """Two masks: a third of full attention and two thirds of the window's in head 0, and the reverse in head 1."""

    share: jax.Array

    def masks(self, step):
        nothing = ends(jnp.zeros(step.k.shape[:3], bool), 3)
        return "state", [Mask(self.share), Mask(1 - self.share, nothing)]

    def figures(self, state, step, outputs):
        assert state == "state"
        (_, full), (_, near) = outputs
        return {"apart": (full - near).reshape(*step.k.shape[:2], -1).max(-1)}


@pytest.mark.parametrize(
    "shape", [{}, pytest.param({"fsdp": 2, "tensor": 2}, marks=pytest.mark.mesh)], ids=str
)
def test_weighted_masks_are_added_and_each_has_its_own_log_sum_exp(shape):
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((2, n, 12, 8)).astype(np.float32) for n in (4, 2, 2))
    share = np.array([1 / 3, 2 / 3], np.float32)
    dense = jax.jit(functools.partial(vertical_slash, window=3, implementation="reference"))
    near = jax.jit(lambda: ends(jnp.zeros((2, 2, 12), bool), 3))()
    parts = [tuple(map(np.asarray, dense(q, k, v, end))) for end in (None, near)]
    weights = [np.repeat(w, 2)[:, None, None] for w in (share, 1 - share)]
    wanted = sum(w * o for w, (o, _) in zip(weights, parts, strict=True))
    apart = (parts[0][1] - parts[1][1]).reshape(2, 2, -1).max(-1)
    with jax.set_mesh(make_mesh(**shape)):
        q, k, v = (put(x, *SPLIT) for x in (q, k, v))
        rows = put(np.zeros((2, 12), np.int32), BATCH, None)
        step = Step(
            hidden=put(np.zeros((2, 12, 8), np.float32), BATCH, None, None), q=q, k=k, q_pre=q, k_pre=k, v=v,
            position=rows, layer=jnp.int32(0), head=put(np.arange(2, dtype=np.int32), HEADS),
        )  # fmt: skip
        attend = jax.jit(functools.partial(masked_attention, window=3))
        o, figures = attend(TwoMasks(put(share, HEADS)), step)
        np.testing.assert_allclose(o, wanted, atol=1e-5)
        np.testing.assert_allclose(figures["apart"], apart, atol=1e-5)
        assert np.min(apart) > 0.1


def test_figures_must_have_one_number_per_head():
    class OneNumber(TwoMasks):
        def figures(self, state, step, outputs):
            return {"mean": outputs[0][1].mean()}

    with (
        jax.set_mesh(make_mesh()),
        pytest.raises(ValueError, match=r"OneNumber.figures: mean is \(\), expected"),
    ):
        jax.eval_shape(lambda: masked_attention(struct(OneNumber)(jnp.ones(1)), step_of(range(4)), window=3))


@pytest.mark.mesh
def test_attention_over_the_cache_needs_no_collective():
    """Attention and the cache's bookkeeping are local to a shard."""
    with jax.set_mesh(make_mesh(tensor=4)):
        split = tiny_model()
        policy = policies_for(split, 6)["wgkv"].compile(split)
        cache = empty_cache(
            policy, batch=1, layers=3, kv_heads=4, head_dim=8, tokens=64, dtype=jnp.float32, capacity=64
        )
        one = jnp.zeros((1, 1), jnp.int32)
        first = jax.tree.map(lambda a: a[0], (policy.read, cache.layers))
        step = jax.eval_shape(lambda: fake_step(one))
        lowered = jax.jit(attend_only).lower(first[0], cache.pages, first[1], step)
        text = str(lowered.compile().as_text())
    for collective in ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter"):
        assert f" {collective}(" not in text


def fake_step(tokens):
    b, t = tokens.shape
    kv, q = (jnp.zeros((b, n, t, 8), out_sharding=SPLIT) for n in (4, 8))
    return Step(
        hidden=jnp.zeros((b, t, 32), out_sharding=P(BATCH, None, None)), q=q, k=kv, q_pre=q, k_pre=kv, v=kv,
        position=jnp.zeros((b, t), jnp.int32, out_sharding=P(BATCH, None)),
        layer=jnp.int32(0), head=jnp.zeros(4, jnp.int32, out_sharding=P(HEADS)),
    )  # fmt: skip


def attend_only(view, pages, layers, step):
    rows = jnp.zeros(1, jnp.int32, out_sharding=P(BATCH))
    return cached_attention(view, step, pages, layers, seen=rows, counted=rows, valid=rows + 1)
