"""Test repeatable randomness: the hashes against Python's integers, different numbers for each sequence, and the same
numbers however a sequence is read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import inference
from kvjax.mesh import make_mesh
from kvjax.policies import make_policy
from kvjax.policies.chance import text_hash, uniform
from tests.policies.captured import PAGE, captured_layers, entries, retained_pages
from tests.policies.steps import step
from tests.tiny_models import tiny_model

TOKENS, SHARED = 48, 20
METHODS = {"random": {"ratio": 0.5, "window": 5}, "random_eviction": {"entries": 24}}


@pytest.fixture(scope="module")
def prompts_with_shared_start():
    """Return two prompts with the same first `SHARED` tokens."""
    random = np.random.default_rng(3)
    first, second = (random.permutation(61)[:TOKENS] for _ in range(2))
    return [first, np.concatenate([first[:SHARED], second[SHARED:]])]


def hashed(*parts):
    """Return MurmurHash3's finaliser over the parts, in Python's integers."""
    x = 0x9E3779B9
    for part in parts:
        x ^= part
        x = (x ^ x >> 16) * 0x85EBCA6B % 2**32
        x = (x ^ x >> 13) * 0xC2B2AE35 % 2**32
        x ^= x >> 16
    return x


def test_hashes_match_their_formulas():
    at = step([[7, 8, -1], [0, 1, 2]])
    token = np.asarray(at.token).tolist()
    before = [12345, 2**32 - 1]
    got = text_hash(jnp.asarray(before, jnp.uint32), at)
    want = [
        np.cumsum([before[row]] + [hashed(p, t) for p, t in zip(positions, token[row], strict=False)])[1:]
        % 2**32
        for row, positions in enumerate(([7, 8], [0, 1, 2]))
    ]
    np.testing.assert_array_equal(got[0], [*want[0], want[0][-1]])
    np.testing.assert_array_equal(got[1], want[1])
    drawn = uniform(jnp.int32(3), jnp.arange(2)[:, None], got[:1])
    for layer in range(2):
        np.testing.assert_array_equal(
            drawn[layer], [(hashed(3, layer, int(x)) >> 8) / 2**24 for x in got[0]], strict=False
        )


def prefilled(model, name, prompts, chunk):
    policy = make_policy({name: METHODS[name]}, model=model)
    return inference.prefill(model, prompts, policy=policy, page_size=PAGE, capacity=60, chunk=chunk)


def places(model, cache, row, prompt) -> list[set[int]]:
    """Return by head the positions that the first layer keeps beyond the window."""
    every = captured_layers(model, prompt)[0].k
    return [
        {int(np.abs(every[head] - key).sum(-1).argmin()) for key in entries(cache, 0, row, head)}
        for head in range(4)
    ]


@pytest.mark.mesh
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x == "random" else pytest.mark.thorough) for x in METHODS]
)
def test_kept_tokens_depend_on_the_sequence_and_not_on_batch_chunks_or_mesh(
    model, prompts_with_shared_start, name
):
    together = prefilled(model, name, prompts_with_shared_start, TOKENS)
    first, second = (
        places(model, together, row, prompt) for row, prompt in enumerate(prompts_with_shared_start)
    )
    for one, other in zip(first, second, strict=True):
        assert {x for x in one if x >= SHARED} != {x for x in other if x >= SHARED}
        if name == "random":
            assert {x for x in one if x < SHARED} == {x for x in other if x < SHARED}
    alone_in_chunks = prefilled(model, name, prompts_with_shared_start[1:], 8)
    other_row_token_by_token = prefilled(model, name, prompts_with_shared_start[::-1], 1)
    with jax.set_mesh(make_mesh(fsdp=2, tensor=2)):
        split = prefilled(tiny_model(qk_norm=False), name, prompts_with_shared_start[::-1], 16)
    for cache in (alone_in_chunks, other_row_token_by_token):
        for layer, head in np.ndindex(3, 4):
            np.testing.assert_allclose(
                entries(cache, layer, 0, head), entries(together, layer, 1, head), atol=1e-4
            )
    pool = np.asarray(split.pages.pool)
    for layer, row, head in np.ndindex(3, 2, 4):
        # pages are numbered by shard: two shards of sequences, each with two of heads
        shard = pool.reshape(4, -1, *pool.shape[1:])[2 * row + head // 2]
        length = int(np.asarray(split.layers.length)[layer, row, head])
        found = shard[retained_pages(split, layer, row, head)].reshape(-1, 16)[:length, :8]
        np.testing.assert_allclose(found, entries(together, layer, 1 - row, head), atol=1e-4)
