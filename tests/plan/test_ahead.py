"""Compiling for a TPU that is not here, in a process of its own."""

import importlib.util

import pytest

from kvjax.errors import UserError
from kvjax.plan.ahead import Job, compiled

pytestmark = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")


def test_training_on_four_chips(folder, shape):
    arguments = "--model", str(folder), "--window", "32", "--lengths", "128", "--shares", "1"
    found = compiled(Job("train", "v5e:2x2", arguments, "2x2", 128))
    c = shape
    layer = 2 * c.width * c.head_dim * (c.num_heads + c.num_kv_heads) + 3 * c.width * c.mlp_width
    split = c.num_layers * layer // 4 + c.vocab_size * c.width // 4
    norms = c.num_layers * 2 * (c.width + c.head_dim) + c.width
    assert found.parts["weights"] == 2 * (split + norms)
    assert found.collectives["all-gather"]["count"] >= 7 * c.num_layers
    # forwards as teacher, as student and once more for the backward pass (but the last product), and backwards to what
    # a layer was given; the gates twice forwards, and backwards to their weights and inputs
    hidden = int(1.5 * c.head_dim)
    gates = c.num_kv_heads * (2 * c.head_dim * hidden + hidden)
    products = 4 * layer - c.mlp_width * c.width + 4 * gates
    assert found.flops == 2 * products * c.num_layers * 2 * 128 / 4
    assert not found.refused


def test_what_the_process_finds_wrong_is_one_line(folder):
    with pytest.raises(UserError, match="^--topology v5e:3x7: the compiler knows no such slice"):
        compiled(Job("decode", "v5e:3x7", ("--topology", "v5e:3x7", "--model", str(folder)), "21", 64))
