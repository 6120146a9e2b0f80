"""JSON objects of files. Every failed look-up raises one line that names the file."""

import dataclasses
import json
import os
import stat
from pathlib import Path
from typing import Any

from kvjax.errors import LARGEST_FLOAT, LARGEST_INT, UserError, shown
from kvjax.files import not_utf8

JSON_BYTES = 16 << 20
"""The maximum size of a JSON file other than a vocabulary."""
VOCABULARY_BYTES = 128 << 20
"""The maximum size of a vocabulary. Gemma 3's, with 262,144 tokens, has 33 MB."""


def read_file(file: Path, most: int) -> bytes:
    """Return the content of a regular file of at most `most` bytes.

    Raises UserError for a larger file and for pipes and devices, which may be endless, and FileNotFoundError if there
    is no file.
    """
    try:
        # without O_NONBLOCK, opening a pipe would wait for its writer
        with open(file, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as opened:
            status = os.fstat(opened.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise UserError(f"{file}: is not a regular file")
            if status.st_size > most:
                raise UserError(f"{file}: has {status.st_size:,} bytes, expected at most {most:,}")
            return opened.read(status.st_size)
    except FileNotFoundError:
        if file.is_symlink():
            raise UserError(f"{file}: is a link to nothing") from None
        raise
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror or error})") from None


@dataclasses.dataclass(frozen=True)
class JsonObject:
    """A JSON object and where it was read from. Every failure is a UserError that says where."""

    data: dict[str, Any]
    """The values by key."""
    where: str
    """The file and the keys that lead to the object, for messages."""

    @classmethod
    def read(cls, file: Path, most: int = JSON_BYTES) -> "JsonObject":
        """Read a file of at most `most` bytes."""
        try:
            return cls.parse(read_file(file, most), str(file))
        except FileNotFoundError:
            raise UserError(f"{file.parent}: not a model folder, it has no {file.name}") from None

    @classmethod
    def parse(cls, text: bytes, where: str) -> "JsonObject":
        """Parse UTF-8, with or without a byte-order mark."""
        try:
            data = json.loads(text.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            raise UserError(
                f"{where}: {not_utf8(text[:2], error.object[error.start], error.start)}"
            ) from None
        except (ValueError, RecursionError) as error:
            why = "nested too deeply" if isinstance(error, RecursionError) else error
            raise UserError(f"{where}: cannot be read as JSON ({why})") from None
        if not isinstance(data, dict):
            raise UserError(f"{where}: expected a JSON object, got {type(data).__name__}")
        return cls(data, where)

    def get(self, name: str, kind: type, *default: Any) -> Any:
        """Return the value of `name`. Null counts as missing, and whole numbers are accepted as floats."""
        value = self.data.get(name)
        if value is None:
            if default:
                return default[0]
            raise self.error(f"{name} is missing")
        accepted = (int, float) if kind is float else kind
        if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
            raise self.error(f"{name} must be {kind.__name__}, got {shown(value)}")
        if kind is float and not -LARGEST_FLOAT <= value <= LARGEST_FLOAT:
            raise self.error(f"{name} must be a finite number, got {shown(value)}")
        if kind is int and not -(2**63) <= value < 2**63:
            raise self.error(f"{name} must be a whole number of 64 bits, got {shown(value)}")
        return kind(value)

    def ids(self, name: str) -> list[int]:
        """Return the token ids under `name` as a list. The file may have one id, a list, or none."""
        value = self.data.get(name)
        value = value if isinstance(value, list) else [value] if value is not None else []
        if len(value) > 1000 or any(type(i) is not int or not 0 <= i <= LARGEST_INT for i in value):
            raise self.error(f"{name} must be a token id or a list of them, got {shown(value)}")
        return value

    def error(self, message: str) -> UserError:
        return UserError(f"{self.where}: {message}")


def write_json(file: Path, data: Any) -> None:
    """Write indented JSON and wait until it is on the disk."""
    with file.open("w", encoding="utf-8") as out:
        json.dump(data, out, indent=2)
        out.write("\n")
        out.flush()
        os.fsync(out.fileno())
