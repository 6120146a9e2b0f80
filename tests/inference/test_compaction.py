"""Tests of the compaction of a cache: the chosen entries stay, and nothing else of the cache changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import inference
from kvjax.inference.attention import cached_attention
from kvjax.mesh import make_mesh, use_mesh
from kvjax.models.decoder import scan_layers
from kvjax.policies import make_policy
from tests.policies import published
from tests.policies.captured import OBSERVED, PAGE, entries
from tests.tiny_models import tiny_model


def test_a_ratio_of_1_gives_the_full_cache(model, prompts):
    policy = make_policy(f"snapkv:ratio=1,observed={OBSERVED},adakv", model=model)
    kept = inference.prefill(model, prompts, policy=policy, page_size=PAGE)
    full = inference.prefill(model, prompts, page_size=PAGE)
    for row in np.ndindex(3, 2, 4):
        np.testing.assert_array_equal(entries(kept, *row), entries(full, *row))


def test_the_next_token_sees_the_entries_that_stayed(model, prompts, captured):
    """The next token sees the entries that stayed and itself."""
    policy = make_policy("knorm:entries=9", model=model)
    cache = inference.prefill(model, prompts[:1], policy=policy, page_size=PAGE)
    layer, c = 0, captured[0][0]
    stays = published.best(published.knorm(c), 9)

    @jax.jit
    def run(model, view, cache):
        def attend(found, pages, xs):
            own, view = xs
            o, _, pages, own = cached_attention(
                view, found, pages, own, seen=cache.seen, counted=cache.seen, valid=jnp.ones(1, jnp.int32)
            )
            return o, pages, (found.q, found.k, found.v, o)

        x, position = model.embed_tokens(jnp.array([[7]])), cache.seen[:, None]
        return scan_layers(model, x, position, attend, cache.pages, (cache.layers, view))[2]

    with use_mesh(model):
        ys = run(model, policy.compile(model).decode, cache)
    q, k, v, o = (np.asarray(y, np.float64)[layer, 0] for y in ys)
    for head in range(8):
        kv = head // 2
        keys = np.concatenate([c.k[kv][stays[kv]], k[kv]])
        values = np.concatenate([c.v[kv][stays[kv]], v[kv]])
        p = published.softmax(keys @ q[head, 0] / np.sqrt(8))
        np.testing.assert_allclose(o[head, 0], p @ values, atol=1e-5)


@pytest.mark.mesh
@pytest.mark.thorough
@pytest.mark.parametrize(
    "named",
    [f"snapkv:ratio=0.3,observed={OBSERVED},adakv", "tova:ratio=0.3,adakv.over=model,adakv.pinned=0.0"],
)
def test_a_mesh_keeps_as_many_entries(model, prompts, named):
    policy = make_policy(named, model=model)
    alone = inference.prefill(model, prompts, policy=policy, page_size=PAGE)
    with jax.set_mesh(make_mesh(fsdp=2, tensor=2)):
        split = tiny_model(qk_norm=False)
        policy = make_policy(named, model=split)
        together = inference.prefill(split, prompts, policy=policy, page_size=PAGE)
    np.testing.assert_array_equal(together.layers.length, alone.layers.length)


@pytest.mark.thorough
def test_a_batch_equals_a_sequence_alone(model, prompts):
    policy = make_policy(f"snapkv:ratio=0.3,observed={OBSERVED},adakv", model=model)
    together = inference.prefill(model, prompts, policy=policy, page_size=PAGE)
    # the shorter prompt was padded in the batch
    alone = inference.prefill(model, prompts[1:], policy=policy, page_size=PAGE)
    np.testing.assert_array_equal(together.layers.length[:, 1], alone.layers.length[:, 0])
    for layer, head in np.ndindex(3, 4):
        ours, own = entries(together, layer, 1, head), entries(alone, layer, 0, head)
        np.testing.assert_allclose(ours, own, atol=1e-5)
