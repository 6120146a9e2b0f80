"""What a method must define, and CONTRIBUTING's example of one."""

import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvjax.cache import stats
from kvjax.inference.sampling import prefill
from kvjax.policies import Policy
from kvjax.policies.interfaces import Admission, Eviction


@pytest.mark.parametrize(("role", "missing"), [(Admission, "keep, score"), (Eviction, "score")])
def test_a_method_that_lacks_a_function_is_refused_when_it_is_made(role, missing):
    with pytest.raises(TypeError, match=missing.replace(", ", ".*")):
        type("Half", (role,), {})()


def test_the_example_of_contributing_is_a_policy(model, monkeypatch):
    text = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    source = text.split("```python")[1].split("```")[0]
    written: Any = types.ModuleType("key_norm")
    monkeypatch.setitem(sys.modules, "key_norm", written)
    exec(source, written.__dict__)
    for limit, kept in ((0.0, 3), (1e9, 40)):
        policy = Policy(written.KeyNorm(limit=limit), window=4)
        entries = stats(prefill(model, [np.arange(40)], policy=policy)).entries
        assert (entries == kept).all()
