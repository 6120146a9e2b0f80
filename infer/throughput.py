"""A ragged batch of prompts beside Hugging Face transformers, on the same machine and the same weights.

python infer/throughput.py --model FOLDER --prompts 16 --policies full snapkv:ratio=0.25

Needs torch (the extra `parity`).
"""

import dataclasses
import importlib
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.command.launch import MeshShape, parse_command, run_command, start
from kvjax.errors import UserError

TRANSFORMERS = "transformers"
"""The rival's name in the rows."""


@dataclasses.dataclass(frozen=True)
class ThroughputConfig:
    """Prefill and decode tokens per second of a batch, of kvjax's policies and of transformers' `generate` with its own
    cache, on prompts of random tokens. In turn, medians, compilation and the first run left out."""

    model: str = "builtin"
    """A Hugging Face folder, or `builtin`."""
    prompts: int = 16
    """Sequences of the batch."""
    shortest: int = 100
    """Tokens of the shortest prompt; the others are spread evenly up to --longest."""
    longest: int = 1500
    """Tokens of the longest prompt."""
    new_tokens: int = 33
    """Tokens that every prompt is continued by; the first of them counts as prefill."""
    policies: tuple[str, ...] = ("full", "streaming_llm:window=256", "knorm:ratio=0.25")
    """kvjax's, each a name with its arguments."""
    dtype: str = "float32"
    """Of the weights, on both sides."""
    repeats: int = 3
    """Timings of each, of which the median counts."""
    json: Path | None = None
    """Write the rows here as well."""

    def check(self) -> None:
        """Refuse numbers that mean nothing. Raises UserError."""
        if not 1 <= self.shortest <= self.longest:
            raise UserError(
                f"--shortest and --longest must be rising, got {self.shortest} and {self.longest}"
            )
        for name in ("prompts", "repeats"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name} must be at least 1, got {getattr(self, name)}")
        if self.new_tokens < 2:
            raise UserError(f"--new-tokens must be at least 2, got {self.new_tokens}")


Generate = Callable[[list[list[int]], int], list[list[int]]]
"""So many new tokens of each prompt, greedily, whatever they are."""


def with_transformers(folder: Path, dtype: str) -> Generate:
    """transformers' `generate`, with the padding on the left that it wants. Raises UserError without torch."""
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        raise UserError("transformers is compared by torch: pip install '.[parity]'") from None
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()

    def generate(prompts: list[list[int]], count: int) -> list[list[int]]:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        options = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": count, "min_new_tokens": count}
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=mask, **options)
        return out[:, width:].tolist()

    return generate


def with_kvjax(model: Any, policy: str) -> Generate:
    """`kvjax.sample` under a policy, by its name with arguments."""
    import kvjax

    made = kvjax.make_policy("full") if policy == "full" else _policy(policy, model)

    def generate(prompts: list[list[int]], count: int) -> list[list[int]]:
        found = kvjax.sample(model, prompts, policy=made, max_new_tokens=count, eos=())
        return [tokens.tolist() for tokens in found.tokens]

    return generate


def _policy(text: str, model: Any) -> Any:
    import kvjax
    from kvjax.policies import POLICIES
    from kvjax.policies.assignments import with_arguments

    name, arguments = with_arguments(text, POLICIES, "--policies")
    return kvjax.make_policy(name, model=model, **arguments or {})


def measure(config: ThroughputConfig, paths: dict[str, Generate], vocabulary: int) -> list[dict[str, Any]]:
    """A row a path: tokens per second of prefill and decode, and of how many prompts the tokens are the rival's."""
    random = np.random.default_rng(0)
    lengths = np.linspace(config.shortest, config.longest, config.prompts).astype(int)
    prompts = [random.integers(1, vocabulary, length).tolist() for length in lengths]
    times: dict[tuple[str, int], list[float]] = {}
    said = {}
    for repeat in range(config.repeats + 1):
        for name, generate in paths.items():
            for count in (1, config.new_tokens):
                began = time.perf_counter()
                said[name] = generate(prompts, count)
                if repeat:  # the first run compiles
                    times.setdefault((name, count), []).append(time.perf_counter() - began)
    rows = []
    for name in paths:
        first, all_ = (statistics.median(times[name, count]) for count in (1, config.new_tokens))
        same = sum(mine == theirs for mine, theirs in zip(said[name], said[TRANSFORMERS], strict=True))
        rows.append({
            "path": name,
            "prefill_tokens_per_s": int(lengths.sum()) / first,
            # None: so few tokens that they are lost in the noise of prefill
            "decode_tokens_per_s": config.prompts * (config.new_tokens - 1) / (all_ - first) if all_ > first else None,
            "equal_answers": same,
        })  # fmt: skip
    return rows


def _speed(speed: float | None, rival: float | None) -> str:
    """Tokens per second, and as a multiple of the rival's."""
    if speed is None:
        return "too short to time (--new-tokens)"
    return f"{speed:8.0f} tokens/s" + (f" ({speed / rival:.2f}×)" if rival else "")


def main(args: list[str] | None = None) -> None:
    """The command."""
    config = parse_command(ThroughputConfig, args)
    config.check()
    mesh = start(MeshShape())

    import jax

    import kvjax
    from kvjax.models.folder import find_model

    folder = find_model(config.model)
    rival = with_transformers(folder, config.dtype)
    with jax.set_mesh(mesh):
        model = kvjax.load_model(folder, dtype=config.dtype)
        paths = {TRANSFORMERS: rival} | {name: with_kvjax(model, name) for name in config.policies}
        rows = measure(config, paths, model.config.vocab_size)
    for row in rows:
        speeds = [
            _speed(row[f"{phase}_tokens_per_s"], rows[0][f"{phase}_tokens_per_s"])
            for phase in ("prefill", "decode")
        ]
        print(
            f"{row['path']:28} prefill {speeds[0]}, decode {speeds[1]}, answers equal to {TRANSFORMERS}': "
            f"{row['equal_answers']} of {config.prompts}"
        )
    if config.json is not None:
        where = {"machine": platform.processor() or platform.machine(), "jax": jax.__version__}
        options = {key: str(value) for key, value in dataclasses.asdict(config).items() if key != "json"}
        config.json.write_text(json.dumps({"rows": rows, "config": options} | where, indent=1) + "\n")


if __name__ == "__main__":
    run_command(main)
