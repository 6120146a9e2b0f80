"""Prefill and decode speed of a sparse cache against full attention, on one device, in one run.

    python infer/benchmark.py --json figures.json

The protocol is WG-KV's (App. I): random admission at an exact sparsity with trained-size gates still evaluated, index
building and page bookkeeping inside the clock, logits of the last position only, one warm-up, medians, greedy feedback.
The rival is the same model with every key, by the fastest path here: blockwise causal attention, XLA's own and on a GPU
cuDNN's, over plain contiguous caches, and kvjax's own pages under the full policy are timed, and each phase is held
against the best. Runs are interleaved, so that a noisy machine is noisy for all. A dense prefill that took over twice
as long as the best in the warm-up is not repeated.

    python infer/benchmark.py --policies streaming_llm snapkv pyramidkv_patched expected_attention h2o r_kv quest

times these beside it, by their names in `kvjax.evaluate`, at the same share and with its chunks: a quarter of the
context. What evicts has done so by the end of its prefill; how much of that a single eviction was is a row of its own:
with Knorm's scores, which cost next to nothing, it is what moving entries costs.

    python infer/benchmark.py --positions 1024 4096 16384 65536

times a decode step of KVPOP's cache of constant size, of 512 entries a kv head, after so many tokens instead, beside
the full cache's; neither --context, --sparsity nor --policies has a meaning then.
"""

import dataclasses
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from kvjax.command.launch import MeshShape, parse_command, run_command, start
from kvjax.errors import UserError


@dataclasses.dataclass(frozen=True)
class BenchmarkConfig:
    """Time prefill and decode at a given sparsity against full attention."""

    context: int = 16384
    """Prompt tokens."""
    sparsity: float = 0.75
    """Share of tokens refused."""
    window: int = 256
    """Last tokens that are always visible."""
    page_size: int = 64
    """Tokens per page."""
    layers: int = 2
    width: int = 128
    """Of the residual stream: narrow, so that attention dominates."""
    mlp_width: int = 128
    heads: int = 32
    """Query heads; these and the next two are Llama-3.2-1B's."""
    kv_heads: int = 8
    head_dim: int = 64
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights and cache: bfloat16 on an accelerator."""
    expand: float = 1.5
    """Hidden width of the gates over head_dim: the paper's for Qwen3, which this model is a narrow one of."""
    new_tokens: int = 32
    """Decoded tokens in one timing."""
    policies: tuple[str, ...] = ()
    """Policies to time as well, each at the same share of what stays: the names of kvjax.evaluate, less wgkv, whose
    speed is that of the random admission with gates, which is always timed. Heads of a pattern are drawn."""
    positions: tuple[int, ...] = ()
    """Time decoding after so many tokens instead: KVPOP, of which untrained scorers cost what trained ones do, and the
    full cache."""
    repeats: int = 3
    """Timings of each path, of which the median counts."""
    json: Path | None = None
    """Write the rows here as well."""


def main(args: list[str] | None = None) -> None:
    """The command."""
    config = parse_command(BenchmarkConfig, args)
    if config.positions and config.policies:
        raise UserError("--positions times KVPOP and the full cache: leave --policies out")
    mesh = start(MeshShape())

    import jax

    with jax.set_mesh(mesh):
        rows = run_positions(config) if config.positions else run(config)
    for row in rows:
        if config.positions:
            print(
                f"decode after {row['position']:>7} tokens: full {row['full_s']:.5f} s, kvpop {row['policy_s']:.5f} s, "
                f"{row['beside_first']:.2f} of its first; {row['bytes'] / 2**20:.1f} MiB against "
                f"{row['full_bytes'] / 2**20:.1f}"
            )
            continue
        print(
            f"{row['phase']:8}{row['context']:>8} tokens, {100 * row['sparsity']:.0f}% sparse: "
            f"full {row['full_s']:.4f} s ({row['rival']}), {row['policy']} {row['policy_s']:.4f} s, "
            f"{row['ratio']:.2f}×; {row['bytes'] / 2**20:.1f} MiB against {row['full_bytes'] / 2**20:.1f}"
        )
        if "eviction_s" in row:
            print(f"  of which the eviction {row['eviction_s']:.4f} s")
    if config.json is not None:
        device = jax.devices()[0]
        where = {
            "device": device.device_kind,
            "machine": platform.processor() or platform.machine(),
            "jax": jax.__version__,
            "config": {k: v for k, v in dataclasses.asdict(config).items() if k != "json"},
        }
        config.json.write_text(json.dumps({"rows": rows} | where, indent=1) + "\n")


def random_gated(model: Any, config: BenchmarkConfig):
    """Admission at exactly the given rate whose gates are evaluated all the same."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from flax import nnx

    from kvjax.policies import Policy, make_policy
    from kvjax.policies.admission.random import Random
    from kvjax.policies.admission.wgkv import WriteGate
    from kvjax.policies.interfaces import Admission
    from kvjax.struct import struct

    @struct
    class GatedRandom(Admission):
        gates: WriteGate
        random: Random

        def init(self, shape):
            return self.random.init(shape)

        def score(self, state, step, seen, valid):
            state, priority, delay = self.random.score(state, step, seen, valid)
            # far below the resolution of the draw: the gate is computed and decides nothing
            return state, priority + 1e-12 * self.gates(step.k_pre, step.k), delay

        def keep(self):
            return self.random.keep()

        def admitted(self, tokens):
            return self.random.admitted(tokens)

    shape = (config.layers, config.kv_heads, config.head_dim)
    gates = jax.jit(lambda: WriteGate(*shape, expand=config.expand, rngs=nnx.Rngs(1)))()
    random: Any = make_policy("random", model=model, ratio=1 - config.sparsity, window=config.window)
    assert np.isfinite(jnp.sum(gates.b2[...]))
    return Policy(GatedRandom(gates, random.admission), name="random + gates", window=config.window)


def at_share(name: str, model: Any, config: BenchmarkConfig) -> Any:
    """The policy called so in `kvjax.evaluate`, keeping the share that is not refused."""
    import numpy as np

    from kvjax.evaluate.config import default_chunk, default_observed
    from kvjax.evaluate.contenders import Sizing, budget_policy
    from kvjax.evaluate.static_heads import SINKS, whole_heads

    if name.split("+")[0] == "wgkv":
        raise UserError(f"--policies {name}: gates are timed as 'random + gates', at a rate that is known")
    share = 1 - config.sparsity
    if name == "head_pattern":
        weights = np.random.default_rng(0).random((config.layers, config.kv_heads))
        sizes = {"context": config.context, "window": config.window, "sink": SINKS[0]}
        return whole_heads(weights, entries=share * config.context, **sizes).policy(model)
    chunk = default_chunk(config.context)
    sizing = Sizing(model, share, config.context, config.context, chunk, default_observed(chunk))
    return budget_policy(name, sizing)


def eviction(
    model: Any, policy: Any, tokens: Any, config: BenchmarkConfig
) -> tuple[Any, Callable[[Any], Any]] | None:
    """A cache before the compaction that ends a policy's prefill, and that compaction; None where there is none."""
    from kvjax.inference import sampling
    from kvjax.inference.schedule import at_prompt_end

    if policy.plan is None or policy.plan.moment.when != "prompt":
        return None
    cache = sampling.prefill(model, [tokens], policy=policy.uncompacted, page_size=config.page_size)
    return cache, lambda cache: at_prompt_end(model, policy, cache, [tokens])


def narrow_model(config: BenchmarkConfig) -> Any:
    """A random model of the sizes that are told."""
    import jax
    from flax import nnx

    from kvjax.models.config import ModelConfig
    from kvjax.models.decoder import Decoder

    shape = ModelConfig(
        model_type="qwen3", vocab_size=512, num_layers=config.layers, width=config.width, mlp_width=config.mlp_width,
        num_heads=config.heads, num_kv_heads=config.kv_heads, head_dim=config.head_dim, qk_norm=True, tied=True,
        max_position=max(config.context, *config.positions, 0) + config.new_tokens,
    )  # fmt: skip
    return jax.jit(lambda: Decoder(shape, rngs=nnx.Rngs(0), dtype=config.dtype))()


def prefilled(model: Any, policy: Any, tokens: Any, config: BenchmarkConfig) -> Any:
    """A policy's cache of the tokens, with room for those that are decoded."""
    from kvjax.inference import sampling

    return sampling.prefill(
        model, [tokens], policy=policy, max_new_tokens=config.new_tokens, page_size=config.page_size
    )


def decoded(model: Any, policy: Any, cache: Any, config: BenchmarkConfig) -> Any:
    """The cache, which is taken over, after so many more tokens."""
    import jax
    import numpy as np

    from kvjax.inference import sampling
    from kvjax.mesh import BATCH, put

    first, running = put(np.zeros(1, np.int32), BATCH), put(np.ones(1, bool), BATCH)
    given = first, running, sampling.Draw(), jax.random.key(0), np.int32(1)
    return sampling.decode_block(
        model, policy.continuing.traced, cache, *given, count=config.new_tokens, greedy=True
    )[0]


def clock(f: Callable[..., Any], *a: Any) -> tuple[float, Any]:
    """Seconds, and what it gives."""
    import jax

    began = time.perf_counter()
    out = jax.block_until_ready(f(*a))
    return time.perf_counter() - began, out


def copied(state: Any) -> Any:
    """For what takes its memory over."""
    import jax
    import jax.numpy as jnp

    return jax.block_until_ready(jax.tree.map(jnp.copy, state))


def run_positions(config: BenchmarkConfig) -> list[dict[str, Any]]:
    """A row for each position: seconds a decoded token of KVPOP's cache and of the full one, interleaved."""
    import numpy as np

    from kvjax import cache as caches
    from kvjax.policies import make_policy
    from kvjax.policies.admission.kvpop import Sizes

    model = narrow_model(config)
    scorers = Sizes(config.layers, config.kv_heads, config.head_dim).make(0)
    policies = {
        "full": make_policy("full", window=config.window),
        "kvpop": make_policy("kvpop", scorers=scorers, model=model),
    }
    tokens = np.random.default_rng(0).integers(0, 512, max(config.positions))
    states = {
        (name, at): prefilled(model, policy, tokens[:at], config)
        for at in config.positions
        for name, policy in policies.items()
    }
    times: dict[tuple[str, int], list[float]] = {key: [] for key in states}
    for repeat in range(config.repeats + 1):
        for (name, at), state in states.items():
            seconds, _ = clock(decoded, model, policies[name], copied(state), config)
            if repeat:
                times[name, at].append(seconds / config.new_tokens)
    median = {key: float(np.median(found)) for key, found in times.items()}
    first = median["kvpop", config.positions[0]]
    return [
        {
            "phase": "decode", "position": at, "full_s": median["full", at], "policy_s": median["kvpop", at],
            "beside_first": median["kvpop", at] / first,
            "bytes": caches.stats(states["kvpop", at]).bytes, "full_bytes": caches.stats(states["full", at]).bytes,
        }
        for at in config.positions
    ]  # fmt: skip


def run(config: BenchmarkConfig) -> list[dict[str, Any]]:
    """The rows: for each policy one for prefill and one for decode (seconds a token)."""
    import jax.numpy as jnp
    import numpy as np
    from dense_attention import dense_paths

    from kvjax import cache as caches
    from kvjax.policies import make_policy

    model = narrow_model(config)
    tokens = np.random.default_rng(0).integers(0, 512, config.context)

    def paged(policy):
        """A policy's (prefill, decode)."""
        return lambda _: prefilled(model, policy, tokens, config), lambda cache: decoded(
            model, policy, cache, config
        )

    policies = {"random + gates": random_gated(model, config)}
    policies |= {name: at_share(name, model, config) for name in config.policies}
    evictions = {name: eviction(model, policy, tokens, config) for name, policy in policies.items()}
    dense = dense_paths(model, config)
    dense["full policy"] = paged(make_policy("full", window=config.window))
    paths = dense | {name: paged(policy) for name, policy in policies.items()}
    ids = jnp.asarray(tokens[None], jnp.int32)
    states: dict[str, Any] = {}
    times: dict[tuple[str, str], list[float]] = {}
    slow: set[str] = set()
    for repeat in range(config.repeats + 1):
        if repeat == 1:
            times = {}  # the warm-up does not count
        for name, (prefill, _) in paths.items():
            if name not in slow:
                seconds, states[name] = clock(prefill, ids)
                times.setdefault(("prefill", name), []).append(seconds)
        if repeat == 0:
            warm = {name: times["prefill", name][0] for name in dense}
            slow = {name for name in dense if warm[name] > 2 * min(warm.values())}
            sizes = {name: caches.stats(states[name]) for name in policies}
        # decoding and compaction take the state's memory over, and a slow prefill's state must last
        for name, (_, decode) in paths.items():
            seconds, _ = clock(decode, copied(states[name]))
            times.setdefault(("decode", name), []).append(seconds / config.new_tokens)
        for name, found in evictions.items():
            if found is not None:
                times.setdefault(("eviction", name), []).append(clock(found[1], copied(found[0]))[0])
    median = {key: float(np.median(found)) for key, found in times.items()}
    rows = []
    for name in policies:
        for phase in ("prefill", "decode"):
            rival = min((x for x in dense if (phase, x) in median), key=lambda x: median[phase, x])
            full, own = median[phase, rival], median[phase, name]
            row = {
                "phase": phase, "policy": name, "context": config.context, "sparsity": config.sparsity, "full_s": full,
                "policy_s": own, "ratio": full / own, "rival": rival, "bytes": sizes[name].bytes,
                "full_bytes": sizes[name].full_bytes, "page_size": config.page_size,
                "kv_ratio": sizes[name].kv_ratio,
            }  # fmt: skip
            if phase == "prefill" and evictions[name] is not None:
                row["eviction_s"] = median["eviction", name]
            rows.append(row)
    return rows


if __name__ == "__main__":
    run_command(main)
