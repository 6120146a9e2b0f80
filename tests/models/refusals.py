"""Error messages for models that cannot be read."""

from pathlib import Path

import pytest

from kvjax.errors import UserError
from kvjax.models import load_model


def error(*args, **kwargs) -> str:
    """Return the one-line error of `load_model` for these arguments."""
    with pytest.raises(UserError) as caught:
        load_model(*args, **kwargs)
    message = str(caught.value)
    return message


def error_in(file: Path) -> str:
    """Return the one-line error for a file, without the file's name in front."""
    with pytest.raises(UserError) as caught:
        load_model(file)
    message = str(caught.value)
    assert message.startswith(str(file))
    return message.removeprefix(f"{file}: ")
