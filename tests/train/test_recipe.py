"""Test the base of all recipes: the number of a batch's rows on a mesh, and that other modules know no recipe by
name."""

import ast
import dataclasses
from pathlib import Path

import pytest

from kvjax.cli.launch import MeshShape
from kvjax.policies.registry import POLICIES
from kvjax.train import recipe
from kvjax.train.recipes.wgkv import WriteGates


def test_rows_fill_every_data_shard():
    config = WriteGates(mesh=MeshShape(2, 4, 2))
    assert config.rows == 8
    assert dataclasses.replace(config, batch=9).rows == 16


def test_an_option_that_cannot_be_exported_is_refused_before_the_run():
    @dataclasses.dataclass(frozen=True)
    class Reading(WriteGates):
        file: Path = Path("a")

    with pytest.raises(TypeError, match="Reading.file: an option is a number, a word or a tuple"):
        Reading().check()


def test_the_loop_names_no_method():
    """In `kvjax/train` only recipes name methods; names that belong to no method (full, random) may be compared."""
    names = {*POLICIES, "WriteGate", "WGKV", "SnapKV", "KeyDiff", "H2O", "Quest"} - {"full", "random"}
    for file in Path(recipe.__file__).parent.glob("*.py"):
        nodes = list(ast.walk(ast.parse(file.read_text())))
        words = [getattr(node, part, None) for node in nodes for part in ("id", "name", "value")]
        method_names = names.intersection(word for word in words if isinstance(word, str))
        assert not method_names, file.name
