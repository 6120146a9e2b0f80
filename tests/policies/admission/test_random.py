"""Test random admission against its rates, by head, seed, layer, position and sequence."""

import numpy as np
import pytest

from kvjax.errors import UserError
from kvjax.policies import make_policy
from tests.policies.admission.admitted import kept
from tests.policies.steps import step


def test_random_admits_its_rate_by_head_seed_and_layer(model):
    rates = np.linspace(0.1, 0.9, 12).reshape(3, 4)
    policy = make_policy({"random": {"rates": rates, "window": 4, "seed": 5}}, model=model)
    positions = np.arange(20000)[None]
    found = np.stack([kept(policy, step(positions, layer=i), i)[0].mean(-1) for i in range(3)])
    assert np.abs(found - rates).max() < 4 * np.sqrt(0.25 / 20000)

    def draws(seed, layer):
        admission = make_policy({"random": {"ratio": 0.5, "window": 4, "seed": seed}}, model=model)
        return kept(admission, step(positions, layer=layer), layer)[0]

    first = draws(0, 0)
    for one, other in ((first[0], draws(1, 0)[0]), (first[0], draws(0, 1)[0]), (first[0], first[1])):
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.03


def test_rates_of_zero_and_one_drop_and_keep_everything(model):
    for rate in (0.0, 1.0):
        policy = make_policy({"random": {"ratio": rate, "window": 4}}, model=model)
        assert (kept(policy, step(np.arange(20000)[None])) == bool(rate)).all()


def test_random_admission_has_its_rate_in_every_sequence(model):
    """At each position and head, the share of 400 sequences that keep the token is the rate."""
    policy = make_policy("random:ratio=0.3,window=4", model=model)
    found = kept(policy, step(np.broadcast_to(np.arange(30), (400, 30))))
    share = found.mean(0)
    assert np.abs(share - 0.3).max() < 4.5 * np.sqrt(0.3 * 0.7 / 400)
    assert abs(found.mean() - 0.3) < 0.01


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"window": 4}, "either ratio"),
        ({"window": 4, "ratio": 1.5}, "ratio must be a finite number, at least 0 and at most 1, got 1.5"),
        ({"window": 4, "rates": np.zeros((2, 4))}, "made for 2 layers × 4 kv heads, the model has 3 × 4"),
    ],
)  # fmt: skip
def test_invalid_arguments_give_one_line_errors(model, arguments, message):
    with pytest.raises(UserError, match=message):
        make_policy({"random": arguments}, model=model)
