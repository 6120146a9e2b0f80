"""Test the members that a method must define."""

import pytest

from kvjax.policies.base import Admission, Eviction


@pytest.mark.parametrize(("role", "missing"), [(Admission, "keep, score"), (Eviction, "score")])
def test_a_method_that_lacks_a_function_is_refused_when_it_is_made(role, missing):
    with pytest.raises(TypeError, match=missing.replace(", ", ".*")):
        type("Half", (role,), {})()


def test_a_function_that_nobody_would_call_is_refused():
    with pytest.raises(TypeError, match="Half defines observe and must derive from Observer"):
        type("Half", (Eviction,), {"observe": lambda *_: ()})
