"""What reading a prompt costs while its cache is made smaller: time and the largest cache of policies, in one run.

python infer/prefill.py --model models/SmolLM2-135M-Instruct.Q4_1.gguf --policies full kvzip fast_kvzip --gates GATES
"""

import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.command.launch import MeshShape, parse_command, run_command, start
from kvjax.errors import UserError
from kvjax.files import write_text


@dataclasses.dataclass(frozen=True)
class PrefillConfig:
    """Tokens per second and the peak of the cache of each policy, on prompts of random tokens. In turn, medians, the
    first run left out."""

    model: str = "builtin"
    """A Hugging Face folder, a GGUF file, or `builtin`."""
    gates: str = "builtin"
    """fast_kvzip: a folder with its gates, or `builtin`, the built-in model's."""
    policies: tuple[str, ...] = ("full", "kvzip", "fast_kvzip")
    """What is compared, the first against the others; evictions keep --ratio. A name may be followed by arguments:
    oraclekv:guidance=G5."""
    ratio: float = 0.3
    """Of the entries."""
    tokens: int = 4000
    """Of a prompt."""
    chunk: int = 1000
    """Tokens of a call, and of a chunk where a policy compacts after each."""
    prompts: int = 2
    """Sequences of the batch."""
    repeats: int = 5
    """Timings of each."""
    json: Path | None = None
    """Write the rows here as well."""

    def check(self) -> None:
        """Refuse what means nothing. Raises UserError."""
        for name in ("tokens", "chunk", "prompts", "repeats"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name} must be at least 1, got {getattr(self, name)}")


def policy_of(named: str, config: PrefillConfig, model: Any) -> Any:
    """The policy of a name and its arguments."""
    import kvjax
    from kvjax.policies.assignments import with_arguments
    from kvjax.policies.make import takes_tokenizer
    from kvjax.policies.registry import POLICIES

    name, own = with_arguments(named, POLICIES, "--policies")
    if name == "full":
        return kvjax.make_policy("full", model=model)
    told: dict[str, Any] = {"ratio": config.ratio} | (own or {})
    if name == "fast_kvzip":
        told |= {"gates": config.gates, "chunk": config.chunk}
    if takes_tokenizer(name, **told):
        told["tokenizer"] = kvjax.load_tokenizer(config.model)
    return kvjax.make_policy(name, model=model, **told)


def measure(config: PrefillConfig, model: Any) -> dict[str, dict[str, float]]:
    """Of each policy tokens per second, the most entries of a kv head at one time as a share of the prompt's tokens,
    and the share that stays."""
    import jax

    import kvjax
    from kvjax.command.stopwatch import Stopwatch
    from kvjax.evaluate.footprint import occupancy
    from kvjax.inference.record import Calls

    random = np.random.default_rng(0)
    prompts = random.integers(1, model.config.vocab_size, (config.prompts, config.tokens)).tolist()
    seconds: dict[str, list[float]] = {name: [] for name in config.policies}
    rows: dict[str, dict[str, float]] = {}
    policies = {name: policy_of(name, config, model) for name in config.policies}
    for repeat in range(config.repeats + 1):
        for name, policy in policies.items():
            calls, watch = Calls(), Stopwatch()
            cache = kvjax.prefill(model, prompts, policy=policy, chunk=config.chunk, calls=calls)
            jax.block_until_ready(cache)
            if repeat:
                seconds[name].append(watch.lap())
            else:
                peak = max(occupancy(calls, row).peak for row in range(config.prompts))
                rows[name] = {"peak": peak, "kept": kvjax.stats(cache).kv_ratio}
    total = config.prompts * config.tokens
    return {
        name: {"tokens_per_s": total / statistics.median(seconds[name])} | row for name, row in rows.items()
    }


def main(args: list[str] | None = None) -> None:
    """The command."""
    config = parse_command(PrefillConfig, args)
    config.check()
    mesh = start(MeshShape())

    import jax

    import kvjax

    with jax.set_mesh(mesh):
        model = kvjax.load_model(config.model, max_length=config.tokens)
        rows = measure(config, model)
    first = next(iter(rows.values()))["tokens_per_s"]
    for name, row in rows.items():
        print(
            f"{name:24} {row['tokens_per_s']:8.0f} tokens/s ({row['tokens_per_s'] / first:.2f}×), "
            f"peak {row['peak']:.2f}, kept {row['kept']:.3f}"
        )
    if config.json is not None:
        write_text(config.json, json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    run_command(main)
