"""Files that hold no JSON object."""

import pytest

from kvjax.errors import UserError
from kvjax.models import read_config


def test_files_that_are_no_config(tmp_path):
    for text, message in (("{", "cannot be read as JSON"), ("[]", "expected a JSON object, got list")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UserError, match=message):
            read_config(tmp_path)
