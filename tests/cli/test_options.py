"""Tests of YAML files of options."""

import dataclasses
import os
from pathlib import Path

import pytest

from kvjax.cli.launch import MeshShape
from kvjax.cli.options import find_config, find_value, load_config, packaged_configs, write_values
from kvjax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Options:
    """Options for these tests."""

    mesh: MeshShape = MeshShape()
    lengths: tuple[int, ...] = (1, 2)
    learning_rate: float = 0.1
    folder: Path | None = None
    fast: bool = False
    name: str = "plain"


def write(tmp_path, text):
    file = tmp_path / "options.yaml"
    file.write_text(text, errors="surrogateescape")
    return str(file)


def test_yaml_values_override_the_defaults(tmp_path):
    file = write(
        tmp_path, "mesh: 4x2\nlengths: [4, 5, 6]\nlearning-rate: 1e-3\nfolder: some/where\nfast: true\n"
    )
    assert load_config(Options, file) == Options(
        MeshShape(1, 4, 2), (4, 5, 6), 1e-3, Path("some/where"), True, "plain"
    )
    assert load_config(Options, write(tmp_path, "mesh: 8"), Options(name="other")).name == "other"


def test_written_values_are_read_back(tmp_path):
    options = Options(MeshShape(2, 2, 2), (7,), 0.25, Path("a b"), True, "two\nlines: and more")
    write_values(tmp_path / "options.yaml", options)
    assert load_config(Options, str(tmp_path / "options.yaml")) == options


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("learning_rat: 1", ["learning_rat", "nearest known: learning_rate"]),
        ("lengths: [4, some]", ["--lengths", "some"]),
        ("mesh: 0", ["mesh '0'", "at least 1"]),
        ("fast: perhaps", ["fast"]),
        ("just words", ["key: value"]),
        ("a: [1", ["YAML"]),
        ("lengths: [4, --name, stolen]", ["lengths may begin with -", "'--name'"]),
        ("lengths: [4, -h]", ["may begin with -"]),
        ("name: {a: --fast}", ["name", "must be a value or a list of values"]),
        ("name: [[a]]", ["must be a value or a list of values"]),
        ("name: !!omap [a: b]", ["must be a value or a list of values"]),
        ("name: !!python/object/apply:os.system [id]", ["name"]),
        ("name: !!int ''", ["YAML"]),
        ("name: " + "[" * 50_000, ["YAML"]),
        ("name: " + "9" * 5000, ["YAML"]),
        ("name: 0x" + "f" * 5000, ["too large a number"]),
        ("name: a\nname: b", ["gives 'name' twice"]),
        ("learning-rate: 1\nlearning_rate: 2", ["twice"]),
        ("? [a]\n: b", ["a key"]),
        ("name: &a [*a]", ["must be a value or a list of values"]),
        ("a: &a [x]\n" + "b: &b [*a, *a]\nc: [*b, *b]\n" + "name: [*b]", ["must be a value or a list"]),
        ("name: a\n" + "#" * (1 << 18), ["is larger than 256 KiB"]),
        ("name: caf\udce9", ["is not UTF-8 text: byte 0xe9 at offset 9"]),
    ],
)
def test_faulty_file_raises_one_line_with_its_name(tmp_path, text, parts):
    file = write(tmp_path, text)
    with pytest.raises(UserError) as error:
        load_config(Options, file)
    line = str(error.value)
    assert line.isprintable()
    assert len(line) < 500
    assert all(part in line for part in [file, *parts]), line


def test_values_that_look_like_options_are_values(tmp_path):
    file = write(tmp_path, "name: --fast\nfolder: -x\nlearning_rate: -1e-3\nlengths: [-4, -5]\n")
    assert load_config(Options, file) == Options(
        name="--fast", folder=Path("-x"), learning_rate=-1e-3, lengths=(-4, -5)
    )


def test_pipes_and_impossible_paths_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(UserError, match="pipe.yaml: is a pipe or a device, expected a file"):
        load_config(Options, str(tmp_path / "pipe.yaml"))
    with pytest.raises(UserError, match="File name too long"):
        load_config(Options, "x" * 5000)


def test_packaged_configs_are_found_by_name_and_by_file_name():
    assert find_config("builtin") == packaged_configs() / "builtin.yaml"
    assert find_config("configs/builtin.yaml").name == "builtin.yaml"
    with pytest.raises(UserError, match="builtn.*the nearest that come with kvjax: builtin, "):
        find_config("builtn")


def test_find_value_returns_the_last_value():
    args = ["--a", "1", "--b=2", "--a=3", "--the_rate", "4", "--c"]
    options = ["--a", "--b", "--c", "--d", "--the-rate"]
    assert [find_value(args, option) for option in options] == ["3", "2", None, None, "4"]
