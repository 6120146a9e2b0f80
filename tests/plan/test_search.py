"""What would fit, of programs whose memory is known."""

import pytest

from kvjax.command.launch import MeshShape
from kvjax.plan.program import TEMPORARIES, Figures
from kvjax.plan.search import TRIES, Bracket, largest, meshes


def line(number: int, refuse_above: int = 1 << 60) -> Figures:
    """1,000 bytes and 10 for each; of what is refused nothing more is known."""
    refused = number > refuse_above
    grows = 0 if refused else 10 * number
    return Figures({"weights": 1000, TEMPORARIES: grows}, 0.0, 0, {}, {}, 0.0, "no" if refused else "")


def search(first: int, usable: int, measure=line, **more) -> tuple[Bracket, int]:
    calls = []
    known = {first: measure(first)}

    def counted(number):
        calls.append(number)
        return measure(number)

    found = largest(counted, known, usable, (TEMPORARIES,), more.pop("most", 1 << 20), **more)
    return found, len(calls)


@pytest.mark.parametrize("first", [64, 1000, 5000])
def test_a_line_is_followed_to_the_limit(first):
    """901 would fit; what is tried has few digits."""
    found, compiles = search(first, 10_010)
    assert found.fits == 896
    assert compiles <= TRIES


def test_refusals_without_a_number_are_halved():
    found, _ = search(4096, 1 << 40, lambda number: line(number, refuse_above=1500))
    assert found == Bracket(1024, 1536)


def test_no_more_than_means_anything_and_in_multiples():
    assert search(64, 1 << 40, most=512)[0] == Bracket(512, None)
    assert search(9, 10_010, multiple=9)[0].fits == 891


def test_nothing_fits():
    assert search(64, 900)[0].fits is None


def test_meshes_divide_the_model(shape):
    """Two kv heads: tensor is 1 or 2."""
    assert list(meshes(shape, 8, MeshShape(1, 8, 1))) == [MeshShape(1, 4, 2)]
    assert list(meshes(shape, 8, MeshShape(1, 1, 8))) == [MeshShape(1, 4, 2), MeshShape(1, 8, 1)]
