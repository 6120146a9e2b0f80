"""Safetensors files, and who may read them."""

import os
import stat

import numpy as np
import pytest
from safetensors.numpy import load_file

from kvjax.policies.admission.wgkv import save_gates
from kvjax.write_tensors import write_tensors
from tests.tiny_models import tiny_gates, tiny_model


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640)])
def test_the_umask_decides_who_may_read(umask, mode, tmp_path):
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    before = os.umask(umask)
    try:
        write_tensors(tmp_path / "x.safetensors", {"x": x.T}, {"format": "pt"})
        save_gates(tmp_path / "gates", tiny_gates(tiny_model()), {})
    finally:
        os.umask(before)
    for file in (tmp_path / "x.safetensors", tmp_path / "gates" / "gates.safetensors"):
        assert stat.S_IMODE(file.stat().st_mode) == mode
    np.testing.assert_array_equal(load_file(tmp_path / "x.safetensors")["x"], x.T)
