"""JSON objects whose every failed look-up is one line that names the file."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from kvjax.errors import UserError


@dataclasses.dataclass(frozen=True)
class JsonObject:
    """A JSON object and where it stands. Every failure is a UserError that says so."""

    data: dict[str, Any]
    """By key."""
    where: str
    """The file, and the keys on the way, for messages."""

    @classmethod
    def read(cls, file: Path) -> "JsonObject":
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UserError(f"{file.parent}: not a model folder, it has no {file.name}") from None
        except (OSError, ValueError) as error:
            raise UserError(f"{file}: cannot be read as JSON ({error})") from None
        if not isinstance(data, dict):
            raise UserError(f"{file}: expected a JSON object, got {type(data).__name__}")
        return cls(data, str(file))

    def get(self, name: str, kind: type, *default: Any) -> Any:
        """The value of `name`. Null counts as missing, whole numbers as floats."""
        value = self.data.get(name)
        if value is None:
            if default:
                return default[0]
            raise self.error(f"{name} is missing")
        accepted = (int, float) if kind is float else kind
        if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
            raise self.error(f"{name} must be {kind.__name__}, got {value!r}")
        return kind(value)

    def ids(self, name: str) -> list[int]:
        """One token id, several, or none."""
        value = self.data.get(name)
        value = value if isinstance(value, list) else [value] if value is not None else []
        if any(type(i) is not int for i in value):
            raise self.error(f"{name} must be a token id or a list of them, got {value!r}")
        return value

    def error(self, what: str) -> UserError:
        return UserError(f"{self.where}: {what}")


def write_json(file: Path, data: Any) -> None:
    """Write indented JSON and wait until it is on the disk."""
    with file.open("w", encoding="utf-8") as out:
        json.dump(data, out, indent=2)
        out.write("\n")
        out.flush()
        os.fsync(out.fileno())
