"""Test the write gate against the paper's formula, and its size against the published ones."""

from functools import partial
from math import erf, exp

import jax
import numpy as np
from flax import nnx

from kvjax.mesh import use_mesh
from kvjax.policies import make_policy
from kvjax.policies.admission.wgkv import WriteGate
from kvjax.policies.admission.wgkv.gate import gelu
from tests.policies.admission.admitted import kept, layer
from tests.policies.steps import step


def test_the_write_gate_matches_the_papers_formula(model, gates):
    at = step([[0, 1, 2]], layer=1)
    w = {name: np.asarray(getattr(gates, name)[...][1], np.float64) for name in
         ("norm_pre", "norm_post", "w1", "b1", "w2", "b2")}  # fmt: skip
    rms = lambda x, scale: x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale  # noqa: E731
    want = np.zeros((1, 4, 3))
    for head in range(4):
        for token in range(3):
            k_pre, k = (np.asarray(x, np.float64)[0, head, token] for x in (at.k_pre, at.k))
            features = np.concatenate([rms(k_pre, w["norm_pre"]), rms(k, w["norm_post"])])
            hidden = features @ w["w1"][head] + w["b1"][head]
            hidden = np.array([x * 0.5 * (1 + erf(x / np.sqrt(2))) for x in hidden])
            want[0, head, token] = 1 / (1 + exp(-(hidden @ w["w2"][head] + w["b2"][head])))
    got = np.asarray(jax.jit(lambda gate: gate(at.k_pre, at.k))(layer(gates, 1)))
    np.testing.assert_allclose(got, want, atol=1e-5)
    policy = make_policy({"wgkv": {"tau": float(np.median(want)), "window": 9}}, model=model, gates=gates)
    np.testing.assert_array_equal(kept(policy, at, 1), want >= np.median(want).astype(np.float32))


def test_the_derivative_of_gelu_matches_jax():
    x = np.linspace(-4, 4, 33, dtype=np.float32)
    want, got = (
        jax.jvp(f, (x,), (np.ones_like(x),))[1] for f in (partial(jax.nn.gelu, approximate=False), gelu)
    )
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_write_gates_have_the_published_size():
    """Llama-3.1-8B's gates have 33,825,024 parameters, Qwen3-4B's 14,275,872 (spec/wgkv §1)."""
    with use_mesh():
        for shape, expand, want in ((32, 8, 128), 4.0, 33825024), ((36, 8, 128), 1.5, 14275872):
            made = jax.eval_shape(lambda s=shape, e=expand: WriteGate(*s, expand=e, rngs=nnx.Rngs(0)))
            assert sum(leaf.size for leaf in jax.tree.leaves(made)) == want
