"""What Fast KVzip's gates cost while decoding under a fixed budget: scores in one product every 128 tokens, at every
token, and none (constant scores, the same compactions).

python infer/gating.py --model models/SmolLM2-135M-Instruct.Q4_1.gguf --entries 256
"""

import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.command.launch import MeshShape, parse_command, run_command, start
from kvjax.errors import UserError

EVERY = 128
"""Tokens between two compactions."""
PATHS = "constant scores", "gates, 128 at once", "gates, one by one"


@dataclasses.dataclass(frozen=True)
class GatingConfig:
    """Milliseconds of a decode step of a batch, by 128 steps with their compaction. In turn, medians, compilation and
    the first run left out; gates are random, which changes nothing of their cost. And what gates add by count at a
    large model's shapes."""

    model: str = "builtin"
    """A Hugging Face folder, a GGUF file, or `builtin`."""
    counted: str = "llama-3.1-8b"
    """A model whose multiplications and bytes are counted, by its name as of kvjax.plan."""
    entries: int = 256
    """Entries of a kv head that stay, on average over the model."""
    prompts: int = 2
    """Sequences of the batch."""
    new_tokens: int = 385
    """Tokens that each is continued by, from twice as many entries on."""
    repeats: int = 5
    """Runs of each."""
    json: Path | None = None
    """Write the figures here as well."""

    def check(self) -> None:
        """Refuse numbers that mean nothing. Raises UserError."""
        for name, least in {"entries": 133, "prompts": 1, "new_tokens": 129, "repeats": 1}.items():
            if getattr(self, name) < least:
                option = name.replace("_", "-")
                raise UserError(f"--{option} must be at least {least}, got {getattr(self, name)}")


def policies(model: Any, entries: int) -> dict[str, Any]:
    """The three paths, which differ in their scores alone."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    import kvjax
    from kvjax.policies import FastKVzip
    from kvjax.policies.eviction.fast_kvzip import SinkGate
    from kvjax.struct import struct

    def spread(index: Any) -> Any:
        """No two of one compaction alike, and the same for all heads."""
        return (index % EVERY * 0.618034) % 1.0

    @struct
    class Gated(FastKVzip):
        """Gates that are asked and hardly listened to: all paths keep the same entries."""

        def numbers(self, state: Any, step: Any, readout: Any) -> Any:
            own = FastKVzip.numbers(self, state, step, readout)["score"]
            return {"score": spread(step.position)[:, None] + 1e-9 * own}

        def late(self, trail: Any) -> Any:
            own = FastKVzip.late(self, trail)["score"]
            return {"score": spread(jnp.arange(self.pending)) + 1e-9 * own}

    @struct
    class Constant(FastKVzip):
        """The same without gates."""

        @property
        def pending(self) -> int:
            return 0

        def numbers(self, state: Any, step: Any, readout: Any) -> Any:
            scores = jnp.broadcast_to(spread(step.position)[:, None], step.k.shape[:3])
            return {"score": scores.astype(jnp.float32)}

    shape = model.config
    group = shape.num_heads // shape.num_kv_heads
    sizes = shape.num_layers, shape.num_kv_heads, group, shape.width
    gates = jax.jit(lambda: SinkGate(*sizes, rngs=nnx.Rngs(0)))()
    methods = Constant(gates), Gated(gates), Gated(gates, buffer=1)
    made = (kvjax.make_policy(model=model, eviction=x, entries=entries, when="position") for x in methods)
    return dict(zip(PATHS, made, strict=True))


def measure(config: GatingConfig, model: Any) -> dict[str, list[float]]:
    """Milliseconds of a step of each path, block by block."""
    import kvjax
    from kvjax.command.stopwatch import Stopwatch

    random = np.random.default_rng(0)
    prompts = random.integers(1, model.config.vocab_size, (config.prompts, 2 * config.entries)).tolist()
    times: dict[str, list[float]] = {name: [] for name in PATHS}
    paths = policies(model, config.entries)
    for repeat in range(config.repeats + 1):
        for name, policy in paths.items():
            watch = Stopwatch()
            for blocks, _ in kvjax.stream(
                model, prompts, policy=policy, max_new_tokens=config.new_tokens, eos=(), block=EVERY
            ):
                lap = watch.lap()
                # of prefill, and what is left at the end, nothing counts; the others have one compaction each
                if repeat and len(blocks[0]) == EVERY:
                    times[name].append(1e3 * lap / EVERY)
    return times


def counted(name: str, entries: int) -> dict[str, float]:
    """Of a decoded token of one sequence, and of its gates: multiplications with additions, and bytes that are read,
    16 bits a number."""
    from kvjax.plan.shapes import find_shape

    shape = find_shape(name).config
    layers, width, heads, kv = shape.num_layers, shape.width, shape.num_heads, shape.num_kv_heads
    mixing = 2 * width * (heads + kv) * shape.head_dim
    weights = layers * (mixing + 3 * width * shape.mlp_width) + width * shape.vocab_size
    attention = layers * 2 * entries * heads * shape.head_dim
    stored = layers * 2 * entries * kv * shape.head_dim
    gates = layers * width * (heads + kv) * 16
    return {
        "step_flops": 2 * (weights + attention),
        "gate_flops": 2 * gates,
        "step_bytes": 2 * (weights + stored),
        "gate_bytes": 2 * gates / 128,
    }


def main(args: list[str] | None = None) -> None:
    """The command."""
    config = parse_command(GatingConfig, args)
    config.check()
    mesh = start(MeshShape())

    import jax

    import kvjax

    by_count = counted(config.counted, 4096)
    with jax.set_mesh(mesh):
        model = kvjax.load_model(config.model)
        times = measure(config, model)
    found = {name: {"median": statistics.median(own), "least": min(own)} for name, own in times.items()}
    for name, own in found.items():
        said = [f"{x:.2f} ms ({100 * (x / found[PATHS[0]][kind] - 1):+.1f}%)" for kind, x in own.items()]
        print(f"{name:20} a step {said[0]}, the least {said[1]}")
    shares = [100 * by_count[f"gate_{what}"] / by_count[f"step_{what}"] for what in ("flops", "bytes")]
    print(
        f"{config.counted}, 4,096 entries a kv head: gates add {shares[0]:.2f}% of a step's operations and "
        f"{shares[1]:.3f}% of its bytes (one sequence, 16 bits, 128 tokens at once)"
    )
    if config.json is not None:
        config.json.write_text(json.dumps({"ms": found, "counted": by_count}, indent=1) + "\n")


if __name__ == "__main__":
    run_command(main)
