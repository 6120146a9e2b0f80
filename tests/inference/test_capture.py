"""Tests of what is captured of the layers, compared with plain attention and layer by layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.errors import UserError
from kvjax.inference import prefill
from kvjax.inference.allocation import empty_cache
from kvjax.inference.capture import captured_layers
from kvjax.inference.forward import forward
from kvjax.mesh import make_mesh
from kvjax.policies import make_policy
from tests.tiny_models import tiny_model

NAMES = "hidden", "q", "k", "v", "q_pre", "k_pre", "lse"
run = jax.jit(forward, static_argnames=("write", "capture"))


@pytest.mark.parametrize(
    "shape", [{}, pytest.param({"fsdp": 2, "tensor": 4}, marks=pytest.mark.thorough)], ids=str
)
def test_captured_arrays_are_those_of_attention(shape, tokens):
    """This holds all at once and layer by layer. Log-sum-exps are those of the keys in the cache and in the call."""
    counts = np.array([5, 4])
    with jax.set_mesh(make_mesh(**shape)):
        model = tiny_model(qk_norm=False)
        policy = make_policy("full")
        view = policy.compile(model).read
        sizes = {"batch": 2, "layers": 3, "kv_heads": 4, "head_dim": 8, "tokens": 20}
        nothing = empty_cache(policy.compile(model), **sizes, dtype=jnp.float32)
        reference = run(
            model,
            view,
            nothing,
            jnp.asarray(tokens[:, :17]),
            12 + counts,
            write=False,
            capture=NAMES,
        )[2]
        cache = prefill(model, tokens[:, :12], policy=policy, max_new_tokens=8)
        fed = jnp.asarray(tokens[:, 12:17]), counts
        at_once = run(model, view, cache, *fed, write=False, capture=NAMES)[2]
        rows = [tokens[b, 12 : 12 + count] for b, count in enumerate(counts)]
        by_layer = list(captured_layers(model, policy, cache, rows, NAMES))
    reference = {name: np.asarray(x) for name, x in reference.items()}
    logits = np.einsum("lbnth,lbnsh->lbnts", reference["q"], np.repeat(reference["k"], 2, 2)) / np.sqrt(8)
    lse = np.log(np.where(np.tri(17, dtype=bool), np.exp(logits), 0).sum(-1))
    for b, count in enumerate(counts):
        np.testing.assert_allclose(
            reference["lse"][:, b, :, : 12 + count], lse[:, b, :, : 12 + count], atol=1e-5
        )
        for name in NAMES:
            axis = 1 if name == "hidden" else 2
            wanted = np.take(reference[name][:, b], np.arange(12, 12 + count), axis)
            for found in (at_once[name], np.stack([layer[name] for layer in by_layer])):
                captured = np.take(np.asarray(found)[:, b], np.arange(count), axis)
                np.testing.assert_allclose(captured, wanted, atol=1e-5)


def test_captures_set_no_mesh_and_accept_an_uncompiled_policy(model):
    """The longest row has 19 tokens, which is more than the smallest padded length, 16."""
    layers = captured_layers(model, make_policy("full"), None, [np.arange(19), np.arange(5)], ["hidden", "k"])
    for layer in layers:
        assert jax.sharding.get_abstract_mesh().empty
        assert layer["hidden"].shape == (2, 19, 32)
        assert layer["k"].shape == (2, 4, 19, 8)
    with pytest.raises(UserError, match="token id 61"):
        next(captured_layers(model, make_policy("full"), None, [np.array([61])], ["k"]))


def test_unknown_array_names_are_refused(model):
    with pytest.raises(UserError, match="captured_layers: a name is one of hidden"):
        next(captured_layers(model, make_policy("full"), None, [np.array([1])], ["keys"]))
