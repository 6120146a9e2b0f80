"""The op `stack_product`: a product with one layer's weights, which lie in a stack."""

from jaxtyping import Array, Float, Float32, Int, Shaped

from pallas_kernels.choose import choose
from pallas_kernels.eight_bits import EIGHT_BITS
from pallas_kernels.stack_product.gpu import gpu
from pallas_kernels.stack_product.reference import reference
from pallas_kernels.stack_product.xla import xla
from pallas_kernels.supported import overflows
from pallas_kernels.varying import alike

IMPLEMENTATIONS = {"xla": xla, "reference": reference, "gpu": gpu}
FASTEST = {"cpu": "xla", "tpu": "xla", "gpu": "gpu"}
"""The default of each backend. With "xla" a TPU reads the slice in place, and a CPU copies it for more than one row."""
MOST_ROWS = 64
"""The most rows that the GPU kernel takes. With more rows, copying the weights costs little compared to the product."""


def stack_product(
    x: Float[Array, "m d"],
    stack: Shaped[Array, "l d f"],
    layer: Int[Array, ""],
    scale: Float32[Array, "l n f"] | None = None,
    *,
    implementation: str | None = None,
) -> Float32[Array, "m f"]:
    """Return `x · stack[layer]` with sums in float32. On GPU and TPU the layer's weights are not copied.

    The GPU kernel is not differentiable.

    Args:
        stack: the weights of all layers, in the dtype of `x`, in int8 or in float8_e4m3fn.
        layer: the index of the layer, from 0 to l - 1.
        scale: the scales of 8-bit weights, one for each output and each of n equal blocks of inputs.
        implementation: "xla", "gpu" (at most `MOST_ROWS` rows, float32 or bfloat16; an 8-bit stack of 2 to 4 GiB is
            computed by "xla") or "reference". None: the platform's default.

    Raises:
        ValueError: shapes or dtypes disagree, the implementation is unknown, or a kernel does not take the number of
            rows or the dtype.
    """
    call = choose(IMPLEMENTATIONS, implementation, "stack_product", FASTEST)
    dtypes = [x.dtype] if scale is None else [*EIGHT_BITS.values()]
    if x.shape[1] != stack.shape[1] or stack.dtype not in dtypes:
        raise ValueError(
            f"stack_product: stack {stack.dtype}{stack.shape} does not go with x {x.dtype}{x.shape}"
        )
    if call is gpu and overflows(stack):
        call = xla
    if call is gpu and x.shape[0] > MOST_ROWS:
        raise ValueError(
            f"stack_product: implementation 'gpu' takes at most {MOST_ROWS} rows, not {x.shape[0]}"
        )
    if scale is not None and (scale.shape[::2] != stack.shape[::2] or stack.shape[1] % scale.shape[1]):
        raise ValueError(f"stack_product: scale {scale.shape} does not go with stack {stack.shape}")
    return call(*alike(x, stack, layer, scale))
