"""Reading a file that an option names."""

from pathlib import Path

from kvjax.errors import UserError


def read_text(file: Path, option: str) -> str:
    """The file's text. Raises `UserError`, which names the option, if it cannot be read as UTF-8 text."""
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{option} {file}: cannot be read ({error.strerror or error})") from None
    except UnicodeDecodeError:
        raise UserError(f"{option} {file}: is not UTF-8 text") from None
