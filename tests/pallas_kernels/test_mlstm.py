"""Tests of `mlstm`: the definition, the agreement of its forms with memories and padding, and its gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels.mlstm import empty_memory, mlstm, tpu

B, K, T, D, E = 2, 3, 37, 8, 5
NORMALISERS = "plain", "xlstm"


def inputs(seed=0, tokens=T, dtype=np.float32):
    """Return non-negative features, like a scorer's, and gates that forget within the sequence."""
    rng = np.random.default_rng(seed)
    shape = B, K, tokens
    q, k = (np.abs(rng.standard_normal((*shape, D))) for _ in range(2))
    v = rng.standard_normal((*shape, E))
    log_i, log_f = 2 * rng.standard_normal(shape), -np.abs(rng.standard_normal(shape)) / 3
    return tuple(jnp.asarray(x, dtype) for x in (q, k, v, log_i, log_f))


def by_recurrence(q, k, v, log_i, log_f, normaliser):
    """Compute the paper's equations literally, token by token in float64, without a stabiliser."""
    q, k, v, i, f = (np.asarray(x, np.float64) for x in (q, k, v, log_i, log_f))
    c, z, h = np.zeros((B, K, D, E)), np.zeros((B, K, D)), np.zeros(v.shape)
    for t in range(q.shape[2]):
        forget, take = np.exp(f[:, :, t])[..., None], np.exp(i[:, :, t])[..., None]
        c = forget[..., None] * c + take[..., None] * k[:, :, t, :, None] * v[:, :, t, None]
        z = forget * z + take * k[:, :, t]
        above, below = np.einsum("bkd,bkde->bke", q[:, :, t], c), np.einsum("bkd,bkd->bk", q[:, :, t], z)
        if normaliser == "plain":
            h[:, :, t] = above / below[..., None]
        else:
            h[:, :, t] = above / np.sqrt(D) / np.maximum(np.abs(below) / np.sqrt(D), 1)[..., None]
    return h, c, z


@functools.cache
def compiled(**options):
    return jax.jit(functools.partial(mlstm, **options))


FORMS = {
    "recurrent": {"chunk": 1},
    "chunkwise": {"chunk": 8},
    "parallel": {"chunk": T},
    "reference": {"implementation": "reference"},
    "kernel": {"implementation": "tpu"},
}


@pytest.mark.parametrize("normaliser", NORMALISERS)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_equals_the_recurrence(form, normaliser):
    arguments = inputs()
    h, memory = compiled(**FORMS[form], normaliser=normaliser)(*arguments)
    expected, c, z = by_recurrence(*arguments, normaliser)
    np.testing.assert_allclose(h, expected, atol=1e-5)
    scale = np.exp(np.asarray(memory.m, np.float64))
    np.testing.assert_allclose(np.asarray(memory.c) * scale[..., None, None], c, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(np.asarray(memory.z) * scale[..., None], z, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_a_memory_continues_its_sequence_and_padding_has_no_effect(form):
    arguments = tuple(map(np.asarray, inputs()))
    whole, last = compiled(chunk=8)(*arguments)
    cut = 13
    q, k, v, log_i, log_f = (x[:, :, :cut] for x in arguments)
    pad = lambda x, fill=0.0: np.concatenate([x, np.full_like(x[:, :, :4], fill)], 2)  # noqa: E731
    padded = pad(q), pad(k, np.pi), pad(v, 7.0), pad(log_i, -np.inf), pad(log_f)
    run = compiled(**FORMS[form])
    first, memory = run(*padded)
    second, end = run(*(x[:, :, cut:] for x in arguments), memory)
    first = np.asarray(first)[:, :, :cut]
    np.testing.assert_allclose(np.concatenate([first, second], 2), whole, atol=1e-5)
    for x, y in zip(end, last, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
    nothing = compiled(chunk=2)(*(x[:, :, cut:] for x in padded))
    assert not np.asarray(nothing[0]).any()
    for x, y in zip(nothing[1], empty_memory(B, K, D, E), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    "normaliser",
    [NORMALISERS[0], *(pytest.param(x, marks=pytest.mark.thorough) for x in NORMALISERS[1:])],
)
def test_gradients_equal_the_reference_in_float64(normaliser):
    with jax.enable_x64(True):
        arguments = inputs(dtype=np.float64)
        memory = compiled(implementation="reference")(*inputs(1, 5, np.float64))[1]
        weights = jnp.asarray(np.random.default_rng(2).standard_normal((B, K, T, E)))

        def loss(form, dtype):
            def value(arguments, memory):
                h, after = mlstm(*arguments, memory, normaliser=normaliser, **form)
                scale = jnp.exp(after.m)  # c and z alone depend on the stabiliser.
                return (h * weights).sum() + ((after.z * scale[..., None]) ** 2).sum()

            cast = jax.tree.map(lambda x: np.asarray(x, dtype), (arguments, memory))
            return jax.device_get(jax.jit(jax.grad(value, (0, 1)))(*cast))

        expected = loss(FORMS["reference"], jnp.float64)
        # The stabiliser of a memory has no separate gradient, since it scales both other parts.
        for form in ("chunkwise", "recurrent"):
            actual = loss(FORMS[form], jnp.float64)
            for x, y in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
                np.testing.assert_allclose(x, y, atol=1e-5 * max(1, np.abs(y).max()))


@pytest.mark.parametrize("normaliser", ["plain", pytest.param("xlstm", marks=pytest.mark.thorough)])
def test_the_kernel_equals_the_reference_over_several_blocks(normaliser, monkeypatch):
    """Values, the final memory and the gradients of all arguments are compared with float64. A block has two chunks,
    the last one is partly filled, and there is padding in the middle of the first one."""
    monkeypatch.setattr(tpu, "BLOCK", 2)
    tokens = 290
    q, k, v, log_i, log_f = map(np.array, inputs(tokens=tokens))
    log_i[:, :, 120:140], log_f[:, :, 120:140] = -np.inf, 0
    memory = compiled(implementation="reference")(*inputs(1, 5))[1]
    weights = np.random.default_rng(2).standard_normal((B, K, tokens, E), np.float32)

    def results(implementation, *arguments):
        def value(arguments, memory):
            h, after = mlstm(*arguments, memory, normaliser=normaliser, implementation=implementation)
            scale = jnp.exp(after.m)[..., None]  # c and z alone depend on the stabiliser.
            memory_terms = (after.z * scale) ** 2, after.c * scale[..., None]
            return (h * weights).sum() + sum(x.sum() for x in memory_terms), (h, after)

        return jax.tree.leaves(jax.jit(jax.value_and_grad(value, (0, 1), has_aux=True))(*arguments))

    arguments = (q, k, v, log_i, log_f), jax.tree.map(np.asarray, memory)
    actual = results("tpu", *arguments)
    with jax.enable_x64(True):
        expected = results("reference", *jax.tree.map(lambda x: x.astype(np.float64), arguments))
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5 * max(1, np.abs(y).max()))


def test_a_tpu_uses_the_kernel_from_one_chunk_on():
    device = AbstractDevice(device_kind="TPU v5 lite", num_cores=1, platform="tpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        for tokens, kernel in ((127, False), (128, True)):
            arguments = [
                jax.ShapeDtypeStruct((1, 1, tokens, *x), jnp.float32) for x in ((8,), (8,), (8,), (), ())
            ]
            program = str(jax.make_jaxpr(mlstm)(*arguments))
            assert ("pallas_call" in program) == kernel


def test_the_plain_normaliser_reads_means_of_values():
    """Each coordinate is within the range of the values. Adding a constant to log i or scaling the keys changes
    nothing."""
    q, k, v, log_i, log_f = map(np.asarray, inputs())
    call = compiled(chunk=8)
    h = np.asarray(call(q, k, v, log_i, log_f)[0])
    low, high = (np.minimum.accumulate(v, 2), np.maximum.accumulate(v, 2))
    assert ((h >= low - 1e-4) & (h <= high + 1e-4)).all()
    for other in (call(q, k, v, log_i + 30, log_f), call(q, 9 * k, v, log_i, log_f)):
        np.testing.assert_allclose(other[0], h, atol=1e-4)


@pytest.mark.parametrize("form", ["chunkwise", "kernel"])
def test_it_runs_on_a_mesh(form):
    arguments = tuple(np.asarray(x)[:, :2] for x in inputs())
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        spec = P("data", "tensor")
        split = jax.jit(jax.shard_map(functools.partial(mlstm, **FORMS[form]), out_specs=spec))
        actual = split(*(jax.device_put(x, jax.NamedSharding(mesh, spec)) for x in arguments))
    for x, y in zip(*map(jax.tree.leaves, (actual, compiled(chunk=8)(*arguments))), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: {"k": x[1][..., :-1]}, r"mlstm: k is \(2, 3, 37, 7\)"),
        (lambda x: {"log_f": x[4][..., :-1]}, r"mlstm: log_f is \(2, 3, 36\)"),
        (lambda x: {"memory": empty_memory(B, K, D, E + 1)}, r"mlstm: memory.c is \(2, 3, 8, 6\)"),
        (lambda x: {"chunk": 0}, "chunk is 0"),
        (lambda x: {"normaliser": "max"}, "normaliser is 'max'"),
        (lambda x: {"implementation": "gpu"}, "there is no implementation 'gpu'"),
        (lambda x: {"implementation": "tpu", "chunk": 64}, "'tpu' takes chunks of 128 tokens, not 64"),
        (
            lambda x: {"implementation": "tpu", "v": jnp.ones((B, K, T, 520))},
            "'tpu' takes keys and values of at most 512 numbers, not 8 and 520",
        ),
    ],
)
def test_bad_arguments_are_refused_in_one_line(shapes_unchecked, change, message):
    arguments = dict(zip(("q", "k", "v", "log_i", "log_f"), inputs(), strict=True))
    with pytest.raises(ValueError, match=message):
        mlstm(**arguments | change(inputs()))
