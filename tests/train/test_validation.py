"""Test held-out figures of write gates: each sequence has its own, whatever the mesh."""

import numpy as np
import pytest

from kvjax.cli.launch import MeshShape
from tests.train.write_gates import held_out, validated


@pytest.fixture(scope="module")
def alone():
    return validated(MeshShape())


@pytest.mark.thorough
@pytest.mark.parametrize(
    "shape",
    [MeshShape(fsdp=8), MeshShape(fsdp=2, tensor=4)],
    ids=str,
)
def test_figures_do_not_depend_on_the_mesh(alone, shape):
    (*_, mine), (*_, theirs) = validated(shape), alone
    np.testing.assert_allclose(mine.by_sequence["rates"], theirs.by_sequence["rates"], atol=1e-6)
    assert mine.numbers == pytest.approx(theirs.numbers, rel=1e-4)


@pytest.mark.parametrize("shape", [MeshShape(), MeshShape(fsdp=8)], ids=str)
def test_every_sequence_counts_once(shape):
    *_, found = validated(shape)
    assert found.sequences == len(held_out())
    assert found.by_sequence["rates"].shape == (len(held_out()), 3, 4)
    assert found.by_sequence.keys() == {"rates"}


def test_a_validation_prints_every_mean(alone):
    *_, found = alone
    means = ", ".join(f"{name} {value:.4g}" for name, value in found.numbers.items())
    assert str(found) == f"held out (5 sequences): {means}"
    assert len(found.numbers) == 5
