import dataclasses
from pathlib import Path

import pytest

from kvjax.command.launch import MeshShape
from kvjax.command.options import find_config, find_value, load_config, packaged_configs, write_values
from kvjax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Options:
    """For these tests."""

    mesh: MeshShape = MeshShape()
    lengths: tuple[int, ...] = (1, 2)
    learning_rate: float = 0.1
    folder: Path | None = None
    fast: bool = False
    name: str = "plain"


def write(tmp_path, text):
    file = tmp_path / "options.yaml"
    file.write_text(text)
    return str(file)


def test_values_over_the_defaults(tmp_path):
    file = write(
        tmp_path, "mesh: 4x2\nlengths: [4, 5, 6]\nlearning-rate: 1e-3\nfolder: some/where\nfast: true\n"
    )
    assert load_config(Options, file) == Options(
        MeshShape(1, 4, 2), (4, 5, 6), 1e-3, Path("some/where"), True, "plain"
    )
    assert load_config(Options, write(tmp_path, "mesh: 8"), Options(name="other")).name == "other"


def test_what_is_written_is_read_back(tmp_path):
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
    ],
)
def test_a_wrong_file_is_one_line_that_names_it(tmp_path, text, parts):
    file = write(tmp_path, text)
    with pytest.raises(UserError) as error:
        load_config(Options, file)
    line = str(error.value)
    assert "\n" not in line
    assert all(part in line for part in [file, *parts]), line


def test_packaged_configs_are_found_by_name_and_by_file_name():
    assert find_config("builtin") == packaged_configs() / "builtin.yaml"
    assert find_config("configs/builtin.yaml").name == "builtin.yaml"
    with pytest.raises(UserError, match="no-such.*comes with builtin"):
        find_config("no-such")


def test_given_takes_the_last():
    args = ["--a", "1", "--b=2", "--a=3", "--c"]
    assert (
        find_value(args, "--a"),
        find_value(args, "--b"),
        find_value(args, "--c"),
        find_value(args, "--d"),
    ) == (
        "3",
        "2",
        None,
        None,
    )
