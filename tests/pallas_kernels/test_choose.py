"""Tests of the choice of the implementation."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.ahead import lower_for_cuda
from pallas_kernels.choose import BY_PLATFORM, choose, target
from pallas_kernels.vertical_slash import vertical_slash

NAMES = {"xla": float, "tpu": int, "gpu": str, "reference": bool}
x = jax.ShapeDtypeStruct((1, 2, 64, 32), jnp.bfloat16)


def attend(q):
    return vertical_slash(q, q, q, window=8)


def test_a_gpu_gets_its_own_kernel():
    """The devices of the mesh decide, and they need not be here."""
    program = lower_for_cuda(attend, x)
    assert "triton" in program
    assert "stablehlo.dot_general" not in program


def test_a_cpu_gets_xla():
    assert target().platform == "cpu"
    assert choose(NAMES, None, "op") is float
    assert "triton" not in jax.jit(attend).lower(x).as_text()


def test_the_named_implementation_is_chosen():
    assert [choose(NAMES, name, "op") for name in NAMES] == list(NAMES.values())
    assert choose(NAMES, None, "op", BY_PLATFORM | {"cpu": "gpu"}) is str


def test_a_platform_without_a_kernel_is_refused_in_one_line():
    with pytest.raises(ValueError, match="^op: no implementation for platform 'cpu', only for tpu$"):
        choose(NAMES, None, "op", {"tpu": "tpu"})
    with pytest.raises(
        ValueError, match="^op: there is no implementation 'cuda', only xla, tpu, gpu, reference$"
    ):
        choose(NAMES, "cuda", "op")


@pytest.mark.parametrize(
    ("kind", "q_dtype", "dtype", "head_dim", "kernel"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", None, 128, "mosaic_gpu"),
        ("NVIDIA H200", "bfloat16", None, 64, "mosaic_gpu"),
        ("NVIDIA H100 80GB HBM3", "bfloat16", "float32", 128, "mosaic_gpu"),
        ("NVIDIA H100 80GB HBM3", "float32", None, 128, "triton"),
        ("NVIDIA H100 80GB HBM3", "bfloat16", None, 96, "triton"),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", None, 128, "triton"),
    ],
)
def test_the_default_kernel_of_each_gpu(kind, q_dtype, dtype, head_dim, kernel):
    q, k = (jax.ShapeDtypeStruct((1, heads, 256, head_dim), q_dtype) for heads in (4, 2))
    program = lower_for_cuda(lambda q, k: vertical_slash(q, k, k, window=8, dtype=dtype)[0], q, k, kind=kind)
    assert [name for name in ("mosaic_gpu", "triton") if name in program] == [kernel]
