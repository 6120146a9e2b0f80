"""Tests of `vertical_slash` over several documents that are packed into one sequence."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.vertical_slash import ends, vertical_slash
from tests.pallas_kernels.closeness import assert_attention_close, assert_gradients_close
from tests.pallas_kernels.slash_inputs import (
    TPUS,
    more,
    tensors,
)

DOCUMENTS = 70, 1, 25
"""Lengths of the documents that are packed into one sequence. The first and the last have the same id."""


@functools.cache
def packed(implementation, gated):
    """Return a function of q, k, v, log_gate, admitted and segment_ids. It returns the gradients of q, k and v, and
    (o, lse)."""

    def run(q, k, v, gate, admitted, segments):
        o, lse = vertical_slash(
            q,
            k,
            v,
            None if gated else ends(admitted, 7),
            window=7,
            log_gate=gate if gated else None,
            segment_ids=segments,
            implementation=implementation,
        )
        return jnp.sum(jnp.sin(o)) + jnp.sum(lse), (o, lse)

    return jax.jit(jax.grad(run, (0, 1, 2), has_aux=True))


def packed_arguments():
    q, k, v, gate = tensors((1, 4, 2, sum(DOCUMENTS), sum(DOCUMENTS), 32), 4)
    admitted = np.random.default_rng(5).random(gate.shape) < 0.3
    arguments = *(np.asarray(x) for x in (q, k, v, gate)), admitted
    return arguments, np.repeat(np.array([3, 0, 3], np.int32), DOCUMENTS)[None]


@pytest.mark.parametrize("gated", [more(False), True])
def test_reference_keeps_packed_documents_apart(gated):
    arguments, segments = packed_arguments()
    gradients, out = jax.device_get(packed("reference", gated)(*arguments, segments))
    for start, stop in itertools.pairwise(np.cumsum((0, *DOCUMENTS))):
        alone = [x[:, :, start:stop] for x in arguments]
        gradients_alone, expected = packed("reference", gated)(*alone, segments[:, start:stop])
        assert_attention_close([x[:, :, start:stop] for x in out], expected)
        assert_gradients_close([x[:, :, start:stop] for x in gradients], gradients_alone)


@pytest.mark.thorough
@pytest.mark.parametrize("implementation", TPUS)
@pytest.mark.parametrize("gated", [more(False), True])
def test_packed_documents_equal_the_reference(implementation, gated):
    arguments, segments = packed_arguments()
    gradients, out = packed(implementation, gated)(*arguments, segments)
    expected_gradients, expected = packed("reference", gated)(*arguments, segments)
    assert_attention_close(out, expected)
    assert_gradients_close(gradients, expected_gradients)
