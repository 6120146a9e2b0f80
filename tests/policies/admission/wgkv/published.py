"""Write gates in the layout that WG-KV's authors publish, with random numbers."""

import numpy as np


def published_arrays(*, layers, kv_heads, head_dim, width, seed=0):
    """Return a file's arrays by name: norms of keys before and after RoPE, and two convolutions with kv heads as
    groups."""
    rng = np.random.default_rng(seed)
    shapes = {
        "pre_key_norm.weight": (head_dim,),
        "post_key_norm.weight": (head_dim,),
        "conv1.weight": (kv_heads * width, 2 * head_dim, 1),
        "conv1.bias": (kv_heads * width,),
        "conv2.weight": (kv_heads, width, 1),
        "conv2.bias": (kv_heads,),
    }
    return {
        f"model.layers.{layer}.self_attn.g_predictors.{name}": rng.standard_normal(shape).astype(np.float32)
        for layer in range(layers)
        for name, shape in shapes.items()
    }
