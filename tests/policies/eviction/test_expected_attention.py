"""Test Expected Attention against its formula in float64, from a real prefill."""

from kvjax.models.rope import RopeConfig
from kvjax.policies import make_policy
from tests.policies import published
from tests.policies.captured import captured_layers
from tests.policies.eviction.kept_sets import RATIO, assert_published
from tests.tiny_models import tiny_model


def _assert_published(model, prompts, captured):
    policy = make_policy({"expected_attention": {"ratio": RATIO}}, model=model)
    assert_published(
        policy, lambda c, kept: published.expected_attention(c), model, prompts, captured, first=4
    )


def test_scores_and_kept_sets_are_the_published_ones(model, prompts, captured):
    _assert_published(model, prompts, captured)


def test_dimensions_without_rope_are_not_rotated(prompts):
    """Phi-4-mini rotates three quarters of the dimensions, and SmolLM3 rotates none in some layers."""
    model = tiny_model(qk_norm=False, rope=RopeConfig(share=0.75), no_rope=(1,))
    _assert_published(model, prompts, [captured_layers(model, prompt) for prompt in prompts])
