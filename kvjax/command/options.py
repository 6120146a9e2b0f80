"""YAML files of numbers over a command's defaults, under its command line: one meaning, one set of error messages."""

import dataclasses
import difflib
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from kvjax.command.launch import parse_command
from kvjax.errors import UserError
from kvjax.files import write_text

T = TypeVar("T")


def packaged_configs() -> Path:
    """The folder of the configs that come with kvjax: inside the package, or beside it in a working tree."""
    package = Path(__file__).parent.parent
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def find_config(name: str) -> Path:
    """A YAML file by its path, or one that comes with kvjax by its name (`qwen3-4b`).

    Raises UserError naming the ones that come with kvjax if there is no such file.
    """
    packaged = packaged_configs() / f"{Path(name).stem if name.endswith('.yaml') else name}.yaml"
    for candidate in (Path(name), packaged):
        if candidate.is_file():
            return candidate
    known = ", ".join(sorted(path.stem for path in packaged_configs().glob("*.yaml")))
    raise UserError(f"--config {name}: there is no such file; kvjax comes with {known}")


def load_config(cls: type[T], name: str, default: T | None = None) -> T:
    """The dataclass `cls` with the values of a YAML file over `default`'s.

    Values are read exactly as the command line's are; keys are the options' names, `_` or `-` alike.

    Raises:
        UserError: no such file, no YAML mapping, an unknown key (with the nearest known), or a value of another type.
    """
    file = find_config(name)
    values = read_values(file)
    known = {field.name.rstrip("_"): field for field in dataclasses.fields(cls)}  # pyright: ignore[reportArgumentType]
    args: list[str] = []
    for key, value in values.items():
        option = str(key).replace("-", "_")
        if option not in known or option == "config":
            near = difflib.get_close_matches(option, known) or sorted(known)
            raise UserError(f"{file}: unknown key {key!r}; the nearest known: {', '.join(near)}")
        values_of = value if isinstance(value, list) else [value]
        if any(x is None or isinstance(x, dict | list) for x in values_of):
            raise UserError(f"{file}: {key} must be a value or a list of values, got {value!r}")
        if known[option].type in (bool, "bool") and not isinstance(value, bool):
            raise UserError(f"{file}: {key} must be true or false, got {value!r}")
        args += _as_arguments(option.replace("_", "-"), value)
    try:
        return parse_command(cls, args, default=default)
    except UserError as error:
        raise UserError(f"{file}: {error}") from None


def find_value(args: Sequence[str], option: str) -> str | None:
    """The last value that a command line gives an option, before it is parsed; None where it gives none."""
    value = None
    for arg, following in itertools.zip_longest(args, args[1:]):
        if arg == option:
            value = following
        elif arg.startswith(option + "="):
            value = arg.removeprefix(option + "=")
    return value


def write_values(file: Path, config: Any, *, omit: Sequence[str] = (), new: bool = False) -> None:
    """Write a dataclass as the YAML that `load_config` reads, without the fields in `omit` and those that are None.

    Raises FileExistsError if the file is to be `new` and is not.
    """
    import yaml

    values = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in omit and value is not None:
            plain = isinstance(value, bool | int | float | str)
            values[field.name.rstrip("_")] = (
                list(value) if isinstance(value, tuple) else value if plain else str(value)
            )
    write_text(file, yaml.safe_dump(values, sort_keys=False, allow_unicode=True), new=new)


def read_values(file: Path) -> dict[Any, Any]:
    """A YAML mapping. Raises UserError if the file is none."""
    import yaml

    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{file}: cannot be read as YAML ({' '.join(str(error).split())})") from None
    if not isinstance(values, dict):
        raise UserError(f"{file}: expected `key: value` lines, found {type(values).__name__}")
    return values


def _as_arguments(option: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{option}" if value else f"--no-{option}"]
    return [f"--{option}", *map(str, value if isinstance(value, list) else [value])]
