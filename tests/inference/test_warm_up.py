"""Programs that serve all lengths: how many there are, and that no other is compiled once they are."""

import jax
import numpy as np
import pytest

import kvjax
from kvjax.errors import UserError
from kvjax.inference import forward, sampling
from kvjax.inference.forward import SIZES, pieces
from tests.policies.captured import unnormed


@pytest.fixture(scope="module")
def model():
    return unnormed()


@pytest.fixture
def compilations():
    """A function that says how many programs were compiled, or read from a cache, since it was last called."""
    found = [0]

    def listen(name: str, *_, **__) -> None:
        found[0] += name == "/jax/core/compile/backend_compile_duration"

    jax.monitoring.register_event_duration_secs_listener(listen)

    def since() -> int:
        count, found[0] = found[0], 0
        return count

    yield since
    jax.monitoring.unregister_event_duration_listener(listen)


KVZIP = {"instruction": [5, 6], "resumption": [6, 7], "tail": [8], "opening": range(17), "repeated": 100}
FAMILIES = {
    "full": [{}],
    "snapkv": [{"ratio": 0.5, "observed": 8}, {"ratio": 0.2, "observed": 8}, {"entries": 40, "observed": 8}],
    "kvzip": [KVZIP | {"ratio": 0.5}, KVZIP | {"ratio": 0.45, "tail": [9, 9]}],
    "streaming_llm": [
        {"sink": 2, "window": 8},
        {"sink": 5, "window": 8},
    ],
    "random": [{"window": 8, "ratio": 0.2}, {"window": 8, "ratio": 0.25, "seed": 1}],
}


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x == "snapkv" else pytest.mark.thorough) for x in FAMILIES]
)
def test_warm_programs_serve_all_lengths_questions_and_policies_of_a_family(model, name, compilations):
    jax.clear_caches()
    first, *others = (kvjax.make_policy({name: options}, model=model) for options in FAMILIES[name])
    kvjax.warm_up(model, first, max_tokens=300)
    assert compilations() > 0
    assert forward.last_logits._cache_size() <= 8
    assert sampling.decode_block._cache_size() <= 4
    lengths = 1, 13, 40, 100, 190, 260
    for policy, some in ((first, lengths), *((other, lengths[2:4]) for other in others)):
        for length in some:
            cache = kvjax.prefill(model, [np.arange(length) % 61], policy=policy, max_tokens=300)
            for question, new in ((2, 30), (9, 3), (17, 1)):
                options = {"policy": policy, "max_new_tokens": new, "eos": ()}
                kvjax.sample(model, [np.arange(question)], cache=cache, **options)
    assert compilations() == 0


@pytest.mark.thorough
def test_contexts_of_about_one_length_share_programs_without_a_maximum(model, compilations):
    policy = kvjax.make_policy("snapkv:ratio=0.5,observed=8")
    for length in (170, 180, 175):
        compilations()
        cache = kvjax.prefill(model, [np.arange(length) % 61], policy=policy)
        for question in (7, 8, 2):
            kvjax.sample(model, [np.arange(question)], policy=policy, cache=cache, max_new_tokens=6, eos=())
    assert compilations() == 0


def test_a_sequence_beyond_the_stated_maximum_is_refused(model):
    with pytest.raises(
        UserError, match="prompts of up to 90 tokens with 20 more are longer than max_tokens=100"
    ):
        kvjax.sample(model, [np.arange(90) % 61], max_new_tokens=20, max_tokens=100)


@pytest.mark.parametrize("chunk", [1, 8, 16, 100, 256, 16384, 40000])
def test_pieces_are_the_tokens_in_few_sizes(chunk):
    """With little that is padded, and no call of more than a chunk."""
    sizes = set()
    for tokens in {*range(1, min(chunk, 300) + 1), *np.linspace(1, chunk, 200).astype(int).tolist()}:
        found = list(pieces(tokens, chunk))
        assert sum(count for count, _ in found) == tokens
        assert all(0 < count <= min(size, chunk) for count, size in found)
        assert sum(size for _, size in found) - tokens <= max(tokens // 4, 32)
        assert len(found) <= 12
        sizes |= {size for _, size in found}
    assert sizes <= {*SIZES, chunk}
