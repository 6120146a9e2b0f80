"""Checks of the arguments of the kernels of `paged_decode`."""

import jax.numpy as jnp

from pallas_kernels.supported import require, require_attention


def check_supported(
    implementation: str, q, pool, page_table, *, page_multiple: int = 1, columns: int = 1 << 31
):
    """Raise ValueError unless the kernels take arguments of these shapes and dtypes."""
    page = pool.shape[1]
    require_attention("paged_decode", implementation, q, **({} if pool.dtype == jnp.int8 else {"pool": pool}))
    require(
        "paged_decode",
        implementation,
        (page % page_multiple == 0, f"pages of a multiple of {page_multiple} entries, not {page}"),
        (page_table.shape[2] <= columns, f"at most {columns} columns of pages, not {page_table.shape[2]}"),
    )
