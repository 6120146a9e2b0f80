"""Test KVPOP's target against dense sums, and which parameters its training masks and losses reach."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.inference.attention import masked_attention
from kvjax.mesh import use_mesh
from kvjax.policies import make_policy
from kvjax.policies.compiled import on_mesh
from kvjax.struct import changed
from kvjax.train.future_attention import FLOOR, KVPOPTraining
from kvjax.train.objective import from_the_start, next_token_loss, student
from pallas_kernels.vertical_slash import vertical_slash
from tests.policies.admission.admitted import layer
from tests.policies.steps import shape_of, step
from tests.tiny_models import tiny_model, tiny_scorers
from tests.train.walked import loss_of_pairs, walk_pairs

T, SINK, WINDOW, MAX_ENTRIES = 32, 2, 5, 13


def method(model, **options) -> KVPOPTraining:
    sizes = {"sink": SINK, "window": WINDOW, "max_entries": MAX_ENTRIES}
    policy = make_policy({"kvpop": {"scorers": tiny_scorers(model), **sizes}}, model=model)
    with use_mesh(model):
        return KVPOPTraining(on_mesh(policy.admission, 3, 4), **options)


masks_of = jax.jit(lambda training, layer_step: training.masks(layer_step))
target_of = jax.jit(lambda training, layer_step, lse: training.target(layer_step, lse))
log_gamma_of = jax.jit(lambda training: training.admission.scorers.log_gamma())


@pytest.fixture(scope="module")
def layer_training():
    """Return one layer's training method, its step, the results of its masked attention, and the mask."""
    training = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), layer(method(tiny_model()), 1))
    layer_step = step(np.arange(T)[None])
    _, [mask] = masks_of(training, layer_step)
    attend = jax.jit(functools.partial(vertical_slash, window=WINDOW))
    return training, layer_step, attend(layer_step.q, layer_step.k, layer_step.v, mask.end), mask


def dense(layer_step, seen):
    """Return the attention of queries to keys [n t s], normalised over the keys that each query sees, in float64."""
    q, k = (np.asarray(x[0], np.float64) for x in (layer_step.q, layer_step.k))
    logits = np.einsum("nth,nsh->nts", q, np.repeat(k, 2, 0)) / np.sqrt(k.shape[-1])
    exp = np.where(seen, np.exp(logits), 0)
    return np.exp(logits) / exp.sum(-1, keepdims=True)


@pytest.mark.thorough
@pytest.mark.parametrize("over", ["kept", "all"])
def test_a_target_is_the_attention_that_a_token_gets_later(layer_training, over):
    """It sums over every query that is a window or more later, and is the larger of the two heads of the group. An
    evicted token counts with the attention that it would have got."""
    training, layer_step, (_, lse), mask = layer_training
    training = changed(training, over=over, falls=False)
    index = np.arange(T)
    causal = index[:, None] >= index
    kept = causal & (index[:, None] < np.repeat(np.asarray(mask.end[0]), 2, 0)[:, None])
    p = dense(layer_step, causal if over == "all" else kept)
    later = index[:, None] - index >= WINDOW
    mass = np.where(later, p, 0).sum(1).reshape(4, 2, T).max(1)
    actual = np.asarray(target_of(training, layer_step, lse))[0]
    np.testing.assert_allclose(actual[:, : T - WINDOW], np.log(mass[:, : T - WINDOW]), atol=1e-5)
    np.testing.assert_array_equal(actual[:, T - WINDOW :], FLOOR)


@pytest.mark.thorough
def test_each_query_pays_a_total_attention_of_at_most_1(layer_training):
    """Summed over all tokens, a query head's targets are at most 1 for each query outside the window; a group's target
    is the larger one of its heads'."""
    training, layer_step, (_, lse), _ = layer_training
    training = changed(training, over="all", falls=False)
    per_head = dataclasses.replace(
        layer_step,
        k=jnp.repeat(layer_step.k, 2, 1),
        k_pre=jnp.repeat(layer_step.k_pre, 2, 1),
        v=jnp.repeat(layer_step.v, 2, 1),
        head=jnp.arange(8),
    )
    by_head = np.exp(target_of(training, per_head, lse)[0])
    assert (by_head.sum(-1) <= T - WINDOW).all()
    assert by_head.sum(-1).max() > 0.5 * (T - WINDOW), "and not much less"
    by_group = np.exp(target_of(training, layer_step, lse)[0])
    np.testing.assert_allclose(by_group, by_head.reshape(4, 2, T).max(1), rtol=1e-5)


def test_targets_fall_as_scores_do(layer_training):
    training, layer_step, (_, lse), _ = layer_training
    flat = np.asarray(target_of(changed(training, falls=False), layer_step, lse))
    log_gamma = np.asarray(log_gamma_of(training))[:, None]
    np.testing.assert_allclose(
        target_of(training, layer_step, lse), flat - log_gamma * np.arange(T), rtol=1e-6
    )


def test_the_mask_matches_the_cache(layer_training):
    """The sinks and the last tokens are visible, and in the remaining places the tokens with the highest priorities."""
    training, layer_step, _, mask = layer_training
    index = np.arange(T)
    visible = (index[:, None] >= index) & (index[:, None] < np.asarray(mask.end[0])[:, None])
    assert visible[:, :, :SINK][:, SINK:].all()
    assert (visible.sum(-1) <= MAX_ENTRIES).all()
    assert (visible[:, -1].sum(-1) == MAX_ENTRIES).all()
    priority = np.asarray(masks_of(training, layer_step)[0])

    @jax.jit
    def score(admission, layer_step):
        state, begun = admission.init(shape_of(layer_step)), from_the_start(layer_step, WINDOW - 1)
        return admission.score(state, begun, jnp.zeros(1, jnp.int32), jnp.full(1, T))[1]

    scores = np.asarray(score(training.admission, layer_step))
    np.testing.assert_allclose(priority[..., : 1 - WINDOW], scores[..., WINDOW - 1 :], rtol=1e-5)
    last = np.asarray(priority[0, :, : T - WINDOW])
    best = [set(np.argsort(-row, kind="stable")[: MAX_ENTRIES - WINDOW]) for row in last]
    assert [set(np.flatnonzero(row[: T - WINDOW])) for row in visible[:, -1]] == best


def test_the_loss_uses_the_layers_masked_attention(layer_training):
    """The loss is computed by hand from the first pass's attention: the targets, the tokens that compete for the places
    besides sinks and window, and the loss of their scores."""
    training, layer_step, _, mask = layer_training
    with use_mesh():
        attend = jax.jit(lambda method: masked_attention(method, layer_step, window=WINDOW)[1])
        figures, over_all = attend(training), attend(changed(training, over="all"))
    index = np.arange(T)
    end = np.repeat(np.asarray(mask.end[0]), 2, 0)[:, None]
    p = dense(layer_step, (index[:, None] >= index) & (index[:, None] < end))
    later = index[:, None] - index >= WINDOW
    mass = np.where(later, p, 0).sum(1).reshape(4, 2, T).max(1)
    decay = np.asarray(log_gamma_of(training), np.float64)[:, None] * index
    target = np.log(np.maximum(mass, np.exp(FLOOR))) - decay
    score = np.asarray(masks_of(training, layer_step)[0])
    for head in range(4):
        pairs = walk_pairs(target[head], MAX_ENTRIES - WINDOW - SINK, WINDOW, SINK)
        loss, agreement = loss_of_pairs(score[0, head], target[head], pairs, 1.0)
        assert figures["pairs"][0, head] == len(pairs) == T - MAX_ENTRIES
        np.testing.assert_allclose(figures["score_loss"][0, head], loss, rtol=1e-4)
        np.testing.assert_allclose(figures["agreement"][0, head], agreement, rtol=1e-6)
        assert abs(over_all["score_loss"][0, head] - loss) > 1e-3 * loss, "of other attention it is another"


@pytest.mark.slow
def test_each_loss_trains_only_its_own_parameters():
    """The score loss trains only the scorers, including decays; the tokens' loss only the model. Other gradients are
    exactly 0."""
    model = tiny_model()
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 61, (1, T)), jnp.int32)

    initial = method(model)

    def losses(scorers, model):
        training = changed(initial, admission=changed(initial.admission, scorers=scorers))
        hidden, figures = student(training, model, tokens, window=WINDOW)
        return next_token_loss(model, hidden, tokens), figures["score_loss"].mean()

    @jax.jit
    def gradients(scorers, model):
        """Return the gradients of each of the two losses."""
        (token_loss, score_loss), pull = jax.vjp(losses, scorers, model)
        one, zero = jnp.ones_like(token_loss), jnp.zeros_like(score_loss)
        return pull((one, zero)), pull((zero, one))

    with use_mesh(model):
        by_tokens, by_scores = gradients(initial.admission.scorers, model)
    for nothing in (by_tokens[0], by_scores[1]):
        for x in jax.tree.leaves(nothing):
            np.testing.assert_array_equal(x, 0)
    for something in (by_tokens[1], by_scores[0]):
        assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(something) if x.ndim), (
            "every array has a gradient"
        )
