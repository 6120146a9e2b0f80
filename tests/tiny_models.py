"""Small random models and policies that the tests of several packages share."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kvjax.checkpoints.module import filled as filled_module
from kvjax.mesh import use_mesh
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Decoder
from kvjax.models.loading import model_shapes
from kvjax.models.rope import RopeConfig
from kvjax.policies import Policy, make_policy
from kvjax.policies.admission.kvpop import Scorer, Sizes
from kvjax.policies.admission.kvzap import Surrogate
from kvjax.policies.admission.wgkv import WriteGate
from kvjax.policies.eviction import triattention, trimkv
from kvjax.policies.eviction.fast_kvzip import SinkGate


def tiny_config(**changes) -> ModelConfig:
    """Return a config of three layers, eight query and four kv heads of 8, QK-norm, tied embeddings and 61 tokens."""
    sizes = dict(
        vocab_size=61, num_layers=3, width=32, mlp_width=48, num_heads=8, num_kv_heads=4, head_dim=8,
        qk_norm=True, tied=True, model_type="qwen3",
    )  # fmt: skip
    return ModelConfig(**(sizes | changes))


def filled(config: ModelConfig, dtype=jnp.float32, seed: int = 0) -> Decoder:
    """Return a decoder on the current mesh whose attention is uneven."""
    random, shapes = np.random.default_rng(seed), model_shapes(config, dtype)

    def fill(name, shape):
        return jnp.asarray(np.ones(shape) if "norm" in name else 0.2 * random.standard_normal(shape), dtype)

    arrays = {name: fill(name, x.shape) for name, x in sorted(shapes.unfused_arrays().items())}
    return jax.tree.map(
        lambda leaf, x: jax.device_put(x, leaf.sharding.spec), shapes, shapes.with_unfused(arrays)
    )


def tiny_model(**changes) -> Decoder:
    """Return a random decoder of `tiny_config` on the current mesh."""
    with use_mesh():
        return filled(tiny_config(**changes))


def sliding_model(**changes) -> Decoder:
    """Return the tiny model with four sliding-window layers besides its three, and the other features of Gemma 3."""
    features = dict(
        num_layers=7, sliding_layers=(0, 2, 4, 6), sliding_window=7, sliding_rope=RopeConfig(theta=500.0),
        norm_offset=0.5, post_norms=True, embed_factor=2.0, query_factor=0.8,
    )  # fmt: skip
    return tiny_model(**features | changes)


def tiny_gates(model: Decoder, seed: int = 1) -> WriteGate:
    """Return untrained gates for `model`, scaled so that thresholds near their median split tokens."""
    config = model.config
    with use_mesh(model):
        return _gates(config.num_full_layers, config.num_kv_heads, config.head_dim, seed)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _gates(layers: int, heads: int, head_dim: int, seed: int) -> WriteGate:
    gates = WriteGate(layers, heads, head_dim, rngs=nnx.Rngs(seed))
    gates.w2[...] = gates.w2[...] * 20
    return gates


def tiny_sink_gates(model: Decoder, seed: int = 1, *, inputs: str = "hidden") -> SinkGate:
    """Return untrained gates of Fast KVzip for `model`, scaled so that their scores are spread over (0, 1)."""
    config = model.config
    width = config.width if inputs == "hidden" else config.head_dim
    sizes = config.num_full_layers, config.num_kv_heads, config.num_heads // config.num_kv_heads, width
    with use_mesh(model):
        return _sink_gates(sizes, seed)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _sink_gates(sizes: tuple[int, ...], seed: int) -> SinkGate:
    gates = SinkGate(*sizes, rngs=nnx.Rngs(seed))
    gates.b[...] = gates.b[...] + 3
    gates.w_q[...] = gates.w_q[...] * 3
    return gates


def tiny_surrogates(model: Decoder, seed: int = 1, *, hidden: int = 12) -> Surrogate:
    """Return untrained surrogates of KVzap for `model`, scaled so that their predictions are spread around 0."""
    config = model.config
    with use_mesh(model):
        return _surrogates((config.num_full_layers, config.num_kv_heads, config.width, hidden), seed)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _surrogates(sizes: tuple[int, ...], seed: int) -> Surrogate:
    gates = Surrogate(*sizes, rngs=nnx.Rngs(seed))
    gates.w2[...] = gates.w2[...] * 10
    gates.b2[...] = gates.b2[...] * 0
    return gates


def tiny_scorers(model: Decoder, seed: int = 1, **forms) -> Scorer:
    """Return untrained scorers of KVPOP for `model`, with random weights so that reads, writes, decays and scores
    depend on the tokens."""
    config = model.config
    sizes = Sizes(config.num_full_layers, config.num_kv_heads, config.head_dim, **forms)
    with use_mesh(model):
        scorers = _scorers(sizes, seed)
        random = np.random.default_rng(seed)
        for weights in (scorers.w_i, scorers.w_f, scorers.theta):
            drawn = random.standard_normal(weights.shape).astype(np.float32)
            weights[...] = jax.device_put(drawn, jax.typeof(weights[...]).sharding.spec)
        return scorers


@functools.partial(jax.jit, static_argnums=(0, 1))
def _scorers(sizes: Sizes, seed: int) -> Scorer:
    scorers = sizes.make(seed)
    for weights in (scorers.w_q, scorers.w_k, scorers.w_v, scorers.a):
        weights[...] = weights[...] * 4
    return scorers


def tiny_statistics(model: Decoder, seed: int = 1) -> triattention.QueryStatistics:
    """Return random statistics of queries for `model`."""
    config, random = model.config, np.random.default_rng(seed)
    sizes = config.num_full_layers, config.num_heads, config.head_dim
    real, imaginary = random.standard_normal((2, *sizes[:2], config.head_dim // 2))
    arrays = {
        "real": real,
        "imaginary": imaginary,
        "length": np.hypot(real, imaginary) + random.random(real.shape),
    }
    with use_mesh(model):
        return filled_module(lambda: triattention.QueryStatistics(*sizes), arrays, "statistics")


def tiny_retention_gates(model: Decoder, form: str = "rg", seed: int = 1) -> trimkv.RetentionGate:
    """Return random gates of TrimKV for `model`, with most β above 0.9."""
    config, random = model.config, np.random.default_rng(seed)
    width = 2 * config.num_kv_heads * config.head_dim if form in trimkv.KEY_VALUE_FORMS else config.width
    sizes = trimkv.Sizes(form, config.num_full_layers, config.num_kv_heads, width, 6)
    arrays = {
        name: 0.3 * random.standard_normal((sizes.layers, *shape)) for name, shape in sizes.shapes.items()
    }
    arrays["b_out"] += 4
    with use_mesh(model):
        return filled_module(lambda: trimkv.RetentionGate(sizes), arrays, "gates")


def policies_for(model: Decoder, window: int) -> dict[str, Policy]:
    """Return one policy of each kind for `model`."""
    rates = np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4)
    make = {
        "full": lambda: make_policy({"full": {"window": window}}),
        "streaming_llm": lambda: make_policy({"streaming_llm": {"window": window, "sink": 2}}, model=model),
        "local": lambda: make_policy({"streaming_llm": {"window": window, "sink": 0}}, model=model),
        "head_pattern": lambda: make_policy(
            {"head_pattern": {"pattern": rates, "sparsity": 0.5, "sink": 1, "window": window}}, model=model
        ),
        "random": lambda: make_policy({"random": {"rates": rates, "window": window, "seed": 3}}, model=model),
        "wgkv": lambda: make_policy(
            {"wgkv": {"tau": 0.5, "window": window}}, model=model, gates=tiny_gates(model)
        ),
        "quest": lambda: make_policy({"full": {"window": window}, "quest": {"ratio": 0.25}}, model=model),
    }
    return {name: build() for name, build in make.items()}


TRAINED: dict[str, Callable[[Decoder], dict[str, Any]]] = {
    "wgkv": lambda model: {"gates": tiny_gates(model)},
    "fast_kvzip": lambda model: {"gates": tiny_sink_gates(model)},
    "kvzap": lambda model: {"gates": tiny_surrogates(model)},
    "kvzap_eviction": lambda model: {"gates": tiny_surrogates(model)},
    "kvpop": lambda model: {"scorers": tiny_scorers(model)},
    "triattention": lambda model: {"statistics": tiny_statistics(model)},
    "trimkv": lambda model: {"gates": tiny_retention_gates(model)},
}
"""Arguments of the policies with trained parameters."""
