"""Test budgets that are shared by the heads of a layer, by layers, and by all heads."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import inference
from kvjax.errors import UserError
from kvjax.policies import Adaptive, KNorm, Policy, Pyramid, Ratio, Schedule, SnapKV, make_policy
from kvjax.policies.base import Eviction
from kvjax.struct import struct
from tests.policies.captured import LENGTHS, OBSERVED, PAGE, pages_are_whole
from tests.tiny_models import tiny_model

SHARES = {
    "snapkv": SnapKV(OBSERVED),
    "pyramidkv": Pyramid(SnapKV(OBSERVED), beta=2.0),
    "adakv": Adaptive(SnapKV(OBSERVED)),
    "global": Adaptive(SnapKV(OBSERVED), over="model", pinned=0.0),
}


@pytest.mark.parametrize("name", SHARES)
def test_heads_and_layers_share_the_budget(model, prompts, name):
    policy = Policy(eviction=SHARES[name], schedule=Schedule(Ratio(0.4)))
    cache = inference.prefill(model, prompts, policy=policy, page_size=PAGE)
    pages_are_whole(cache)
    length = np.asarray(cache.layers.length)
    assert (length >= OBSERVED).all()
    for b, tokens in enumerate(LENGTHS):
        kept, rows = int(0.4 * tokens), length[:, b]
        if name == "snapkv":
            assert (rows == kept).all()
        elif name == "pyramidkv":
            share = 0.4 * tokens
            assert rows[:, 0].tolist() == [round(share + part * share / 2) for part in (1, 0, -1)]
            assert (rows == rows[:, :1]).all()
        elif name == "adakv":
            assert (rows.sum(1) == 4 * kept).all()
            assert (rows >= max(1, int(0.2 * kept))).all()
            assert (rows != kept).any()
        else:
            assert rows.sum() == int(12 * 0.4 * tokens)
            assert len(set(rows.sum(1).tolist())) > 1


@struct
class HeadLevels(Eviction):
    """An eviction whose scores depend only on an entry's place and head."""

    levels: Any
    name = "of_heads"

    def score(self, state, stored):
        return self.levels[:, None] - 0.001 * stored.place.astype(jnp.float32)


def test_equal_heads_share_equally_and_a_better_head_gets_all_unpinned_places(model, prompts):
    """Each head keeps at least half of its share."""
    for levels, expected in (([1, 1, 1, 1], [24, 24, 24, 24]), ([0, 0, 1, 0], [12, 12, 60, 12])):
        scores = HeadLevels(np.tile(np.float32(levels), (3, 1)))
        policy = Policy(eviction=Adaptive(scores, pinned=0.5), schedule=Schedule(Ratio(0.4)))
        cache = inference.prefill(model, prompts[:1], policy=policy, page_size=PAGE)
        np.testing.assert_array_equal(np.asarray(cache.layers.length)[:, 0], [expected] * 3)


@pytest.mark.parametrize("when", [{}, {"when": "chunk", "chunk": 20}])
def test_a_pyramid_needs_two_layers(prompts, when):
    """The error comes when the policy is made for a model, or else when it first meets one."""
    message, model = (
        "^a pyramid of budgets needs at least 2 layers, the model has 1$",
        tiny_model(num_layers=1),
    )
    with pytest.raises(UserError, match=message):
        make_policy({"snapkv": {"ratio": 0.5, "observed": 6, "pyramidkv": {}} | when}, model=model)
    policy = make_policy({"knorm": {"ratio": 0.5, "pyramidkv": {}} | when})
    with pytest.raises(UserError, match=message):
        inference.prefill(model, prompts, policy=policy, page_size=PAGE)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Adaptive(KNorm(), over="row"), "budget: over is one of head, layer, model, got 'row'"),
        (lambda: Pyramid(KNorm(), beta=1.0), "pyramidkv: beta must be a finite number, above 1, got 1.0"),
    ],
)  # fmt: skip
def test_invalid_arguments_give_one_line_errors(make, message):
    with pytest.raises(UserError) as error:
        make()
    assert str(error.value) == message
