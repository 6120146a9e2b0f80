"""Tests of requests that are longer than the model is for: they give one warning with both numbers, whatever is called
and however often."""

import warnings

import pytest

from kvjax import inference
from kvjax.inference import checks
from kvjax.models.rope import RopeConfig
from kvjax.sampling_params import SamplingParams
from tests.tiny_models import tiny_config, tiny_model


@pytest.fixture
def model(monkeypatch):
    """Return a model for 40 tokens, for which no warning was given yet."""
    monkeypatch.setattr(checks, "_WARNED", set())
    return tiny_model(max_position=40)


def warnings_of(run):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run()
    return [str(one.message) for one in found if issubclass(one.category, UserWarning)]


def test_the_warning_counts_prompt_and_answer(model):
    prompt = [[1] * 8, [1] * 37]
    assert not warnings_of(
        lambda: inference.generate(model, prompt, SamplingParams(max_new_tokens=3, ignore_eos=True))
    )
    (line,) = warnings_of(
        lambda: inference.generate(model, prompt, SamplingParams(max_new_tokens=4, ignore_eos=True))
    )
    assert line.startswith("37 tokens and up to 4 new ones are more than the 40 that the model declares")


def test_the_warning_is_given_once(model):
    (line,) = warnings_of(lambda: inference.prefill(model, [[1] * 41] * 2))
    assert line.startswith("41 tokens are more than the 40 ")
    assert not warnings_of(
        lambda: inference.generate(model, [[1] * 50] * 2, SamplingParams(max_new_tokens=4))
    )


@pytest.mark.thorough
def test_the_warning_counts_the_context_of_a_question(model):
    cache = inference.prefill(model, [[1] * 30])
    (line,) = warnings_of(
        lambda: inference.generate(model, [[1] * 6], SamplingParams(max_new_tokens=5), cache=cache)
    )
    assert line.startswith("36 tokens and up to 5 new ones are more than the 40 ")


def test_scaled_rope_allows_longer_contexts():
    yarn = RopeConfig(type="yarn", factor=4.0, original_length=32)
    assert tiny_config(max_position=40, rope=yarn).longest == 128
    assert (
        tiny_config(
            max_position=40, rope=RopeConfig("dynamic", factor=2.0, original_length=40, length=90)
        ).longest
        == 90
    )
