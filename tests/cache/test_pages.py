"""Tests of how the pool is stored: it is never copied while tokens are decoded, and 16-bit floats keep their bits."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import inference
from kvjax.builtin import builtin_model
from kvjax.inference import allocation
from kvjax.inference.allocation import empty_cache
from kvjax.inference.decode import decode_block
from kvjax.inference.sampler import make_sampler
from kvjax.mesh import BATCH as SEQUENCES
from kvjax.mesh import put, use_mesh
from kvjax.models import load_model
from kvjax.policies import make_policy
from kvjax.sampling_params import SamplingParams
from tests.cache.lists import PAGE
from tests.tiny_models import tiny_gates


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("full", "float32"),
        ("wgkv", "float32"),
        ("quest", "float32"),
        pytest.param("wgkv", "bfloat16", marks=pytest.mark.thorough),
        pytest.param("quest", "bfloat16", marks=pytest.mark.thorough),
    ],
)
def test_decoding_never_copies_the_pool(name, dtype):
    """The test checks the temporaries of the whole scan and the pool-sized copies in its program. XLA on a CPU would
    convert 16-bit floats to float32 to scatter among them, and to take one layer's weights out of the stack."""
    model = load_model(builtin_model("test_model"), dtype=dtype)
    with use_mesh(model):
        policy = {
            "full": lambda: make_policy("full"),
            "wgkv": lambda: make_policy("wgkv:tau=0.5,window=6", model=model, gates=tiny_gates(model)),
            "quest": lambda: make_policy("quest:ratio=0.25", model=model),
        }[name]()
        policy = policy.compile(model)
        shape = {"layers": 2, "kv_heads": 4, "head_dim": model.config.head_dim}
        cache = empty_cache(policy, batch=2, **shape, tokens=16384, dtype=dtype, capacity=16384)
        token, running = put(np.zeros(2, np.int32), SEQUENCES), put(np.ones(2, bool), SEQUENCES)
        sampler = make_sampler([SamplingParams()] * 2, [0, 0], (), model.config.vocab_size)
        program = decode_block.lower(
            model, policy.decode, cache, token, running, sampler, np.int32(1), count=4
        ).compile()
    pool = cache.pages.pool
    for array in jax.tree.leaves((pool, cache.pages.bounds)):
        shape = f"[{','.join(map(str, array.shape))}]"
        made = [
            line for line in program.as_text().splitlines() if re.search(rf"= \w+{re.escape(shape)}", line)
        ]
        assert made
        assert not [line for line in made if " copy(" in line or "convert" in line]
    assert program.memory_analysis().temp_size_in_bytes < 0.1 * 4 * pool.size
    for weights in jax.tree.leaves(model.layers):
        if weights.ndim > 2 and dtype == "bfloat16":
            assert f"= f32[{','.join(map(str, weights.shape))}]" not in program.as_text()


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["h2o", "wgkv", "full", "quest"])
def test_16_bit_floats_stored_as_integers_keep_their_bits(name, monkeypatch):
    """On a CPU, the entries and the answers are the same over chunks, a compaction and a pool that grows."""
    model = load_model(builtin_model("test_model"), dtype="bfloat16")
    policy = {
        "full": lambda: make_policy("full"),
        "wgkv": lambda: make_policy("wgkv:tau=0.5,window=6", model=model, gates=tiny_gates(model)),
        "h2o": lambda: make_policy("h2o:ratio=0.5", model=model),
        "quest": lambda: make_policy("quest:ratio=0.25", model=model),
    }[name]()
    prompts = [np.random.default_rng(size).integers(1, 200, size) for size in (40, 23)]

    def run():
        cache = inference.prefill(model, prompts, policy=policy, page_size=PAGE, chunk=16, max_new_tokens=4)
        answers = inference.generate(
            model, [[5, 6], [7]], SamplingParams(max_new_tokens=8), policy=policy, cache=cache
        )
        return cache.pages, [list(tokens) for tokens in answers.tokens]

    (bits, answers), _ = run(), monkeypatch.setattr(allocation, "on_cpu", lambda: False)
    floats, expected = run()
    assert (bits.pool.dtype, floats.pool.dtype) == (jnp.uint16, jnp.bfloat16)
    assert bits.pool.nbytes == floats.pool.nbytes
    if floats.bounds is not None:
        np.testing.assert_array_equal(bits.bounds, floats.bounds.astype(np.float32))
    assert bits.metadata.keys() == floats.metadata.keys()
    for name, numbers in floats.metadata.items():
        np.testing.assert_array_equal(bits.metadata[name], numbers)
    np.testing.assert_array_equal(bits.pool, np.asarray(floats.pool).view(np.uint16))
    assert answers == expected
