"""Chips and slices by name."""

import pytest

from kvjax.errors import UserError
from kvjax.plan.chips import CHIPS, GPU_SHARE, Topology


@pytest.mark.parametrize(
    ("text", "chip", "count"), [("v5e:2x4", "v5e", 8), ("v5p:2x2x1", "v5p", 4), ("h100:8", "h100", 8)]
)
def test_a_slice_is_a_chip_and_a_count(text, chip, count):
    topology = Topology.parse(text)
    assert (topology.chip.name, topology.count) == (chip, count)
    assert topology.platform == ("cuda" if chip == "h100" else "tpu")


@pytest.mark.parametrize(
    "text", ["v5e", "v5e:", "v5e:2x4x1", "v5p:8", "h100:2x4", "a100:8", "v5e:0x4", "v5e-8"]
)
def test_another_is_refused_in_one_line(text):
    with pytest.raises(UserError, match=f"^--topology {text}: .*(expected a chip|slices of)"):
        Topology.parse(text)


def test_jax_takes_a_share_of_a_gpu(monkeypatch):
    monkeypatch.delenv(GPU_SHARE, raising=False)
    assert CHIPS["h100"].usable == CHIPS["h100"].memory * 3 // 4
    monkeypatch.setenv(GPU_SHARE, "0.5")
    assert CHIPS["h100"].usable == CHIPS["h100"].memory // 2
    assert CHIPS["v5e"].usable == 15.75 * 2**30
