"""Tests of `stack_product`: every implementation against float64, and a model that decodes with it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.inference.allocation import empty_cache, sizes_of
from kvjax.inference.forward import forward
from kvjax.mesh import BATCH, make_mesh, put
from kvjax.models import decoder, matrix
from pallas_kernels.ahead import lower_for_cuda
from pallas_kernels.eight_bits import EIGHT_BITS
from pallas_kernels.stack_product import MOST_ROWS, stack_product
from pallas_kernels.stack_product.api import IMPLEMENTATIONS
from tests.tiny_models import policies_for, sliding_model, tiny_model

SHAPES = [(1, 600, 130), (5, 1100, 64), (33, 40, 200)]
"""Rows, inputs and outputs that no tile divides. Several programs share the inputs of the second shape."""


def arrays(shape, dtype=jnp.float32):
    rows, inputs, outputs = shape
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.normal(size=x), dtype) for x in ((rows, inputs), (3, inputs, outputs)))


@pytest.mark.parametrize(("layers", "kernel"), [(16, True), (32, False), (64, True)])
def test_stacks_whose_offsets_overflow_are_not_given_to_triton(layers, kernel):
    """An int8 stack of Llama-3.1-8B's gate and up weights takes 1.9, 3.8 or 7.5 GB; above 4 GiB offsets have 64
    bits."""
    stack = jax.ShapeDtypeStruct((layers, 4096, 28672), jnp.int8)
    scale = jax.ShapeDtypeStruct((layers, 1, 28672), jnp.float32)
    x, layer = jax.ShapeDtypeStruct((1, 4096), jnp.bfloat16), jax.ShapeDtypeStruct((), jnp.int32)
    traced = jax.make_jaxpr(functools.partial(stack_product, implementation="gpu"))(x, stack, layer, scale)
    assert ("pallas_call" in str(traced)) == kernel


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_products_equal_float64(implementation, shape):
    x, stack = arrays(shape)
    call = jax.jit(functools.partial(stack_product, implementation=implementation))
    for layer in range(3):
        actual = np.asarray(call(x, stack, jnp.int32(layer)))
        expected = np.asarray(x, np.float64) @ np.asarray(stack[layer], np.float64)
        np.testing.assert_allclose(actual, expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", [(1, 640, 130), (5, 1280, 64)], ids=str)
@pytest.mark.parametrize("blocks", [pytest.param(1, marks=pytest.mark.slow), 5])
@pytest.mark.parametrize("kind", EIGHT_BITS.values(), ids=str)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_eight_bit_weights_are_multiplied_by_their_scales(implementation, kind, blocks, shape, dtype):
    x, stack = arrays(shape, dtype)
    stack = jnp.round(40 * stack.astype(jnp.float32)).clip(-127, 127).astype(kind)
    scale = jnp.asarray(np.random.default_rng(1).random((3, blocks, shape[2])), jnp.float32)
    actual = stack_product(x, stack, jnp.int32(1), scale, implementation=implementation)
    weights = np.asarray(stack[1], np.float64) * np.repeat(scale[1], shape[1] // blocks, 0)
    expected = np.asarray(x, np.float64) @ weights
    # XLA rounds the scaled weights of a block to the dtype; the kernel does not.
    rounds = dtype == jnp.bfloat16 and blocks > 1 and implementation == "xla"
    np.testing.assert_allclose(actual, expected, atol=(5e-3 if rounds else 1e-5) * np.abs(expected).max())


@pytest.mark.parametrize("implementation", ["xla", "gpu"])
def test_sums_of_bfloat16_are_float32(implementation):
    x, stack = arrays(SHAPES[1], jnp.bfloat16)
    actual = stack_product(x, stack, jnp.int32(1), implementation=implementation)
    expected = np.asarray(x, np.float64) @ np.asarray(stack[1], np.float64)
    assert actual.dtype == jnp.float32
    np.testing.assert_allclose(actual, expected, atol=1e-5 * np.abs(expected).max())


def test_a_gpu_uses_the_triton_kernel():
    x, stack = arrays(SHAPES[0], jnp.bfloat16)
    assert "stack_product" in lower_for_cuda(stack_product, x, stack, jnp.int32(1))
    for kind in EIGHT_BITS.values():
        scale = jnp.ones((3, 1, stack.shape[2]))
        assert "stack_product" in lower_for_cuda(stack_product, x, stack.astype(kind), jnp.int32(1), scale)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stack": jnp.zeros((3, 40, 8), jnp.bfloat16)}, "does not go with x float32"),
        ({"implementation": "tpu"}, "there is no implementation 'tpu'"),
        ({"scale": jnp.ones((3, 1, 8))}, "does not go with x float32"),
        (
            {"scale": jnp.ones((3, 3, 8)), "stack": jnp.zeros((3, 40, 8), jnp.int8)},
            "scale .3, 3, 8. does not go with",
        ),
        ({"implementation": "gpu", "x": jnp.zeros((MOST_ROWS + 1, 40))}, "at most 64 rows, not 65"),
    ],
)
def test_mismatched_arguments_are_refused(change, message):
    arguments = {"x": jnp.zeros((2, 40)), "stack": jnp.zeros((3, 40, 8)), "layer": jnp.int32(1)} | change
    with pytest.raises(ValueError, match=f"stack_product: .*{message}"):
        stack_product(arguments.pop("x"), arguments.pop("stack"), arguments.pop("layer"), **arguments)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [
        {},
        pytest.param({"data": 2, "tensor": 2, "sequence": 2}, marks=pytest.mark.mesh),
        pytest.param({"tensor": 4}, marks=pytest.mark.thorough),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("make", "options", "calls"),
    [
        (tiny_model, {"mlp_bias": True}, 4),
        # Each of three traced layers has three such products besides those of its experts.
        (sliding_model, {"num_experts": 4, "experts_per_token": 2, "expert_bias": True}, 9),
    ],
    ids=["one kind", "two kinds and experts"],
)
def test_a_model_decodes_the_same_with_weights_read_in_place(make, options, calls, mesh, monkeypatch):
    """The model decodes as on a GPU. The arrays of its biases and norms are still sliced out of their stacks."""
    with jax.set_mesh(make_mesh(**mesh)):
        model = make(attention_bias=True, attention_out_bias=True, **options)
        policy = policies_for(model, 8)["wgkv"].compile(model)
        sizes = {**sizes_of(model.config), "batch": 2, "tokens": 4, "dtype": jnp.float32}

        def logits():
            @jax.jit
            def run(model, view, cache, token):
                cache, hidden, _ = forward(model, view, cache, token, jnp.ones(2, jnp.int32))
                return cache, model.logits(hidden)

            cache, actual = empty_cache(policy, **sizes), []
            for token in np.arange(8).reshape(4, 2, 1):
                cache, new = run(model, policy.decode, cache, put(token, BATCH, None))
                actual.append(np.asarray(new))
            return np.stack(actual)

        monkeypatch.setattr(decoder, "_reads_in_place", lambda *x: False)
        expected_logits = logits()
        products = []
        monkeypatch.setattr(decoder, "_reads_in_place", lambda *x: True)
        monkeypatch.setattr(matrix, "stack_product", lambda *x: products.append(x) or stack_product(*x))
        np.testing.assert_allclose(logits(), expected_logits, rtol=1e-5, atol=2e-5)
        assert len(products) == calls
