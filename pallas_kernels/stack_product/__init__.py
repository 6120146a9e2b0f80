"""Products with one layer's weights, which are read where they lie in the stack of all layers.

api: the op. xla: a slice and a product. gpu: without the slice, of which XLA makes a copy there. reference: what the op
means.
"""

from pallas_kernels.stack_product.api import MOST_ROWS, stack_product

__all__ = ["MOST_ROWS", "stack_product"]
