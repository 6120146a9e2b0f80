"""Head patterns: which heads keep everything, and what is refused."""

import json
from typing import Any

import numpy as np
import pytest

from kvjax.errors import UserError
from kvjax.policies import make_policy
from kvjax.policies.admission.head_pattern import choose_heads
from tests.policies.admission.admitted import kept
from tests.policies.steps import step


def test_head_pattern_keeps_whole_heads_and_sinks(tmp_path, model):
    weights = np.array([[0.9, 0.1, 0.5, 0.0], [0.2, 1.4, 0.3, 0.6], [0.0, 0.0, 0.7, 0.1]])
    np.savetxt(tmp_path / "full_attention_heads.tsv", weights, delimiter="\t")
    (tmp_path / "config.json").write_text(json.dumps({"sink_size": 2, "recent_size": 5}))
    policy = make_policy("head_pattern", model=model, pattern=tmp_path)
    assert policy.window == 5
    np.testing.assert_array_equal(
        kept(policy, step([[1, 2]]), 1)[0], [[True, False], [True, True], [True, False], [True, True]]
    )
    third: Any = make_policy("head_pattern", model=model, pattern=tmp_path, ratio=1 / 3).admission
    assert np.asarray(third.pattern).sum() == 4
    np.testing.assert_array_equal(np.asarray(third.pattern)[2], [False, False, True, False])


def test_heads_of_equal_weight_are_taken_in_order():
    np.testing.assert_array_equal(choose_heads(np.zeros((2, 2)), 0.5), [[True, True], [False, False]])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"pattern": "nowhere"}, "nowhere is no head pattern"),
        ({"pattern": np.zeros((3, 4))}, "needs sink and window"),
        ({"pattern": np.zeros((3, 5)), "sink": 1, "window": 3}, "made for 3 layers × 5 kv heads"),
        ({"pattern": np.zeros((3, 4)), "sink": 1, "window": 3, "ratio": 2.0}, "ratio must be a finite"),
    ],
)  # fmt: skip
def test_mistakes_are_named_in_one_line(model, arguments, says):
    with pytest.raises(UserError, match=says) as caught:
        make_policy("head_pattern", model=model, **arguments)
    assert "\n" not in str(caught.value)
