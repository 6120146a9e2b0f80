"""What a method must define."""

import pytest

from kvjax.policies.interfaces import Admission, Eviction


@pytest.mark.parametrize(("role", "missing"), [(Admission, "keep, score"), (Eviction, "score")])
def test_a_method_that_lacks_a_function_is_refused_when_it_is_made(role, missing):
    with pytest.raises(TypeError, match=missing.replace(", ", ".*")):
        type("Half", (role,), {})()
