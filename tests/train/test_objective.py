"""Test the losses of recipes, and the masks of training."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from kvjax.mesh import make_mesh, put, use_mesh
from kvjax.models.decoder import Decoder
from kvjax.policies import make_policy
from kvjax.policies.compiled import on_mesh
from kvjax.struct import changed
from kvjax.train.objective import (
    Deployed,
    deployed_mask,
    distilled_token_loss,
    likeliest,
    next_token_loss,
    next_token_losses,
    student,
    student_errors,
)
from kvjax.train.recipes.wgkv import WriteGates
from tests.inference.cached import LENGTH, cached_logits
from tests.inference.delayed import delayed
from tests.policies.steps import step
from tests.tiny_models import filled, tiny_config, tiny_model


def test_the_error_is_in_float32():
    with jax.set_mesh(make_mesh()):
        model = filled(tiny_config(), jnp.bfloat16)
        config = WriteGates(window=4)
        gates = jax.jit(config.init)(model)
        tokens = jnp.zeros((1, 8), jnp.int32)
        squares, _ = jax.eval_shape(
            lambda gates, model: student_errors(
                config.masks(gates), model, tokens, model.hidden(tokens), window=4
            ),
            gates,
            model,
        )
    assert squares.dtype == jnp.float32


@pytest.mark.parametrize(
    ("delay", "sinks"), [(3, 3), *(pytest.param(*x, marks=pytest.mark.thorough) for x in ((0, 0), (5, 0)))]
)
def test_the_training_mask_matches_the_cache(delay, sinks):
    """Whole sequences under the mask of an admission with max_entries are compared with the same in chunks through
    pages."""
    tokens = np.random.default_rng(delay).integers(0, 61, (2, LENGTH))
    model = tiny_model()
    policy = delayed(window=6, max_entries=7, delay=delay, threshold=2, sinks=sinks)
    expected, cache = cached_logits(model, policy, tokens, [17, 1, 1, 21])
    with use_mesh(model):
        admission = policy.compile(model).host.admission

        @jax.jit
        def logits(admission, model, tokens):
            hidden, _ = student(Deployed(admission, 6), model, tokens, window=6)
            return model.logits(hidden)

        actual = logits(admission, model, put(tokens))
    np.testing.assert_allclose(actual, expected, atol=1e-4)
    assert int(cache.layers.length.max()) == 7, "max_entries was reached"


deployed_mask_of = jax.jit(lambda admission, layer_step: deployed_mask(admission, layer_step, 6))


@pytest.mark.parametrize("length", [1, 3, 5])
def test_sequences_shorter_than_the_window_are_fully_visible(length):
    """The end of such a sequence has no known priority, and needs none."""
    policy, layer_step = delayed(window=6, max_entries=2, delay=5), step(np.arange(length)[None])
    admission = changed(policy.admission, threshold=jnp.float32(0), max_entries=jnp.int32(2))
    priority, mask = deployed_mask_of(admission, layer_step)
    assert mask.end.shape == layer_step.k.shape[:3]
    assert (np.asarray(mask.end) >= length).all()
    assert (np.asarray(priority) == -np.inf).all()


def test_the_training_mask_has_the_admissions_bias():
    """The mask that `deployed_mask` makes of an admission has its bias."""
    policy = delayed(window=6, delay=2, biased=True)
    layer_step = step(np.arange(20)[None])
    admission = changed(policy.admission, threshold=jnp.float32(0))
    _, mask = deployed_mask_of(admission, layer_step)
    np.testing.assert_array_equal(mask.log_gate, jax.jit(admission.bias)(None, layer_step))
    assert deployed_mask_of(changed(admission, biased=False), layer_step)[1].log_gate is None


def test_the_divergence_is_over_the_teachers_likeliest_tokens():
    """The divergence is KL(teacher ‖ student), both renormalised over the teacher's tokens, next to the cross-entropy.
    Sequences are cut in parts of which the last is shorter."""
    model, teacher_model = tiny_model(), tiny_model(qk_norm=False)
    tokens = np.random.default_rng(3).integers(0, 61, (2, 600))
    with use_mesh(model):
        hidden, teacher_hidden = (jax.jit(lambda m: m.hidden(put(tokens)))(m) for m in (model, teacher_model))

        def losses(count):
            teacher = lambda cut: likeliest(teacher_model.logits(cut(teacher_hidden)), count)  # noqa: E731
            return distilled_token_loss(model, hidden, put(tokens), teacher)

        losses_by_count = {count: jax.jit(lambda count=count: losses(count))() for count in (5, 256)}
        cross_entropy = jax.jit(next_token_loss)(model, hidden, put(tokens))
        logits = jax.jit(lambda m, h: m.logits(h))
        student_logits, teacher_logits = (
            np.asarray(logits(m, h), np.float64)[:, :-1]
            for m, h in ((model, hidden), (teacher_model, teacher_hidden))
        )
    log = lambda x: x - np.log(np.exp(x).sum(-1, keepdims=True))  # noqa: E731
    for count, (error, divergence) in losses_by_count.items():
        which = np.argsort(-teacher_logits, -1, kind="stable")[..., :count]
        p, q = (log(np.take_along_axis(x, which, -1)) for x in (teacher_logits, student_logits))
        np.testing.assert_allclose(divergence, (np.exp(p) * (p - q)).sum(-1).mean(), rtol=1e-4)
        np.testing.assert_allclose(error, cross_entropy, rtol=1e-6)
    picked = np.take_along_axis(log(student_logits), tokens[:, 1:, None], -1)
    np.testing.assert_allclose(cross_entropy, -picked.mean(), rtol=1e-5)


def test_gradients_of_token_losses_match_finite_differences(monkeypatch):
    """Gradients of the hidden states are compared in float64, with replaced logits, over two parts of a sequence."""
    random = np.random.default_rng(4)
    table = random.standard_normal((32, 11))
    monkeypatch.setattr(Decoder, "to_logits", lambda *_: lambda x: x @ jnp.asarray(table))
    with jax.enable_x64(True), jax.set_mesh(make_mesh()):
        model = tiny_model()
        tokens = put(random.integers(0, 11, (1, 520)))
        hidden, teacher_logits = (put(random.standard_normal((1, 520, width))) for width in (32, 3))
        which = put(np.argsort(random.random((1, 520, 11)))[..., :3])
        losses = {
            "next": lambda x: next_token_loss(model, x, tokens),
            "distilled": lambda x: distilled_token_loss(
                model, x, tokens, lambda cut: (cut(teacher_logits), cut(which))
            )[1],
        }
        for loss in losses.values():
            check_grads(
                jax.jit(loss),
                (hidden,),
                order=1,
                modes=["rev"],
                atol=1e-6,
                rtol=1e-6,
            )


@pytest.mark.slow
def test_packed_documents_match_separate_ones():
    """Their hidden states are the same, plain and under a mask that counts from their own beginnings, and so are the
    losses of every token but the first of each."""
    model = tiny_model()
    tokens = np.random.default_rng(5).integers(0, 61, (2, 40))
    starts = [[0, 13, 30], [0, 1, 40]]
    document = np.stack([np.searchsorted(row_starts, np.arange(40), "right") - 1 for row_starts in starts])
    labelled = np.pad(document[:, 1:] == document[:, :-1], ((0, 0), (1, 0)))
    with use_mesh(model):
        sinks = streaming_llm(model, window=6)

        @jax.jit
        def run(tokens, document=None, labelled=None):
            hidden = model.hidden(tokens, document, remat=True)
            masked, _ = student(Deployed(sinks, 6), model, tokens, document, window=6)
            return hidden, masked, next_token_losses(model, masked, tokens, labelled)

        *packed, losses = run(*map(put, (tokens, document, labelled)))
        errors = {0: [], 1: []}
        for row, first, last in ((0, 0, 13), (0, 13, 30), (0, 30, 40), (1, 1, 40)):
            *separate, error = run(put(tokens[row : row + 1, first:last]))
            for x, expected in zip(packed, separate, strict=True):
                np.testing.assert_allclose(x[row, first:last], expected[0], atol=1e-5)
            errors[row].append((last - first - 1, float(error.sum())))
    for loss, parts in zip(np.asarray(losses), errors.values(), strict=True):
        counts, means = zip(*parts, strict=True)
        np.testing.assert_allclose(loss, np.average(means, weights=counts), rtol=1e-5)


def streaming_llm(model, window):
    config = model.config
    policy = make_policy({"streaming_llm": {"sink": 2, "window": window}})
    return on_mesh(policy.admission, config.num_layers, config.num_kv_heads)
