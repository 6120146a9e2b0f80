"""What would fit, of programs whose memory is known."""

import pytest

from kvjax.command.launch import MeshShape
from kvjax.plan.program import TEMPORARIES, Figures
from kvjax.plan.search import AIM, ENOUGH, Bracket, Count, largest, meshes


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
    """901 would fit; what is tried has few digits, and leaves a little."""
    found, compiles = search(first, 10_010)
    assert ENOUGH <= found.total / 10_010 <= AIM
    assert compiles == 1


def test_what_fills_a_device_is_enough():
    assert search(820, 10_010) == (Bracket(820, None, 9200), 0)


def test_refusals_without_a_number_are_halved():
    found, _ = search(4096, 1 << 40, lambda number: line(number, refuse_above=1500))
    assert (found.fits, found.fails) == (1024, 1536)


def test_no_more_than_means_anything_and_in_multiples():
    assert search(64, 1 << 40, most=500) == (Bracket(500, None, 6000), 1)
    assert search(600, 1 << 40, most=500) == (Bracket(600, None, 7000), 0)
    assert search(9, 10_010, multiple=9)[0].fits == 828
    assert search(9, 1 << 40, most=500, multiple=9)[0].fits == 495


def test_nothing_is_tried_where_what_does_not_grow_is_too_much():
    assert search(64, 900) == (Bracket(None, 64), 0)


def test_compiles_are_counted_beside_the_output(capsys):
    count = Count(3)
    count.say("one")
    count.say("another")
    said = capsys.readouterr()
    assert not said.out
    assert said.err.splitlines() == [
        "compile 1 of at most 3 (0 s): one", "compile 2 of at most 3 (0 s): another",
    ]  # fmt: skip


def test_meshes_divide_the_model(shape):
    """Two kv heads: tensor is 1 or 2."""
    assert list(meshes(shape, 8, MeshShape(1, 8, 1))) == [MeshShape(1, 4, 2)]
    assert list(meshes(shape, 8, MeshShape(1, 1, 8))) == [MeshShape(1, 4, 2), MeshShape(1, 8, 1)]


def test_meshes_split_sequences_that_they_divide(shape):
    """After those that split heads."""
    split = MeshShape(fsdp=4, sequence=2)
    assert list(meshes(shape, 8, MeshShape(1, 8, 1), (64, 96))) == [MeshShape(1, 4, 2), split]
    assert split not in meshes(shape, 8, MeshShape(1, 8, 1), (64, 97))
