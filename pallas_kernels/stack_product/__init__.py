"""Products with one layer's weights, read in place from the stack of all layers.

api: the op. xla: a slice and a product. gpu: a kernel without the slice, which XLA would copy. reference: the
definition.
"""

from pallas_kernels.stack_product.api import MOST_ROWS, stack_product

__all__ = ["MOST_ROWS", "stack_product"]
