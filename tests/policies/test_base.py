"""Test the members that a method must define."""

import pytest

from kvjax.policies.base import Admission, Eviction


@pytest.mark.parametrize(("role", "missing"), [(Admission, "keep, score"), (Eviction, "score")])
def test_an_incomplete_method_cannot_be_made(role, missing):
    with pytest.raises(TypeError, match=missing.replace(", ", ".*")):
        type("Half", (role,), {})()


def test_a_function_of_a_mixin_needs_the_mixin():
    with pytest.raises(TypeError, match="Half defines observe and must derive from Observer"):
        type("Half", (Eviction,), {"observe": lambda *_: ()})
