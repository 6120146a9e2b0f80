"""vLLM's decoding on a TPU, its ragged paged attention v3, if it is installed (`pip install --no-deps tpu-inference`).

All kv heads of a sequence share its pages there. Heads with lengths of their own it decodes "apart": each as a sequence
of one kv head. It also writes the new token, whose page it has read anyway.
"""

import functools
import importlib
import sys
from collections.abc import Callable
from importlib.util import find_spec, module_from_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

PACKAGE = "tpu_inference"
NAME = "RPAd"
"""Of its kernel, as programs have it."""
BLOCKS = {"apart": (1024, 4096), "together": (1024, 2048)}
"""Keys of its blocks that are tried: of 1024, 2048 and 4096 the best on v6e for short rows, and for long ones."""
MIXED = 128
"""Of the kernel for prompts, which the same call compiles and nobody counts."""
GENERATION = {"v5e": 5, "v6e": 6}
VMEM = 100 << 20


def installed() -> bool:
    return find_spec(PACKAGE) is not None


@functools.cache
def _kernel() -> Any:
    """The kernel's module: the package itself would import vLLM."""
    spec = find_spec(PACKAGE)
    if spec is None:
        raise ModuleNotFoundError(f"{PACKAGE} is not installed")
    sys.modules[PACKAGE] = module_from_spec(spec)
    return importlib.import_module(f"{PACKAGE}.kernels.ragged_paged_attention.v3.kernel")


def decoding(
    chip: str, sequences: int, heads: int, group: int, h: int, page: int, keys: int, block: int
) -> tuple[Callable, list[jax.ShapeDtypeStruct]]:
    """A token of each sequence over at most `keys` keys, in bfloat16, and its arguments."""
    module = _kernel()
    # which asks the devices that are here
    module.get_tpu_version = lambda: GENERATION[chip]
    pages = sequences * keys // page
    mixed = max(page, MIXED)

    def call(*args):
        return module.ragged_paged_attention(
            *args,
            sm_scale=h**-0.5,
            d_block_sizes=(1, block, 1, block),
            m_block_sizes=(8, mixed, 8, mixed),
            vmem_limit_bytes=VMEM,
        )

    new = (sequences, heads, h)
    wide = ((sequences, heads * group, h), new, new, (pages, page, heads, 2, h))
    narrow = (sequences,), (pages,), (sequences + 1,), (3,)
    return call, [
        *(jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in wide),
        *(jax.ShapeDtypeStruct(x, jnp.int32) for x in narrow),
    ]


def operands(sequences: int, pages: int, length: int) -> dict[int, np.ndarray]:
    """The kernel's first ones, for sequences of `length` keys each, of at most `pages` pages."""
    given = (
        np.full(sequences, length),
        np.arange(sequences * pages),
        np.arange(sequences + 1),
        np.full(3, sequences),  # all of them decode
        np.zeros(3),
        np.full(4, -1),
        np.full(6, -1),
    )
    return {at: np.pad(x.astype(np.int32), (0, -len(x) % 1024)) for at, x in enumerate(given)}
