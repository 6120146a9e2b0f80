"""Tests of mixtures of experts against their definition, and of splitting them over a mesh."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.errors import UserError
from kvjax.inference import generate, logits
from kvjax.mesh import make_mesh, put, use_mesh
from kvjax.models import layers
from kvjax.models.experts import mix_experts
from kvjax.models.matrix import Matrix
from kvjax.sampling_params import SamplingParams
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.slow

WIDTH, HIDDEN, EXPERTS, CHOSEN = 6, 4, 5, 2


def moe_model(**changes):
    defaults = {"model_type": "qwen3_moe", "num_experts": 8, "experts_per_token": 3, "mlp_width": 16}
    return tiny_model(**defaults | changes)


@pytest.mark.parametrize("tokens", [1, 2, 9, 150])
@pytest.mark.parametrize("index", [None, 1])
def test_each_token_gets_the_weighted_sum_of_its_experts(tokens, index):
    """Experts have fewer rows than one block, or more. Experts of other devices add nothing."""
    rng = np.random.default_rng(tokens)
    x = rng.standard_normal((1, tokens, WIDTH)).astype(np.float32)
    gate_up = rng.standard_normal((2, EXPERTS, WIDTH, 2 * HIDDEN)).astype(np.float32)
    down = rng.standard_normal((2, EXPERTS, HIDDEN, WIDTH)).astype(np.float32)
    weight = rng.random((1, tokens, CHOSEN)).astype(np.float32)
    chosen = rng.integers(-2, EXPERTS + 2, (1, tokens, CHOSEN))

    def activate(y):
        return jnp.tanh(y[..., :HIDDEN]) * y[..., HIDDEN:]

    want = np.zeros_like(x)
    for t in range(tokens):
        for expert, share in zip(chosen[0, t], weight[0, t], strict=True):
            if 0 <= expert < EXPERTS:
                hidden = activate(x[0, t] @ gate_up[index or 0, expert])
                want[0, t] += share * (hidden @ down[index or 0, expert])
    stacks = jnp.asarray(gate_up).reshape(2, -1, 2 * HIDDEN), jnp.asarray(down).reshape(2, -1, WIDTH)
    arrays = stacks if index is not None else [stack[0] for stack in stacks]
    layer = None if index is None else jnp.int32(index)
    matrices = [Matrix(array, None, None) for array in arrays]
    found = mix_experts(
        jnp.asarray(x), jnp.asarray(weight), jnp.asarray(chosen, jnp.int32), *matrices, activate, layer
    )
    np.testing.assert_allclose(found, want, atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 16])
def test_generation_over_the_cache_matches_whole_sequences(chunk):
    model = moe_model()
    prompt = np.random.default_rng(0).integers(0, 61, 24)
    answer = generate(model, [prompt], SamplingParams(max_new_tokens=8, ignore_eos=True), chunk=chunk).tokens[
        0
    ]
    after = logits(model, np.append(prompt, answer)[None])[0, len(prompt) - 1 : -1]
    np.testing.assert_array_equal(answer, after.argmax(-1))


@pytest.mark.mesh
@pytest.mark.parametrize(
    "shape",
    [
        {"tensor": 4},
        {"fsdp": 2, "tensor": 2},
        {"data": 2, "tensor": 2, "sequence": 2},
        {"fsdp": 2, "tensor": 2, "replica": 2},
    ],
)
def test_experts_are_split_over_a_mesh(shape):
    tokens = np.random.default_rng(1).integers(0, 61, (4, 16))
    want = logits(moe_model(), tokens)
    with jax.set_mesh(make_mesh(**shape)):
        split = moe_model()
        local_rows = split.layers.gate_up[...].addressable_shards[0].data.shape[1]
        assert local_rows == 8 * 32 // math.prod(shape.get(axis, 1) for axis in layers.EXPERTS)
        np.testing.assert_allclose(logits(split, tokens), want, atol=1e-4)
        greedy = SamplingParams(max_new_tokens=4, ignore_eos=True)
        found = generate(split, list(tokens), greedy).tokens
    np.testing.assert_array_equal(found, generate(moe_model(), list(tokens), greedy).tokens)


@pytest.mark.mesh
def test_mesh_that_does_not_divide_the_experts_is_refused():
    with (
        jax.set_mesh(make_mesh(tensor=4)),
        pytest.raises(UserError, match="does not divide the model's experts"),
    ):
        moe_model(num_experts=6)


def test_only_chosen_experts_have_gradients():
    model = moe_model()
    with use_mesh(model):
        tokens = put(np.random.default_rng(2).integers(0, 61, (1, 2)))
        gradient = jax.jit(jax.grad(lambda model: (model.hidden(tokens) ** 2).sum()))(model)
    by_expert = np.abs(np.asarray(gradient.layers.gate_up[...])).reshape(3, 8, -1).sum(-1)
    # two tokens choose three each
    assert ((by_expert > 0).sum(1) >= 3).all()
    assert ((by_expert > 0).sum(1) <= 6).all()
    assert np.abs(np.asarray(gradient.layers.router[...])).min((1, 2)).max() > 0
