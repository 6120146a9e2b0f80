"""Ahead-of-time compilation for accelerators that this machine does not have.

TPU: the whole compiler, from `libtpu`. It prints to stderr, takes a lock, and reads its settings from the environment
when it is first used, so run it in a separate process, started with `ENVIRONMENT`.
CUDA: lowering, which needs nothing, and XLA's compiler if `CUDA_PACKAGES` are installed.
"""

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

TPUS = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
"""The smallest slice of each chip."""

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_ENABLE_COMPILATION_CACHE": "false",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "false",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
    "XLA_FLAGS": "",
}
"""Variables that keep libtpu from looking for a TPU machine, and both compilers from flags meant for other programs."""

CUDA_PACKAGES = ("jax-cuda12-plugin", "jax-cuda12-pjrt", "nvidia-cuda-nvcc-cu12")


@functools.cache
def tpu_mesh(chip: str) -> Mesh:
    """Return a mesh of one chip."""
    if chip not in TPUS:
        raise ValueError(f"chip {chip!r}: expected one of {', '.join(TPUS)}")
    devices = topologies.get_topology_desc(platform="tpu", topology_name=TPUS[chip]).devices
    return Mesh(devices[:1], ("chip",), axis_types=(AxisType.Explicit,))


def compile_for_tpu(chip: str, function: Callable, *args: Any, donate: tuple[int, ...] = ()) -> Any:
    """Compile `function` for one chip. `args` are pytrees of arrays or `jax.ShapeDtypeStruct`s."""
    return _compile("tpu", tpu_mesh(chip), function, args, donate)


def _compile(platform, mesh, function, args, donate=()):
    whole = NamedSharding(mesh, P())
    with jax.set_mesh(mesh):
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), args)
        traced = jax.jit(function, donate_argnums=donate, out_shardings=whole).trace(*shapes)
        return traced.lower(lowering_platforms=(platform,)).compile()


def lower_for_cuda(function: Callable, *args: Any, kind: str = "NVIDIA H100 80GB HBM3") -> str:
    """Return the StableHLO of `function` for an NVIDIA GPU, with its kernels lowered."""
    device = AbstractDevice(device_kind=kind, num_cores=None, platform="gpu")
    mesh = AbstractMesh((1,), ("chip",), axis_types=(AxisType.Explicit,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


H100 = """
platform_name: "CUDA"
device_description_str: "NVIDIA H100 80GB HBM3"
gpu_device_info {
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  memory_bandwidth: 3352320000000
  device_memory_size: 84942979072
  l2_cache_size: 52428800
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
}
"""
"""The description of an H100 for XLA. XLA divides by these numbers, so none may be missing."""


def cuda_compiler() -> Path:
    """Return the path of the assembler `ptxas`. Raise FileNotFoundError if one of `CUDA_PACKAGES` is not installed."""
    specs = [_spec(name) for name in ("jax_cuda12_plugin", "jax_plugins.xla_cuda12", "nvidia.cuda_nvcc")]
    for package, spec in zip(CUDA_PACKAGES, specs, strict=True):
        if spec is None:
            raise FileNotFoundError(
                f"compiling for CUDA needs {', '.join(CUDA_PACKAGES)}; {package} is not installed"
            )
    return Path(next(iter(specs[-1].submodule_search_locations))) / "bin" / "ptxas"


def _spec(name: str) -> Any:
    """Return the result of `find_spec`, or None if a parent package is missing, for which it would raise."""
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError:
        return None


def compile_for_cuda(function: Callable, *args: Any, donate: tuple[int, ...] = ()) -> Any:
    """Compile `function` for one H100. The arguments are those of `compile_for_tpu`."""
    cuda_compiler()
    devices = topologies.get_topology_desc(platform="cuda", target_config=H100, topology="1x1x1").devices
    mesh = Mesh(devices, ("chip",), axis_types=(AxisType.Explicit,))
    return _compile("cuda", mesh, function, args, donate)
