"""Checks of the arguments of kernels. The XLA implementations take any."""

import jax.numpy as jnp

HEAD_DIMS = 32, 64, 96, 128, 256
DTYPES = jnp.float32.dtype, jnp.bfloat16.dtype


def require(op: str, implementation: str, *conditions: tuple[bool, str]) -> None:
    """Raise ValueError for the first condition that does not hold.

    conditions: pairs of a condition and a text that says what is taken and what was given.
    """
    for holds, text in conditions:
        if not holds:
            raise ValueError(
                f"{op}: implementation {implementation!r} takes {text}; implementation='xla' takes any"
            )


def overflows(x) -> bool:
    """Return True if offsets into an array overflow in Triton kernels. jax makes them 64 bits wide above 2**32 bytes
    (`jax/_src/pallas/triton/lowering.py`, 0.10 to 0.12), where it should count 2**31 elements."""
    return 2**31 < x.size <= 2**32 // x.dtype.itemsize


def require_whole(op: str, **arrays) -> None:
    """Raise ValueError unless all arrays (indices, lengths) are integers, not bools. None is skipped."""
    for name, x in arrays.items():
        if x is not None and not jnp.issubdtype(x.dtype, jnp.integer):
            raise ValueError(f"{op}: {name} is {x.dtype}, but must be whole numbers, such as int32")


def require_attention(op: str, implementation: str, q, **others) -> None:
    """Raise ValueError unless the kernels take the head_dim and dtype of q `[… h]`, and `others` have its dtype."""
    h = q.shape[-1]
    require(
        op,
        implementation,
        (h in HEAD_DIMS, f"head_dim {', '.join(map(str, HEAD_DIMS))}, not {h}"),
        (q.dtype in DTYPES, f"float32 or bfloat16, not {q.dtype}"),
        *(
            (x.dtype == q.dtype, f"{name} of q's dtype {q.dtype}, not {x.dtype}")
            for name, x in others.items()
        ),
    )
