"""Test the gate and its alternatives against their formulas in float64, on meshes, and their published size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from kvjax.errors import UserError
from kvjax.mesh import BATCH, make_mesh, put, use_mesh
from kvjax.mesh import HEADS as SPLIT
from kvjax.policies.eviction.fast_kvzip import FORMS, INPUTS, SinkGate, inputs
from tests.policies.steps import step

LAYERS, HEADS, GROUP, WIDTH, DIM, SINKS = 3, 4, 2, 32, 6, 5


scores_of = jax.jit(lambda gates, x: gates(x))


def random_gates(form="sink", width=WIDTH, seed=0):
    """Return gates with random arrays (also those initialised to 0 or 1), as NumPy arrays, so that nothing is
    compiled."""
    with use_mesh():
        sizes = LAYERS, HEADS, GROUP, width
        gates = jax.eval_shape(lambda: SinkGate(*sizes, dim=DIM, sinks=SINKS, form=form, rngs=nnx.Rngs(0)))
        rng = np.random.default_rng(seed)
        return jax.tree.map(lambda x: rng.standard_normal(x.shape).astype(np.float32), gates)


def of_layer(gates, index):
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x)[index]), gates)


def hidden(*shape, seed=1):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def brute_force(gates, index, x):
    """Compute Fast KVzip's formulas in float64, token by token and head by head; x [b k t d]."""
    w = {name: np.asarray(v, np.float64)[index] for name, v in nnx.to_pure_dict(nnx.state(gates)).items()}
    sigmoid = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
    rms = lambda x, scale: x / np.sqrt((x**2).mean() + 1e-6) * scale  # noqa: E731
    scores = np.zeros(x.shape[:3])
    for at in np.ndindex(*x.shape[:3]):
        h, head = np.asarray(x[at], np.float64), at[1]
        if gates.form == "linear":
            scores[at] = sigmoid(w["w"][head] @ h + w["b"][head])
            continue
        if gates.form == "mlp":
            gate, up = w["w_gate"][head] @ h, w["w_up"][head] @ h
            scores[at] = sigmoid((gate * sigmoid(gate) * up) @ w["w_down"][head] + w["b"][head])
            continue
        k = rms(w["w_k"][head] @ h, w["norm_k"])
        found = []
        for g in range(GROUP):
            q = rms(w["w_q"][head, g] @ h + w["bias_q"][head, g], w["norm_q"])
            a, b = q @ k / np.sqrt(DIM), w["b"][head, g]
            if gates.form == "sigmoid":
                found.append(sigmoid(a + b))
                continue
            e = np.array([q @ sink / np.sqrt(DIM) for sink in w["k_base"][head]])
            if gates.form == "paper":
                found.append(np.exp(a) / (np.exp(a) + np.exp(e).sum() + np.log1p(np.exp(b))))
            else:
                logits = np.exp(np.array([a + b, *e]))
                found.append(logits[0] / logits.sum())
        scores[at] = np.mean(found)
    return scores


@pytest.mark.parametrize("form", FORMS)
def test_scores_match_the_formulas(form):
    gates, x = random_gates(form), hidden(2, 3, WIDTH)
    per_head = np.broadcast_to(x[:, None], (2, HEADS, 3, WIDTH))
    for index in (0, 2):
        got = scores_of(of_layer(gates, index), x)
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, brute_force(gates, index, per_head), atol=2e-6)


def test_the_closed_form_is_a_softmax_against_the_sinks():
    """The form is that of §9.1 of the method's description. A token whose logit is 0, like those of the 16 sinks, has
    1/17 of the weight."""
    with use_mesh():
        made = jax.jit(lambda: SinkGate(1, 2, 3, 8, rngs=nnx.Rngs(0)))()
    gates = of_layer(made, 0)
    across = np.zeros((2, 3, 16, 8), np.float32)
    across[:, :, 0] = 1.0  # queries lie along the first axis, keys along the second, so q·k = 0
    gates.w_q[...] = across
    gates.bias_q[...] = np.zeros_like(gates.bias_q[...])
    gates.w_k[...] = np.roll(across[:, 0], 1, axis=1)
    np.testing.assert_allclose(scores_of(gates, hidden(1, 5, 8)), 1 / 17, rtol=1e-6)


def test_scores_do_not_overflow():
    gates, x = of_layer(random_gates(), 1), jnp.asarray(hidden(1, 4, WIDTH))
    both = jax.jit(jax.value_and_grad(lambda gates: (gates(x).sum(), gates(x)), has_aux=True))
    for scale in (1e2, 1e4):
        gates.norm_q[...] = np.asarray(gates.norm_q[...]) * np.float32(scale)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(both(gates)))


def test_b_raises_scores_and_the_papers_b_lowers_them():
    x, low = hidden(1, 6, WIDTH), of_layer(random_gates(), 0)
    high = jax.tree.map(lambda x: x, low)
    high.b[...] = np.asarray(low.b[...]) + 0.5
    assert (np.asarray(scores_of(high, x)) > np.asarray(scores_of(low, x))).all()
    arrays = nnx.to_pure_dict(nnx.state(low))
    own, zero = np.asarray(low.b[...]), np.zeros_like(low.b[...])
    scores = {}
    for form, b in (
        ("sink", zero),
        ("paper", own),
        ("paper", own + 0.5),
        ("paper", zero - 200),
    ):
        gates = of_layer(random_gates(form), 0)
        nnx.update(gates, nnx.State(nnx.restore_int_paths(arrays | {"b": b})))
        scores[form, float(b[0, 0])] = np.asarray(scores_of(gates, x))
    first, *papers = scores.values()
    assert (papers[0] < first).all()
    assert (papers[1] < papers[0]).all()
    np.testing.assert_allclose(papers[2], first, rtol=1e-5)  # here b = softplus(−200), which is 0


def test_a_score_depends_on_its_token_alone():
    gates, x = of_layer(random_gates(), 0), hidden(1, 8, WIDTH)
    order = np.random.default_rng(0).permutation(8)
    whole = np.asarray(scores_of(gates, x))
    np.testing.assert_allclose(scores_of(gates, x[:, order]), whole[..., order], rtol=1e-6)
    chunks = np.concatenate([scores_of(gates, x[:, :3]), scores_of(gates, x[:, 3:])], -1)
    np.testing.assert_allclose(chunks, whole, rtol=1e-6)


@pytest.mark.parametrize("name", INPUTS)
def test_inputs_come_from_the_step(name):
    """Keys are each head's own; for the other inputs all heads read the same hidden states."""
    at = step([[0, 1, 2]])
    x = inputs(at, name)
    gates = random_gates(width=x.shape[-1])
    per_head = np.asarray({"hidden": at.hidden, "k": at.k, "k_pre": at.k_pre}[name])
    if name == "hidden":
        per_head = np.broadcast_to(per_head[:, None], (1, HEADS, *per_head.shape[1:]))
    np.testing.assert_allclose(scores_of(of_layer(gates, 1), x), brute_force(gates, 1, per_head), atol=2e-6)


def test_gates_are_rounded_to_sixteen_bit_inputs():
    """The sums are computed in float32: once both factors are rounded, they are as near to float64 as float32 is."""
    gates, x = random_gates(), hidden(1, 3, WIDTH).astype(jnp.bfloat16)
    rounded = random_gates()
    for name in ("w_q", "w_k"):
        weights = getattr(rounded, name)
        weights[...] = np.asarray(weights[...]).astype(jnp.bfloat16).astype(np.float32)
    per_head = np.broadcast_to(np.asarray(x, np.float64)[:, None], (1, HEADS, 3, WIDTH))
    got = scores_of(of_layer(gates, 0), x)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, brute_force(rounded, 0, per_head), atol=2e-6)


def entropy_of_all_layers(gates, x, target):
    """Return the loss of training, computed in `shard_map` as the class's docstring describes."""

    def local(gates, x):
        return jax.vmap(lambda gate, x: gate(x))(gates, x)

    scores = jax.shard_map(local, out_specs=P(None, BATCH, SPLIT))(gates, x)
    return -(target * jnp.log(scores) + (1 - target) * jnp.log1p(-scores)).mean()


@pytest.mark.mesh
@pytest.mark.parametrize(
    "form", [pytest.param(x, marks=() if x in ("sink", "mlp") else pytest.mark.thorough) for x in FORMS]
)
def test_gradients_on_a_mesh_match_one_device(form):
    found = []
    x = jnp.asarray(hidden(LAYERS, 4, 6, WIDTH))
    target = jax.nn.sigmoid(hidden(LAYERS, 4, HEADS, 6, seed=2))
    for mesh in (make_mesh(), make_mesh(fsdp=2, tensor=4)):
        with jax.set_mesh(mesh):
            make = jax.jit(
                lambda: SinkGate(
                    LAYERS, HEADS, GROUP, WIDTH, dim=DIM, sinks=SINKS, form=form, rngs=nnx.Rngs(3)
                )
            )
            arguments = make(), put(x, None, BATCH), put(target, None, BATCH, SPLIT)
            found.append(jax.jit(jax.value_and_grad(entropy_of_all_layers))(*arguments))
    assert found[1][1].b[...].sharding.spec[1] == SPLIT
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=1e-6), *jax.device_get(found))


def test_gates_are_initialised_as_in_torch():
    with use_mesh():
        gates = jax.jit(lambda: SinkGate(2, 4, 2, 64, rngs=nnx.Rngs(0)))()
    gates = jax.device_get(gates)
    for name in ("w_q", "bias_q", "w_k"):
        assert 0.8 / 8 < np.abs(getattr(gates, name)[...]).max() <= 1 / 8
    for name, value in (("norm_q", 1), ("norm_k", 1), ("k_base", 0), ("b", 0)):
        np.testing.assert_array_equal(getattr(gates, name)[...], value)


@pytest.mark.parametrize(
    ("shape", "published", "printed"),
    [((36, 8, 4, 4096), 0.189, 0.18), ((40, 8, 5, 5120), 0.315, 0.30), ((48, 4, 8, 2048), 0.113, 0.11)],
    ids=["Qwen3-8B", "Qwen3-14B", "Qwen3-30B-A3B"],
)
def test_gates_have_the_published_size(shape, published, printed):
    """The size is that of the published files in bfloat16, in GB. Table 2's figures are at most 5% smaller (they are
    rounded down)."""
    sizes = {}
    with use_mesh():
        for form in FORMS:
            gates = jax.eval_shape(lambda form=form: SinkGate(*shape, form=form, rngs=nnx.Rngs(0)))
            sizes[form] = 2 * sum(leaf.size for leaf in jax.tree.leaves(gates)) / 1e9
    assert round(sizes["sink"], 3) == published
    assert 0.95 < printed / sizes["sink"] <= 1
    assert sizes["mlp"] == pytest.approx(sizes["sink"], rel=2e-3)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"form": "gelu"}, "form is one of sink, paper"), ({"sinks": 0}, "sinks must be a whole")],
)
def test_invalid_gates_are_refused(wrong, message):
    with use_mesh(), pytest.raises(UserError, match=message):
        SinkGate(1, 2, 2, 8, **wrong, rngs=nnx.Rngs(0))
