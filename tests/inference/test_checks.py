"""What is refused before anything runs: prompts, arguments and caches that do not fit."""

import pytest

import kvjax.inference.sampling as sampling
from kvjax.errors import UserError
from kvjax.policies import make_policy
from tests.policies.captured import PAGE
from tests.tiny_models import tiny_model

ENTRIES = 24


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda m: sampling.sample(m, []), "no prompt"),
        (lambda m: sampling.sample(m, [[]]), "prompt 0 is empty"),
        (lambda m: sampling.sample(m, [5, 6]), r"prompt 0 must be a list of whole token ids, got shape \(\)"),
        (lambda m: sampling.sample(m, [[0.5]]), "must be a list of whole token ids"),
        (lambda m: sampling.prefill(m, [[1]], capacity="nan%"), "expected a positive number"),
        (
            lambda m: sampling.sample(m, [[1]], cache=sampling.prefill(m, [[1]]), capacity=9),
            "capacity is stated where the cache is made",
        ),
        (
            lambda m: sampling.sample(m, [[1]], cache=sampling.prefill(tiny_model(num_layers=2), [[1]])),
            r"the cache is for \(layers, kv heads, head_dim\) = \(2, 4, 8\), the model has \(3, 4, 8\)",
        ),
        (lambda m: sampling.sample(m, ["text"]), "must be token ids"),
        (lambda m: sampling.sample(m, [[1, 61]]), r"token id 61, the model's vocabulary is 0 … 60"),
        (
            lambda m: sampling.sample(m, [[1]], max_new_tokens=0),
            "max_new_tokens must be a whole number of at least 1",
        ),
        (lambda m: sampling.sample(m, [[1]], temperature=1.0), "needs key"),
        (lambda m: sampling.sample(m, [[1]], top_p=0.0), "top_p"),
        (lambda m: sampling.prefill(m, [[1]], capacity="12 apples"), "capacity '12 apples'"),
        (lambda m: sampling.prefill(m, [[1]], capacity="-3GiB"), "expected entries per kv head"),
        (lambda m: sampling.prefill(m, [[1]], page_size=0), "page_size must be a whole number of at least 1"),
        (
            lambda m: sampling.prefill(m, [[1]], policy=make_policy("full", window=50), capacity=20),
            "capacity 20: .* fewer than",
        ),
        (lambda m: sampling.logits(m, [[1], [1, 2]]), "one length"),
    ],
)
def test_mistakes_are_named_in_one_line(model, call, says):
    with pytest.raises(UserError, match=says) as caught:
        call(model)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("policy", ["h2o", "r_kv"])
def test_a_cache_that_knows_too_little_is_refused(model, prompts, policy):
    cache = sampling.prefill(model, prompts, page_size=PAGE)
    evicting = make_policy(policy, model=model, entries=ENTRIES, when="every", every=4)
    with pytest.raises(UserError, match=f"the cache was not made with policy {policy}"):
        sampling.sample(model, prompts, cache=cache, policy=evicting)
