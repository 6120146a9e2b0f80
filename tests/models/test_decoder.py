"""Tests of the decoder's program, shardings and pytree. Its numbers are tested in `test_goldens.py`."""

import dataclasses
import math
import re
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from packaging.version import Version

from kvjax.errors import UserError
from kvjax.mesh import BATCH, P, make_mesh, put, use_mesh
from kvjax.models import Decoder, ModelConfig, scan_layers
from kvjax.models.rope import RopeConfig, cos_sin, rotate
from tests.models.pieces import dense_attention
from tests.tiny_models import filled


def config(layers: int = 3, **changes: Any) -> ModelConfig:
    sizes = ModelConfig(
        vocab_size=61, num_layers=layers, width=32, mlp_width=48, num_heads=4, num_kv_heads=2, head_dim=8
    )
    return dataclasses.replace(sizes, **changes)


@pytest.fixture(scope="module")
def model():
    with use_mesh():
        return filled(config(qk_norm=True))


def ids(batch: int, t: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 61, (batch, t), dtype=np.int32)


def logits(model, tokens):
    return model.logits(model.hidden(tokens))


hidden_of = jax.jit(lambda model, tokens: model.hidden(tokens))
logits_of = jax.jit(lambda model, hidden: model.logits(hidden))


def test_program_size_does_not_grow_with_depth():
    """Compile time does not grow with depth either."""

    def lines(layers, dtype=jnp.float32):
        def program(tokens):
            return logits(Decoder(config(layers), rngs=nnx.Rngs(0), dtype=dtype), tokens)

        return str(jax.jit(program).trace(put(ids(2, 8))).lower().as_text()).count("\n")

    with use_mesh():
        assert lines(2) == lines(32)


def test_random_weights_do_not_depend_on_the_mesh():
    def build():
        return Decoder(config(1, attention_bias=True, tied=True), rngs=nnx.Rngs(0))

    with use_mesh():
        alone = jax.jit(build)()
    with jax.set_mesh(make_mesh(data=2, fsdp=2, tensor=2)):
        abstract, arrays = jax.eval_shape(build), jax.jit(build)()
    assert jax.tree.structure(abstract) == jax.tree.structure(arrays)
    for shape, array, other in zip(*map(jax.tree.leaves, (abstract, arrays, alone)), strict=True):
        assert (shape.shape, shape.dtype) == (array.shape, array.dtype)
        assert shape.sharding.spec == array.sharding.spec
        np.testing.assert_array_equal(np.asarray(array), np.asarray(other))


@pytest.mark.parametrize("rows", [(2, 8), (1, 1)])
def test_frozen_weights_of_16_bits_are_copied_one_layer_at_a_time(rows):
    """XLA's CPU backend copied all layers, and the table of embeddings, before a loop over tokens. A single row copies
    nothing."""

    def attend(step, carry, xs):
        return step.q, carry, None

    def run(model, tokens):
        def step(total, tokens):
            x = model.embed_tokens(tokens, frozen=True)
            y, *_ = scan_layers(model, x, jnp.zeros_like(tokens), attend, frozen=True)
            return total + y.astype(jnp.float32).sum(), None

        return jax.lax.scan(step, jnp.float32(0), tokens)[0]

    with use_mesh():
        sizes = config(16, width=64, mlp_width=256, head_dim=16, vocab_size=8192, tied=True)
        built = filled(sizes, jnp.bfloat16)
        lowered = jax.jit(run).lower(built, jnp.asarray(ids(6, math.prod(rows)).reshape(6, *rows)))
        # conftest.py takes an older way of emitting loops, which makes no such copies
        older = Version(version("jaxlib")) < Version("0.11")
        memory = lowered.compile({"xla_cpu_use_fusion_emitters": True} if older else {}).memory_analysis()
    assert memory is not None
    layer = 2 * (built.layers.gate_up[...].size + built.layers.down[...].size) / sizes.num_layers
    assert memory.temp_size_in_bytes < (2 * layer if math.prod(rows) > 1 else layer / 4)


def test_layers_are_gathered_one_at_a_time():
    layers = 5
    with jax.set_mesh(make_mesh(fsdp=4, tensor=2)):
        built = filled(config(layers))
        text = jax.jit(logits).lower(built, put(ids(8, 16), BATCH, None)).compile().as_text()
    assert text is not None
    gathered = re.findall(r"= \(?\w+\[([\d,]*)\]\S* all-gather", text)
    assert gathered
    # a gathered stack would have a leading layer axis
    assert not [shape for shape in gathered if shape.startswith(f"{layers},")], gathered


def test_tensor_parallel_layers_only_reduce():
    with jax.set_mesh(make_mesh(tensor=2)):
        built = filled(config())
        tokens = put(ids(2, 16))
        hidden = jax.jit(lambda model, tokens: model.hidden(tokens))
        text = hidden.lower(built, tokens).compile().as_text()
    assert text is not None
    collectives = re.findall(r" (all-\w+|reduce-scatter|collective-permute)(?:-start)?\(", text)
    # one for the embedding, and two for the projections of the scanned layer
    assert collectives == ["all-reduce"] * 3


def test_attention_is_causal(model):
    with use_mesh(model):
        x = jax.jit(lambda model, tokens: model.embed_tokens(tokens))(model, put(ids(1, 12)))

        def hidden_at(x, t):
            def attend(step, carry, xs):
                return dense_attention(step.q, step.k, step.v), carry, None

            y, *_ = scan_layers(model, x, jnp.arange(12)[None], attend)
            hidden = model.norm(y)
            return (hidden.sum((0, 2)) * (jnp.arange(12) == t)).sum(), hidden

        gradient_at = jax.jit(jax.grad(hidden_at, has_aux=True))
        for t in (0, 5, 11):
            gradient, y = gradient_at(x, t)
            reached = np.abs(np.asarray(gradient)).sum((0, 2)) > 0
            np.testing.assert_array_equal(reached, np.arange(12) <= t)
        np.testing.assert_allclose(y, hidden_of(model, put(ids(1, 12))), atol=1e-5)


def test_scan_layers_passes_steps_and_carries(model):
    position = np.array([[4, 5, 6, -1], [0, 1, 2, 3]], np.int32)

    def attend(step, carry, xs):
        assert step.head.shape == (2,)
        return step.q * xs, carry + step.layer, (step, xs)

    with use_mesh(model):
        own = jnp.array([1.0, 2.0, 3.0])

        @jax.jit
        def run(model, tokens, position):
            x = model.embed_tokens(tokens)
            found = scan_layers(model, x, position, attend, jnp.int32(10), own)
            angles, step = cos_sin(RopeConfig(), 8, position), found[2][0]
            return x, found, jax.vmap(lambda k: rotate(k, angles))(step.k_pre)

        x, (y, carry, (step, xs), _), rotated = jax.device_get(run(model, put(ids(2, 4)), put(position)))
        assert carry == 10 + 0 + 1 + 2
        np.testing.assert_array_equal(xs, own)
        np.testing.assert_array_equal(step.layer, [0, 1, 2])
        np.testing.assert_array_equal(step.position, np.stack([position] * 3))
        assert y.shape == x.shape
        # the first layer's input is x; its key is the key before RoPE, rotated by the true position
        np.testing.assert_allclose(
            step.hidden[0], x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6), rtol=1e-5
        )
        np.testing.assert_allclose(rotated, step.k, atol=1e-6)
        # QK-norm: every key has a mean square of one, before and after the rotation
        np.testing.assert_allclose((step.k**2).mean(-1), 1, rtol=1e-3)


def test_remat_does_not_change_gradients(model):
    with use_mesh(model):
        tokens = put(ids(2, 16))

        def gradient(remat):
            return jax.jit(jax.grad(lambda model: model.hidden(tokens, remat=remat).std()))(model)

        for a, b in zip(jax.tree.leaves(gradient(True)), jax.tree.leaves(gradient(False)), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)


def test_bfloat16_logits_accumulate_in_float32():
    with use_mesh():
        built = filled(config(), jnp.bfloat16)
        hidden = hidden_of(built, put(ids(1, 8)))
        out = logits_of(built, hidden)
    assert hidden.dtype == jnp.bfloat16
    assert out.dtype == jnp.float32
    assert built.head is not None
    table = np.asarray(built.head[...], np.float64)[:61]
    np.testing.assert_allclose(out, np.asarray(hidden, np.float64) @ table.T, atol=1e-5)


def test_vocabulary_is_padded_only_in_storage(model):
    assert model.embed.shape == (128, 32)
    with use_mesh(model):
        assert jax.eval_shape(logits, model, put(ids(1, 4))).shape == (1, 4, 61)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"tensor": 4}, "tensor axis has size 4, which does not divide the model's kv heads (2)"),
        ({"tensor": 2}, "tensor axis has size 2, which does not divide the model's mlp width (45)"),
        ({"fsdp": 8}, "fsdp axis has size 8, which does not divide the model's width (28)"),
    ],
)
def test_mesh_that_does_not_divide_the_model_is_refused(shape, message):
    with jax.set_mesh(make_mesh(**shape)), pytest.raises(UserError) as caught:
        jax.eval_shape(lambda: Decoder(config(mlp_width=45, width=28), rngs=nnx.Rngs(0)))
    assert message in str(caught.value)


def test_batch_that_does_not_divide_is_refused():
    with jax.set_mesh(make_mesh(data=2, fsdp=2)):
        built = jax.eval_shape(lambda: Decoder(config(), rngs=nnx.Rngs(0)))
        with pytest.raises(
            UserError, match=r"a batch of 3 does not divide over the mesh's data × fsdp = 4 shards"
        ):
            jax.eval_shape(logits, built, jax.ShapeDtypeStruct((3, 4), jnp.int32, sharding=P(None, None)))
