"""The environment of all tests: 8 virtual CPU devices, checked array shapes, and a cache of compiled programs.

Processes that tests start inherit this environment, so they share the cache of compiled programs.
"""

import gc
import os
from importlib.metadata import version
from pathlib import Path

from packaging.version import Version

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(Path(__file__).parent.parent / ".jax_cache")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
# Except with a real model, the tests spend nearly all their time compiling. Without LLVM's optimisations, with XLA's
# older way of emitting loops and with programs compiled in one piece, they take less than half. jaxlib 0.11 no longer
# has the older way, and a process ends at a flag that it does not know.
if not os.environ.get("KVJAX_REAL_MODEL"):
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    if Version(version("jaxlib")) < Version("0.11"):
        faster = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {faster}"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["MPLBACKEND"] = "agg"

import jax
import pytest
from jaxtyping import install_import_hook

install_import_hook(["kvjax", "pallas_kernels"], "beartype.beartype")

# Tracing leaves many long-lived objects. Searching them for cycles at Python's default intervals takes 5% of the time.
gc.set_threshold(700, 10, 200)

MAPS = Path("/proc/self/maps")
"""Linux's list of the memory mappings of this process."""

EXPECTED_WARNINGS = [
    # jax 0.11 warns for every kernel for GPUs before Hopper, for which there is no alternative
    "ignore:The Pallas Triton backend is deprecated",
    # kvpress 0.5.5 needs fire below 0.7, which imports pipes
    "ignore:'pipes' is deprecated:DeprecationWarning",
]
"""Filters for warnings that other packages cause, each with its reason."""


@pytest.fixture(autouse=True, scope="module")
def few_programs():
    """Free compiled programs after a test file if there are many.

    Each takes about ten memory mappings. Linux allows a process 65530, beyond which jaxlib crashes.
    """
    yield
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > 15_000:
        jax.clear_caches()


def pytest_configure(config):
    files = os.environ.get("KVJAX_REAL_MODEL"), os.environ.get("KVJAX_GEMMA3")
    if config.option.markexpr.startswith("real") and not any(files):
        raise pytest.UsageError("-m real: KVJAX_REAL_MODEL is not set, so that nothing would be tested")
    for line in EXPECTED_WARNINGS:
        config.addinivalue_line("filterwarnings", line)
