"""Replacements for operations that the interpreter of Mosaic GPU lacks."""

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.vertical_slash import hopper


def product(x, y, axis):
    """Multiply with reads that the interpreter supports. Unlike real reads they need a fence before the memory is
    overwritten."""
    y = y[...]
    plgpu.commit_smem()
    return lax.dot_general(x, y, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32)


def scores(q, k, meanwhile):
    x = product(q[...], k, 1)
    meanwhile()
    return x


INTERPRETED = hopper.Machine(lambda x, layout: x, scores, lambda o, p, v: o + product(p, v, 0))
