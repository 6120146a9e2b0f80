"""Test that `pytest -m real` tests a real model or fails."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def test_real_marker_without_a_model_is_an_error():
    env = {name: text for name, text in os.environ.items() if name != "KVJAX_REAL_MODEL"}
    command = [sys.executable, "-m", "pytest", "-m", "real", "tests/real"]
    ended = subprocess.run(command, env=env, cwd=Path(__file__).parent.parent, capture_output=True, text=True)
    assert ended.returncode == pytest.ExitCode.USAGE_ERROR
    assert (
        ended.stderr.strip() == "ERROR: -m real: KVJAX_REAL_MODEL is not set, so that nothing would be tested"
    )
