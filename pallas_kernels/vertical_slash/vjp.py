"""The gradient of `vertical_slash`, for every implementation that has a forward and a backward pass."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name

SAVED = "vertical_slash"
"""The name of o and lse for `jax.checkpoint_policies.save_only_these_names`. Rematerialisation that saves them does not
repeat the forward pass."""


class Passes(NamedTuple):
    """The forward and backward passes of an implementation.

    `forward(q, k, v, end, log_gate, window, dtype)` returns o, of `dtype`, and lse. `backward(q, k, v, end, log_gate,
    window, o, lse, do, dlse)` returns the gradients of q, k, v and log_gate.
    """

    forward: Callable
    backward: Callable

    def __call__(self, q, k, v, end, log_gate, window, dtype):
        return _attend(self, window, dtype, q, k, v, end, log_gate)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attend(passes, window, dtype, q, k, v, end, log_gate):
    return passes.forward(q, k, v, end, log_gate, window, dtype)


def _forward(passes, window, dtype, *arguments):
    out = passes.forward(*arguments, window, dtype)
    o, lse = jax.tree.map(lambda x: checkpoint_name(x, SAVED), out)
    return (o, lse), (*arguments, o, lse)


def _backward(passes, window, dtype, saved, cotangents):
    *arguments, o, lse = saved
    do, dlse = cotangents
    do = do.astype(arguments[0].dtype)  # It is multiplied with keys and values of this dtype.
    dq, dk, dv, dgate = passes.backward(*arguments, window, o, lse, do, dlse)
    return dq, dk, dv, None, dgate


_attend.defvjp(_forward, _backward)
