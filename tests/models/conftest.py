"""A fixture that writes a config.json and reads it."""

import json

import pytest

from kvjax.models import read_config


@pytest.fixture
def read(tmp_path):
    def read(config, max_length=None, **generation):
        (tmp_path / "config.json").write_text(json.dumps(config))
        if generation:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return read_config(tmp_path, max_length)

    return read
