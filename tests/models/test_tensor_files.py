"""A safetensors file that is cut off."""

import pytest

from tests.models.cases import LLAMA, write_folder
from tests.models.refusals import error


@pytest.mark.parametrize("kept", [0, 5, 300, -1])
def test_a_truncated_file_is_named(kept, tmp_path):
    file = write_folder(tmp_path, LLAMA) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    assert error(tmp_path).startswith(f"{file}: not a whole safetensors file")
