"""Compute which tokens of a step an admission retains."""

import jax
import numpy as np

from kvjax.mesh import put, use_mesh
from kvjax.policies.compiled import on_mesh
from tests.policies.steps import from_start, shape_of


def layer(tree, index):
    """Return one layer's part of a method for the tiny model, on one device, as the layer scan passes it."""
    with use_mesh(tree):
        return jax.tree.map(lambda leaf: put(np.asarray(leaf)[index]), on_mesh(tree, 3, 4))


@jax.jit
def priorities(admission, at):
    """Return the priorities [b k t] of a step that begins a sequence, and the threshold."""
    _, priority, delay = admission.score(admission.init(shape_of(at)), at, *from_start(at))
    assert delay == 0
    return priority, admission.keep().threshold


def kept(policy, at, index=0):
    """Return the mask of the tokens of the step `at` that a layer's admission retains, bool [b k t]."""
    admission = layer(policy.admission, index)
    with use_mesh(policy):
        priority, threshold = map(np.asarray, priorities(admission, at))
    return priority >= threshold
