"""Which tokens of a step an admission lets in."""

import jax
import numpy as np

from kvjax.mesh import AXES, gather, use_mesh
from kvjax.policies.compiled import on_mesh
from tests.policies.steps import shape_of, whole


def layer(tree, index):
    """One layer's part of a method for the tiny model, whole on the device, as the layer scan hands it over."""
    with use_mesh(tree):
        return gather(jax.tree.map(lambda leaf: leaf[index], on_mesh(tree, 3, 4)), *AXES)


def kept(policy, at, index=0):
    """Those that a layer's admission wants of the step `at`, bool [b k t]."""
    admission = layer(policy.admission, index)
    with use_mesh(policy):
        _, priority, delay = admission.score(admission.init(shape_of(at)), at, *whole(at))
    assert delay == 0
    return np.asarray(priority >= admission.keep().threshold)
