"""YAML files of a command's options. They override its defaults, and the command line overrides them. Values are parsed
like the command line's, with the same error messages."""

import dataclasses
import datetime
import difflib
import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from kvjax.cli.launch import parse_command
from kvjax.errors import UserError, shown
from kvjax.files import is_there, read_text, write_text

T = TypeVar("T")

LARGEST_CONFIG = 1 << 18
"""The maximum bytes of a YAML file."""
NEGATIVE_NUMBER = re.compile(r"-\.?\d.*")


def packaged_configs() -> Path:
    """Return the folder of the configs that come with kvjax. It is in the package, or next to it in a working tree."""
    package = Path(__file__).parent.parent
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def find_config(name: str) -> Path:
    """Return a YAML file, given its path, or the name (`qwen3-4b`) of one that comes with kvjax.

    Raises UserError if there is no such file; the message has the nearest names.
    """
    packaged = packaged_configs() / f"{Path(name).stem if name.endswith('.yaml') else name}.yaml"
    for candidate in (Path(name), packaged):
        if is_there(candidate, "--config") and not candidate.is_dir():
            return candidate
    folder = packaged_configs()
    known = [str(path.relative_to(folder).with_suffix("")) for path in folder.rglob("*.yaml")]
    near = difflib.get_close_matches(name, known, n=5, cutoff=0.0)
    raise UserError(
        f"--config {name}: there is no such file; the nearest that come with kvjax: {', '.join(near)}"
    )


def load_config(cls: type[T], name: str, default: T | None = None) -> T:
    """Return the dataclass `cls` with the values of a YAML file. `default` has the values of missing keys.

    Values are parsed exactly like the command line's. Keys are the options' names, with `_` or `-`.

    Raises:
        UserError: the file does not exist or is not a YAML mapping, a key is unknown, or a value has the wrong type.
    """
    file = find_config(name)
    values = read_values(file)
    known = {field.name.rstrip("_"): field for field in dataclasses.fields(cls)}  # pyright: ignore[reportArgumentType]
    args: list[str] = []
    for option, value in values.items():
        if option not in known or option == "config":
            near = difflib.get_close_matches(option, known) or sorted(known)
            raise UserError(f"{file}: unknown key {shown(option)}; the nearest known: {', '.join(near)}")
        if known[option].type in (bool, "bool") and not isinstance(value, bool):
            raise UserError(f"{file}: {option} must be true or false, got {shown(value)}")
        args += _as_arguments(option, value, file)
    try:
        return parse_command(cls, args, default=default)
    except UserError as error:
        raise UserError(f"{file}: {error}") from None


def find_value(args: Sequence[str], option: str) -> str | None:
    """Return the last value of an option in an unparsed command line; None if the option is missing. Its name may be
    written with `_` for `-`, as the parser accepts it."""
    value = None
    for arg, following in itertools.zip_longest(args, args[1:]):
        name, equals, rest = arg.partition("=")
        if name.replace("_", "-") == option:
            value = rest if equals else following
    return value


def write_values(file: Path, config: Any, *, omit: Sequence[str] = (), new: bool = False) -> None:
    """Write a dataclass as YAML for `load_config`, without the fields in `omit` and those that are None.

    Raises FileExistsError if `new` is True and the file exists.
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


def read_values(file: Path) -> dict[str, Any]:
    """Return the values of a YAML mapping by option, with `_` for `-`. A value is a string, number or boolean, a list
    of these, or a mapping (of policies).

    Nothing else is accepted, so that no file takes more work than its size. Raises UserError.
    """
    import yaml

    loader = yaml.SafeLoader(read_text(file, "--config", most=LARGEST_CONFIG))
    values: dict[str, Any] = {}
    try:
        root = loader.get_single_node()
        if not isinstance(root, yaml.MappingNode):
            raise UserError(f"{file}: expected `key: value` lines")
        seen: set[int] = set()
        for key, node in root.value:
            option = str(key.value).replace("-", "_") if isinstance(key, yaml.ScalarNode) else "a key"
            if option in values:
                raise UserError(f"{file}: gives {shown(option)} twice")
            try:
                values[option] = _plain(loader, node, seen)
            except UserError as error:
                raise UserError(f"{file}: {shown(option)} {error}") from None
    except UserError:
        raise
    except Exception as error:  # RecursionError, and errors of a tag's constructor
        raise UserError(f"{file}: cannot be read as YAML ({error or type(error).__name__})") from None
    return values


def _plain(loader: Any, node: Any, seen: set[int], inside: bool = False) -> Any:
    """Return the value of a node. `seen`: the ids of lists and mappings that were read, which may not occur again (as
    an alias). `inside`: the value is in a mapping, where null is allowed."""
    import yaml

    if isinstance(node, yaml.ScalarNode):
        value = loader.construct_object(node)
        if not (isinstance(value, str | int | float | datetime.date) or (inside and value is None)):
            raise UserError("must be a value or a list of values")
        if isinstance(value, int) and value.bit_length() > 64:
            raise UserError("is too large a number")
        return value
    if id(node) in seen or node.tag not in ("tag:yaml.org,2002:seq", "tag:yaml.org,2002:map"):
        raise UserError("must be a value or a list of values")
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        return [_plain(loader, x, seen, inside=inside) for x in node.value]
    pairs = [(_plain(loader, x, seen), _plain(loader, y, seen, inside=True)) for x, y in node.value]
    mapping = {str(x): y for x, y in pairs}
    if len(mapping) < len(pairs):
        raise UserError("gives a name twice")
    return mapping


def _as_arguments(option: str, value: Any, file: Path) -> list[str]:
    """Return an option as command-line arguments. Raises UserError for a value that would be parsed as another
    option."""
    name = option.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, dict) and option == "policies":  # a mapping of labels to policies
        value = [json.dumps({label: x}, default=str) for label, x in value.items()]
    if isinstance(value, dict) or any(
        isinstance(x, list | dict) for x in (value if isinstance(value, list) else ())
    ):
        raise UserError(f"{file}: {option} must be a value or a list of values")
    texts = list(map(str, value if isinstance(value, list) else [value]))
    if not texts:
        return [f"--{name}"]
    for text in texts[1:]:
        if text.startswith("-") and not NEGATIVE_NUMBER.fullmatch(text):
            raise UserError(f"{file}: no value in the list of {option} may begin with -, got {shown(text)}")
    return [f"--{name}={texts[0]}", *texts[1:]]
