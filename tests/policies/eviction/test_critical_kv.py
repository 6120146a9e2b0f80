"""Test CriticalKV against its two stages in float64, from a real prefill: over SnapKV, and over Fast KVzip's gates."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.inference import prefill
from kvjax.mesh import use_mesh
from kvjax.policies import CriticalKV, FastKVzip, Policy, Ratio, Schedule, make_policy
from tests.policies import published
from tests.policies.captured import OBSERVED, PAGE, entries
from tests.policies.eviction.fast_kvzip import masked
from tests.policies.eviction.kept_sets import RATIO, assert_published
from tests.tiny_models import filled, tiny_config, tiny_sink_gates


def test_scores_and_kept_sets_are_the_published_ones(model, prompts, captured):
    policy = make_policy(f"snapkv:observed={OBSERVED},ratio={RATIO},critical_kv", model=model)

    def score(c, kept):
        newest = np.arange(c.k.shape[1]) >= c.k.shape[1] - OBSERVED
        return published.critical(c, published.snapkv(c, OBSERVED), newest, kept)

    assert_published(policy, score, model, prompts, captured, last=OBSERVED)


@pytest.mark.slow
@pytest.mark.parametrize("ratio", [0.4, 0.1])
def test_over_fast_kvzip_the_window_takes_no_place_of_a_stage(model, prompts, captured, ratio):
    """Within the prompt's range, the first stage selects per head, and the second selects entries above the last place
    over all layers and heads. The window and the prefix are kept in addition. If the window alone exceeds the budget,
    neither stage has a place."""
    gates, prompt, window, prefix = tiny_sink_gates(model), prompts[0], 8, 3
    eviction = CriticalKV(FastKVzip(gates, window=window, prefix=prefix, short=0))
    policy = Policy(eviction=eviction, schedule=Schedule(Ratio(ratio)))
    cache = prefill(model, [prompt], policy=policy, page_size=PAGE)

    tokens = len(prompt) - prefix
    newest = min(window, int(ratio * tokens))
    free = slice(prefix, len(prompt) - newest)
    share = (ratio * tokens - newest) / (tokens - newest) if newest == window else 0
    scores = masked.forward(model, gates, prompt, masked.causal((3, 4), len(prompt)))[1][..., free]
    total = int(scores.size * share)
    # where the places do not divide evenly, the first heads have one more
    counts = (total // 12 + (np.arange(12) < total % 12)).reshape(3, 4)
    final = np.empty(scores.shape)
    for layer, head in np.ndindex(3, 4):
        c = captured[0][layer]
        c = dataclasses.replace(c, v=c.v[:, free])
        none = np.zeros(scores.shape[-1], bool)
        final[layer, head] = published.critical(c, scores[layer], none, counts[layer, head])[head]
    last = np.sort(final, axis=None)[::-1][total - 1] if total else np.inf
    stays = np.ones((3, 4, len(prompt)), bool)
    stays[..., free] = (final > last) | (final == np.inf)
    assert stays.sum() == 12 * (len(prompt) - scores.shape[-1]) + max(total - 1, 0)
    for layer, head in np.ndindex(3, 4):
        keys = captured[0][layer].k[head][stays[layer, head]]
        np.testing.assert_allclose(entries(cache, layer, 0, head), keys, atol=1e-4)


@pytest.mark.slow
def test_bfloat16_values_work_on_a_cpu():
    """XLA cannot compute an entry's output there as a product of bfloat16 numbers."""
    with use_mesh():
        model = filled(tiny_config(), jnp.bfloat16)
    policy = make_policy("snapkv:ratio=0.5,observed=4,critical_kv", model=model)
    cache = prefill(model, [np.arange(40)], policy=policy)
    assert (np.asarray(cache.layers.length)[:, 0] == 20).all()
