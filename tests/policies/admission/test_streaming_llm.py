"""Test StreamingLLM: which positions are admitted, and which arguments are refused."""

import numpy as np
import pytest

from kvjax.errors import UserError
from kvjax.policies import make_policy
from tests.policies.admission.admitted import kept
from tests.policies.steps import step


def test_streaming_llm_keeps_the_sinks_only(model):
    policy = make_policy("streaming_llm:window=7,sink=3", model=model)
    np.testing.assert_array_equal(kept(policy, step([[0, 2, 3, 9]]))[0, 0], [True, True, False, False])
    assert not kept(make_policy("streaming_llm:window=7,sink=0", model=model), step([[0, 1]])).any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"window": 0}, "window must be a whole number of at least 1, got 0"),
        ({"window": 4, "sink": -1}, "sink must be a whole number of at least 0, got -1"),
    ],
)  # fmt: skip
def test_invalid_arguments_give_one_line_errors(model, arguments, message):
    with pytest.raises(UserError, match=message):
        make_policy({"streaming_llm": arguments}, model=model)
