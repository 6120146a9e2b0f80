"""Cases for which the kernels of `mlstm` are compiled, and a run of the TPU kernels that detects races."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from pallas_kernels.mlstm import Memory, empty_memory, mlstm
from pallas_kernels.mlstm.reference import reference


def case(b, k, t, d, e, normaliser="plain", gradient=False):
    """Return a case that starts from a memory and, if `gradient`, computes the gradient with respect to all
    arguments."""

    def call(memory, *args):
        return mlstm(*args, memory, normaliser=normaliser)

    def gradients(*args):
        def total(*args):
            return sum(x.sum() for x in jax.tree.leaves(call(*args)))

        return jax.grad(total, tuple(range(len(args))))(*args)

    shapes = *((b, k, t, x) for x in (d, d, e)), (b, k, t), (b, k, t)
    memory = Memory(*map(argument, ((b, k, d, e), (b, k, d), (b, k))))
    return gradients if gradient else call, (memory, *map(argument, shapes)), ()


def argument(shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def on_shards(*args):
    """Run inside `shard_map`, with its axes checked."""
    call = case(2, 2, 300, 128, 64, gradient=True)[0]
    args = jax.tree.map(lambda x: jax.reshard(x, P("chip", *(None,) * (x.ndim - 1))), args)
    outputs = jax.shard_map(call, out_specs=P("chip"))(*args)
    return jax.tree.map(lambda x: jax.reshard(x, P()), outputs)


COMPILE = {
    "training, 8192 tokens": case(1, 8, 8192, 128, 64, gradient=True),
    "prefill of 131072 tokens": case(1, 2, 1 << 17, 128, 64),
    "widths that fill no lanes": case(2, 2, 300, 24, 5, "xlstm", gradient=True),
    "keys of 256": case(1, 2, 1000, 256, 128, gradient=True),
    "the widest": case(1, 1, 300, 512, 512, "xlstm", gradient=True),
    "on shards": (on_shards, case(2, 2, 300, 128, 64)[1], ()),
    "a token, in XLA": case(4, 8, 1, 128, 64),
}
MOST_TEMPORARIES = {"training, 8192 tokens": 80 << 20, "prefill of 131072 tokens": 8 << 20}
"""In training, temporaries hold the outputs, half of the keys' 34 MB, and the memories of 64 chunks, 19 MB, unless
vector memory holds them. The weights of all pairs of tokens would be 2 GB."""

BUGS = {
    "the memory of the row before": ("memory_ref[...] = memory0_ref[...]", "pass"),
    "the gradient of the memory of the row before": ("dmemory_ref[...] = after_ref[...]", "pass"),
    "the memory does not decay": ("gates.kept * memory", "memory"),
    "a chunk of the block left out": ("reversed(range(form.chunks))", "reversed(range(1, form.chunks))"),
    "the m of the chunk before": ("m_ref[0, 0, first + c]", "m_ref[0, 0, jnp.maximum(first + c - 1, 0)]"),
}


def interpreted(kernel, interpret) -> float:
    """Return the worst error of values and gradients. There are several blocks of two chunks, the last of which is
    partly filled, and the rows have different memories."""
    kernel.BLOCK = 2
    b, k, t, d, e = 1, 2, 300, 16, 8
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=(b, k, *shape)), jnp.float32)  # noqa: E731
    args = jnp.abs(draw(t, d)), jnp.abs(draw(t, d)), draw(t, e), 2 * draw(t), -jnp.abs(draw(t)) / 3
    memory = reference(*(x[:, :, :9] for x in args), empty_memory(b, k, d, e), "plain", None)[1]
    weights = draw(t, e)

    def value_and_gradients(form):
        def total(args, c, z):
            h, after = form(*args, Memory(c, z, memory.m), "plain", None)
            scale = jnp.exp(after.m)[..., None]  # c and z alone depend on the stabiliser.
            memory_terms = (after.c * scale[..., None]) ** 2, after.z * scale
            return (h * weights).sum() + sum(x.sum() for x in memory_terms), (h, after)

        (_, outputs), gradients = jax.jit(jax.value_and_grad(total, (0, 1, 2), has_aux=True))(
            args, memory.c, memory.z
        )
        return outputs, gradients

    actual = jax.tree.leaves(value_and_gradients(functools.partial(kernel.tpu, interpret=interpret)))
    expected = jax.tree.leaves(value_and_gradients(reference))
    errors = [
        jnp.abs(x - y).max() / jnp.maximum(1, jnp.abs(y).max()) for x, y in zip(actual, expected, strict=True)
    ]
    return float(jnp.stack(errors).max())
