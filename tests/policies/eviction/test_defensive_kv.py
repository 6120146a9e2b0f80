"""Test DefensiveKV against its formula in float64, from a real prefill, and by an example with the numbers written
out."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import inference
from kvjax.errors import UserError
from kvjax.mesh import HEADS, P, make_mesh, put
from kvjax.policies import DefensiveKV, make_policy
from tests.policies import published
from tests.policies.captured import LENGTHS, OBSERVED, PAGE, entries, scored
from tests.policies.steps import stored

OVER = {"layer": "", "model": ",adakv.over=model,adakv.pinned=0.0"}


@pytest.mark.parametrize("over", ["layer", pytest.param("model", marks=pytest.mark.slow)])
def test_scores_and_kept_sets_are_the_published_ones(model, prompts, captured, over):
    """With the smaller budget the places bound the first stage, with the larger one the attention does."""
    for ratio in (0.3, 0.9):
        policy = make_policy(f"defensive_kv:observed={OBSERVED},ratio={ratio}{OVER[over]}", model=model)
        found = scored(model, policy, prompts)
        cache = inference.prefill(model, prompts, policy=policy, page_size=PAGE)
        for b, layers in enumerate(captured):
            free = LENGTHS[b] - OBSERVED
            total = int(12 * (ratio * LENGTHS[b])) if over == "model" else 12 * int(ratio * LENGTHS[b])
            # where the places do not divide evenly, the first heads have one more
            places = total // 12 + (np.arange(12) < total % 12)
            places = places * free // LENGTHS[b] - OBSERVED
            want = np.stack(
                [
                    published.defensive(c, OBSERVED, row)
                    for c, row in zip(layers, places.reshape(3, 4), strict=True)
                ]
            )
            got = found[:, b, :, -LENGTHS[b] :]
            np.testing.assert_allclose(got[..., :free], want[..., :free], rtol=1e-4)
            want[..., free:] = np.inf
            rows = 3 if over == "layer" else 1
            stays = published.best(want.reshape(rows, -1), total // rows).reshape(want.shape)
            for layer, head in np.ndindex(3, 4):
                keys = captured[b][layer].k[head][stays[layer, head]]
                np.testing.assert_allclose(entries(cache, layer, b, head), keys, atol=1e-4)


@jax.jit
def local_scores(method, view):
    return jax.shard_map(lambda method, view: method.score((), view), out_specs=P(None, HEADS))(method, view)


def scores(method, view, devices=1):
    """Return the scores of the six entries of `view` but the two observed ones. Devices split the heads."""
    by_head = "k", "v", "place", "scored", "eligible", "forced", "observations"
    with jax.set_mesh(make_mesh(tensor=devices)):
        heads = {name: put(getattr(view, name), None, HEADS) for name in by_head}
        view = dataclasses.replace(view, **heads, output=put(view.output, HEADS), head=put(view.head, HEADS))
        return np.asarray(local_scores(method, view))[0, :, :4]


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.mesh)])
def test_a_worked_example(devices):
    """Two kv heads of two query heads, and six entries, the last two of which are observed. Keys are unit vectors, so
    that queries are the logarithms of their attention."""
    attention = np.array(
        [
            [[0.5, 0.1, 0.1, 0.1, 0.2, 0.0], [0.1, 0.4, 0.2, 0.1, 0.1, 0.1]],
            [[0.1, 0.1, 0.1, 0.1, 0.6, 0.0], [0.1, 0.1, 0.1, 0.1, 0.3, 0.3]],
            [[0.2, 0.1, 0.06, 0.04, 0.6, 0.0], [0.2, 0.1, 0.06, 0.04, 0.3, 0.3]],
            [[0.2, 0.1, 0.06, 0.04, 0.6, 0.0], [0.2, 0.1, 0.06, 0.04, 0.3, 0.3]],
        ]
    )
    norms = np.array([[1, 1, 2, 1, 5, 5], [1, 3, 2, 1, 5, 5]])
    newest = np.tile(np.arange(6) >= 4, (2, 1))
    view = dataclasses.replace(
        stored(np.tile(np.eye(6), (2, 1, 1)), [1.0], 6, forced=newest),
        v=jnp.asarray(norms[None, ..., None] * np.eye(6)[0], jnp.float32),
        output=jnp.tile(jnp.eye(6), (4, 1, 1)),
        observations=jnp.asarray(np.log(np.maximum(attention, 1e-9)) * 6**0.5, jnp.float32)[None],
    )
    method = DefensiveKV(observed=2, pool=1)

    # the largest attention of each entry, and at least the mean of them: 0.3 and 0.1
    risk = scores(dataclasses.replace(method, values=False), view, devices)
    np.testing.assert_allclose(risk, [[0.5, 0.4, 0.3, 0.3], [0.2, 0.1, 0.1, 0.1]], rtol=1e-5)

    # the values' shares are 1/2, but 1/4 and 3/4 of the second entry, so that the largest score is 0.25. β is the mean
    # of 0.225 and 0.1. Before 0.7375 of the mean attention, two entries of the first head and one of the second come.
    large = dataclasses.replace(view, count=jnp.array([[6]]))
    np.testing.assert_allclose(
        scores(method, large, devices), [[0.25, 0.25, 0.15, 0.15], [0.25, 0.075, 0.05, 0.05]], rtol=1e-5
    )
    # 5 · 4 / 6 places, rounded down, two of which the observed entries take
    small = dataclasses.replace(view, count=jnp.array([[5]]))
    np.testing.assert_allclose(
        scores(method, small, devices), [[0.25, 0.1, 0.15, 0.15], [0.25, 0.075, 0.05, 0.05]], rtol=1e-5
    )


@pytest.mark.parametrize(
    "policy",
    [
        "wgkv+defensive_kv:observed=4,ratio=0.5",
        "defensive_kv:entries=64,when=every,every=8",
        "defensive_kv:entries=64,when=chunk,chunk=128",
    ],
)
def test_heads_with_different_tokens_are_not_compared(policy):
    with pytest.raises(UserError) as error:
        make_policy(policy, gates="builtin" if "wgkv" in policy else None)
    assert str(error.value) == (
        "defensive_kv compares the values of a token in all heads of a layer, which hold different tokens under an "
        "admission or after a compaction: values must be false"
    )
    make_policy(policy.replace(":", ":critical_kv,"), gates="builtin" if "wgkv" in policy else None)
