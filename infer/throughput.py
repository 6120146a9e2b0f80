"""Time a batch of prompts of several lengths, against `generate` of Hugging Face transformers with the same weights.

    python infer/throughput.py --model builtin --policies snapkv:ratio=0.25

This needs torch, from the extra `parity`. Paths take turns. The first round compiles and does not count; the median of
the others does. The first token counts as prefill.
"""

import dataclasses
import importlib
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
from benchmark import FULL, policy_of, write_rows

from kvjax.cli.launch import MeshShape, parse_command, run_command, start
from kvjax.errors import UserError
from kvjax.sampling_params import SamplingParams

TRANSFORMERS = "transformers"


@dataclasses.dataclass(frozen=True)
class ThroughputConfig:
    """Time a batch of random prompts with compressed caches against transformers."""

    model: str
    """A model folder that transformers can read, or `builtin`."""
    policies: tuple[str, ...] = ("wgkv",)
    """Policies to time, as in `benchmark.py`. The full cache is always timed."""
    prompts: int = 16
    """The number of prompts in the batch."""
    shortest: int = 100
    """Tokens of the shortest prompt. The others are spread evenly up to --longest."""
    longest: int = 1500
    """Tokens of the longest prompt."""
    new_tokens: int = 32
    """Tokens decoded after the first."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of weights and cache."""
    repeats: int = 3
    """The number of timings of each path."""
    json: Path | None = None
    """File to write the rows to."""

    def check(self) -> None:
        """Raise UserError for numbers out of range."""
        for name in ("prompts", "new_tokens", "repeats"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")
        if not 1 <= self.shortest <= self.longest:
            raise UserError(f"--shortest must be from 1 to --longest {self.longest}, got {self.shortest}")


def main(args: list[str] | None = None) -> None:
    """Run the command."""
    config = parse_command(ThroughputConfig, args)
    config.check()
    mesh = start(MeshShape())

    import jax

    with jax.set_mesh(mesh):
        rows = run(config)
    write_rows(config, rows)


Generate = Callable[[list[list[int]], int], tuple[list[list[int]], float, float]]
"""A function that continues each prompt greedily by a number of tokens, without stopping early.

It returns the tokens, the seconds to the first one, and the seconds of the others.
"""


def with_transformers(folder: Path, dtype: str) -> Generate:
    """Return a `Generate` by transformers, with the left padding that it needs, on the CPU. Raises UserError without
    torch, or if kvjax runs elsewhere."""
    import jax

    if jax.default_backend() != "cpu":
        raise UserError("transformers runs on the CPU here: set JAX_PLATFORMS=cpu, so that kvjax does too")
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        raise UserError("transformers needs torch: pip install '.[parity]'") from None
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()

    def generate(prompts: list[list[int]], count: int) -> tuple[list[list[int]], float, float]:
        times = []

        def record_time(ids: Any, logits: Any) -> Any:
            times.append(time.perf_counter())
            return logits

        began, width = time.perf_counter(), max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        options = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": count, "min_new_tokens": count}
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=mask, logits_processor=[record_time], **options)
        return out[:, width:].tolist(), times[0] - began, time.perf_counter() - times[0]

    return generate


def with_kvjax(model: Any, policy: Any) -> Generate:
    """Return a `Generate` by kvjax's `stream` under a policy."""
    from kvjax.inference import stream

    def generate(prompts: list[list[int]], count: int) -> tuple[list[list[int]], float, float]:
        began, sampling = time.perf_counter(), SamplingParams(max_new_tokens=count, ignore_eos=True)
        blocks = stream(model, prompts, sampling, policy=policy)
        first = np.asarray(next(blocks).tokens)
        first_time = time.perf_counter()
        rest = [np.asarray(block.tokens) for block in blocks]
        return (
            np.concatenate([first, *rest], 1).tolist(),
            first_time - began,
            time.perf_counter() - first_time,
        )

    return generate


def run(config: ThroughputConfig) -> list[dict[str, Any]]:
    """Time a batch. Return and print each path's tokens per second, and how many answers equal the rival's."""
    import kvjax
    from kvjax.models.folder import find_model

    folder = find_model(config.model)
    rival = with_transformers(folder, config.dtype)
    model, tokenizer = kvjax.load(folder, config.dtype)
    policies = {name: policy_of(name, model, tokenizer) for name in config.policies}
    policies = {FULL: kvjax.make_policy("full")} | policies
    paths = {TRANSFORMERS: rival} | {name: with_kvjax(model, policy) for name, policy in policies.items()}
    random = np.random.default_rng(0)
    lengths = np.linspace(config.shortest, config.longest, config.prompts).astype(int)
    prompts = [random.integers(1, model.config.vocab_size, length).tolist() for length in lengths]
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in paths}
    answers: dict[str, list[list[int]]] = {}
    for repeat in range(config.repeats + 1):
        for name, generate in paths.items():
            answers[name], first, rest = generate(prompts, config.new_tokens + 1)
            if repeat:
                times[name].append((first, rest))
    rows = []
    for name in paths:
        first, rest = (statistics.median(seconds) for seconds in zip(*times[name], strict=True))
        decoded = config.prompts * config.new_tokens
        same = sum(x == y for x, y in zip(answers[name], answers[TRANSFORMERS], strict=True))
        row = {
            "path": name,
            "prefill_tokens_per_s": int(lengths.sum()) / first,
            "decode_tokens_per_s": decoded / rest,
            "equal_answers": same,
        }
        rows.append(row)
        speeds = [
            f"{row[phase]:8.0f} tokens/s ({row[phase] / rows[0][phase]:.2f}×)"
            for phase in ("prefill_tokens_per_s", "decode_tokens_per_s")
        ]
        print(
            f"{name:32} prefill {speeds[0]}, decode {speeds[1]}, answers equal to {TRANSFORMERS}': "
            f"{same} of {config.prompts}"
        )
    return rows


if __name__ == "__main__":
    run_command(main)
