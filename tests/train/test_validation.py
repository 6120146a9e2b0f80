"""Test held-out figures of write gates: each sequence has its own, whatever the mesh."""

import numpy as np
import pytest

from kvjax.cli.launch import MeshShape
from tests.train.write_gates import held_out, validated


@pytest.fixture(scope="module")
def on_one_device():
    return validated(MeshShape())


@pytest.mark.thorough
@pytest.mark.parametrize(
    "shape",
    [MeshShape(fsdp=8), MeshShape(fsdp=2, tensor=4)],
    ids=str,
)
def test_figures_do_not_depend_on_the_mesh(on_one_device, shape):
    (*_, actual), (*_, expected) = validated(shape), on_one_device
    np.testing.assert_allclose(actual.by_sequence["rates"], expected.by_sequence["rates"], atol=1e-6)
    assert actual.numbers == pytest.approx(expected.numbers, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [MeshShape(), MeshShape(fsdp=8)], ids=str)
def test_every_sequence_counts_once(shape):
    *_, validation = validated(shape)
    assert validation.sequences == len(held_out())
    assert validation.by_sequence["rates"].shape == (len(held_out()), 3, 4)
    assert validation.by_sequence.keys() == {"rates"}


def test_a_validation_prints_every_mean(on_one_device):
    *_, validation = on_one_device
    means = ", ".join(f"{name} {value:.4g}" for name, value in validation.numbers.items())
    assert str(validation) == f"held out (5 sequences): {means}"
    assert len(validation.numbers) == 5
