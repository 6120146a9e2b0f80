"""Test every method by its registered name: it is made without a model, and a copy has equal arrays."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from kvjax.mesh import use_mesh
from kvjax.policies.admission.kvpop import Sizes
from kvjax.policies.admission.kvzap import Surrogate
from kvjax.policies.base import Admission, Observer
from kvjax.policies.eviction import trimkv
from kvjax.policies.eviction.fast_kvzip import SinkGate
from kvjax.policies.eviction.triattention import QueryStatistics
from kvjax.policies.eviction.trimkv import RetentionGate
from kvjax.policies.registry import ADMISSIONS, EVICTIONS, SELECTIONS, WRAPPERS
from kvjax.policies.views import Shape

RATES = np.linspace(0, 1, 12).reshape(3, 4)
with use_mesh():
    SINKS = SinkGate(3, 4, 2, 32, rngs=nnx.Rngs(0))
    SCORERS = Sizes(3, 4, 8).make()
    SURROGATES = Surrogate(3, 4, 32, 6, rngs=nnx.Rngs(0))
    STATISTICS = QueryStatistics(3, 8, 8)
    RETENTION = RetentionGate(trimkv.Sizes("rg", 3, 4, 32, 6))
NEEDED = {
    "fast_kvzip": {"gates": SINKS},
    "wgkv": {"gates": "builtin"},
    "head_pattern": {"pattern": RATES, "sink": 1},
    "random": {"ratio": 0.5},
    "kvpop": {"scorers": SCORERS},
    "kvzap": {"gates": SURROGATES, "threshold": -4.0},
    "kvzap_eviction": {"gates": SURROGATES},
    "kvzip": {"instruction": [9], "resumption": [8]},
    "triattention": {"statistics": STATISTICS},
    "trimkv": {"gates": RETENTION},
    "quest": {"tokens": 8},
}


def leaves(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize("name", [*ADMISSIONS, *EVICTIONS, *SELECTIONS])
def test_every_method_is_made_without_a_model_and_copied(name):
    """Its name is that of the registry, and a copy has equal arrays."""
    kind = (ADMISSIONS | EVICTIONS | SELECTIONS)[name]
    method = kind(**NEEDED.get(name, {}))
    assert method.label == name
    if name in SELECTIONS:
        return
    again = dataclasses.replace(method)
    for one, other in zip(leaves(method), leaves(again), strict=True):
        np.testing.assert_array_equal(one, other)
    if not isinstance(method, Admission | Observer):
        return
    # the state of two kv heads is twice as large as that of one, or does not depend on them
    one, two = (
        jax.eval_shape(lambda heads=heads: method.init(Shape(3, heads, 2, 8, np.float32))) for heads in (1, 2)
    )
    for small, large in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        assert large.size in (small.size, 2 * small.size)
        assert small.shape[0] == large.shape[0] == 3


def test_the_api_reference_has_every_method():
    page = (Path(__file__).parents[2] / "docs/api/policies.md").read_text(encoding="utf-8")
    for kind in (ADMISSIONS | EVICTIONS | WRAPPERS | SELECTIONS).values():
        assert f"::: {kind.__module__}.{kind.__name__}\n" in page
