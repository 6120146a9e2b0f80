"""Time prefill and decoding of a whole model with compressed caches against full attention, in one run.

    python infer/benchmark.py --policies wgkv snapkv:ratio=0.25 quest:ratio=0.25

One sequence is read and continued greedily. Index building, page bookkeeping, compaction and the host's work between
blocks are inside the clock. The rival is the same model with every key by the fastest path there is: contiguous caches
(blockwise causal attention, XLA's own, and cuDNN's on a GPU) and kvjax's own pages under the full policy are all timed,
and each phase is compared with the best of them. Paths take turns, so that a noisy machine is noisy for all. The first
round compiles and does not count; of the others the median does.

`wgkv` without gates follows WG-KV's protocol (App. I): tokens are admitted at random at an exact rate, and gates of the
trained ones' size are evaluated all the same. `kvpop` without scorers has random ones, which cost what trained ones do.

    python infer/benchmark.py --throughput --model builtin --policies snapkv:ratio=0.25

times many prompts of several lengths at once, against `generate` of Hugging Face transformers with the same weights
(needs torch, from the extra `parity`).
"""

import dataclasses
import importlib
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np

from kvjax.cli.launch import MeshShape, parse_command, run_command, start
from kvjax.errors import UserError
from kvjax.files import write_text
from kvjax.sampling_params import SamplingParams

TRANSFORMERS = "transformers"
OWN_FULL = "full"
"""kvjax's own pages under the full policy."""


@dataclasses.dataclass(frozen=True)
class BenchmarkConfig:
    """Time prefill and decoding with compressed caches against full attention."""

    policies: tuple[str, ...] = ("wgkv",)
    """Policies to time, each a name with its arguments, as `snapkv:ratio=0.25`. The full cache is always timed."""
    model: str | None = None
    """A model folder, a GGUF file, a hub id or `builtin`. None: random weights of the sizes below."""
    context: tuple[int, ...] = (16384,)
    """Prompt tokens; each number is timed."""
    new_tokens: int = 32
    """Decoded tokens in one timing."""
    page_size: int = 64
    """Tokens per page."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights and cache."""
    repeats: int = 3
    """Timings of each path."""
    layers: int = 2
    width: int = 128
    """Width of the residual stream. It is narrow, so that attention dominates."""
    mlp_width: int = 128
    heads: int = 32
    """Query heads. These and the next two are Llama-3.2-1B's."""
    kv_heads: int = 8
    head_dim: int = 64
    throughput: bool = False
    """Time many prompts of random tokens at once, against transformers."""
    prompts: int = 16
    """For --throughput: sequences of the batch."""
    shortest: int = 100
    """For --throughput: tokens of the shortest prompt. The others are spread evenly up to --longest."""
    longest: int = 1500
    """For --throughput: tokens of the longest prompt."""
    json: Path | None = None
    """File to write the rows to."""

    def check(self) -> None:
        """Raise UserError for numbers that mean nothing."""
        for name in ("new_tokens", "repeats", "prompts"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")
        if min(self.context, default=0) < 1:
            raise UserError(f"--context must be at least 1, got {list(self.context)}")
        if not 1 <= self.shortest <= self.longest:
            raise UserError(
                f"--shortest and --longest must be rising, got {self.shortest} and {self.longest}"
            )
        if self.throughput and self.model is None:
            raise UserError("--throughput needs --model: transformers reads the same folder")


def main(args: list[str] | None = None) -> None:
    """Run the command."""
    config = parse_command(BenchmarkConfig, args)
    config.check()
    mesh = start(MeshShape())

    import jax

    with jax.set_mesh(mesh):
        rows = run_throughput(config) if config.throughput else run(config)
    if config.json is not None:
        found = {
            "rows": rows,
            "device": jax.devices()[0].device_kind,
            "machine": platform.processor() or platform.machine(),
            "jax": jax.__version__,
            "config": {k: v for k, v in dataclasses.asdict(config).items() if k != "json"},
        }
        write_text(config.json, json.dumps(found, indent=1) + "\n")


def random_model(config: BenchmarkConfig) -> Any:
    """Return a Qwen3 with random weights of the sizes in `config`."""
    import jax
    from flax import nnx

    from kvjax.models.config import ModelConfig
    from kvjax.models.decoder import Decoder

    shape = ModelConfig(
        model_type="qwen3", vocab_size=512, num_layers=config.layers, width=config.width, mlp_width=config.mlp_width,
        num_heads=config.heads, num_kv_heads=config.kv_heads, head_dim=config.head_dim, qk_norm=True, tied=True,
        max_position=max(config.context) + config.new_tokens + 1,
    )  # fmt: skip
    return jax.jit(lambda: Decoder(shape, rngs=nnx.Rngs(0), dtype=config.dtype))()


def random_gates(model: Any, rate: float = 0.25, window: int = 256) -> Any:
    """Return a policy that admits tokens at exactly this rate, at random, and evaluates gates all the same."""
    import jax
    from flax import nnx

    from kvjax.policies import Policy, make_policy
    from kvjax.policies.admission.random import Random
    from kvjax.policies.admission.wgkv import WriteGate
    from kvjax.policies.base import Admission
    from kvjax.struct import struct

    @struct
    class GatedRandom(Admission):
        gates: WriteGate
        random: Random

        def init(self, shape):
            return self.random.init(shape)

        def score(self, state, step, seen, valid):
            state, priority, delay = self.random.score(state, step, seen, valid)
            # far below the resolution of the priorities: the gates are computed and decide nothing
            return state, priority + 1e-12 * self.gates(step.k_pre, step.k), delay

        def keep(self):
            return self.random.keep()

        def admitted(self, tokens):
            return self.random.admitted(tokens)

    shape = (model.config.num_layers, model.config.num_kv_heads, model.config.head_dim)
    # 1.5 is the paper's hidden width over head_dim for Qwen3
    gates = jax.jit(lambda: WriteGate(*shape, expand=1.5, rngs=nnx.Rngs(1)))()
    random: Any = make_policy({"random": {"ratio": rate, "window": window}}, model=model)
    return Policy(GatedRandom(gates, random.admission), name="wgkv", window=window)


def policy_of(text: str, model: Any, tokenizer: Any) -> Any:
    """Return the policy that a string describes, with random gates or scorers where it names none."""
    import kvjax
    from kvjax.policies.admission.kvpop import Sizes
    from kvjax.policies.make import parse_policy

    described = parse_policy(text)
    wgkv, kvpop = described.get("wgkv"), described.get("kvpop")
    if wgkv is not None and "gates" not in wgkv:
        if len(described) > 1:
            raise UserError(f"--policies {text}: random gates are timed alone")
        return random_gates(model, **wgkv)
    if kvpop is not None and not kvpop.keys() & {"gates", "scorers"}:
        shape = (model.config.num_layers, model.config.num_kv_heads, model.config.head_dim)
        kvpop["scorers"] = Sizes(*shape).make(0)
    return kvjax.make_policy(described, model=model, tokenizer=tokenizer)


def run(config: BenchmarkConfig) -> list[dict[str, Any]]:
    """Time one sequence. Return and print a row for each context, phase and path; decoding is by token."""
    import kvjax

    if config.model is None:
        model, tokenizer = random_model(config), None
    else:
        longest = max(config.context) + config.new_tokens + 1
        model, tokenizer = kvjax.load(config.model, config.dtype, max_length=longest)
    policies = {name: policy_of(name, model, tokenizer) for name in config.policies}
    policies = {OWN_FULL: kvjax.make_policy("full")} | policies
    rows = []
    for context in config.context:
        tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, context)
        for row in time_context(config, model, policies, tokens):
            rows.append(row)
            size = (
                ""
                if row["bytes"] is None
                else f"{row['bytes'] / 2**20:9.1f} MiB ({row['kv_ratio']:.3f} kept)"
            )
            print(
                f"{row['phase']:8}{context:>8} tokens  {row['path']:32}{row['seconds']:10.5f} s "
                f"{row['ratio']:6.2f}× {size}",
                flush=True,
            )
    return rows


def time_context(
    config: BenchmarkConfig, model: Any, policies: dict[str, Any], tokens: np.ndarray
) -> list[dict[str, Any]]:
    """Return the rows of one context."""
    from dense_attention import dense_paths

    dense = dense_paths(model, len(tokens), config.new_tokens)
    ids = np.asarray(tokens[None], np.int32)
    stats: dict[str, Any] = {}
    times: dict[tuple[str, str], list[float]] = {}
    for repeat in range(config.repeats + 1):
        for name in [*dense, *policies]:
            if name in dense:
                seconds = time_dense(*dense[name], ids, config.new_tokens)
            else:
                *seconds, stats[name] = time_policy(config, model, policies[name], tokens)
            if repeat:
                for phase, one in zip(("prefill", "decode"), seconds, strict=True):
                    times.setdefault((phase, name), []).append(one)
    rows = []
    for phase in ("prefill", "decode"):
        median = {name: statistics.median(times[phase, name]) for name in [*dense, *policies]}
        rival = min([*dense, OWN_FULL], key=lambda name: median[name])
        for name, seconds in median.items():
            sizes = stats.get(name)
            rows.append({
                "context": len(tokens), "phase": phase, "path": name, "seconds": seconds, "rival": rival,
                "ratio": median[rival] / seconds, "bytes": sizes and sizes.bytes, "kv_ratio": sizes and sizes.kv_ratio,
            })  # fmt: skip
    return rows


def time_dense(prefill: Callable, decode: Callable, ids: np.ndarray, new_tokens: int) -> tuple[float, float]:
    """Return seconds of prefill and seconds a decoded token of one of `dense_paths`."""
    import jax

    began = time.perf_counter()
    state = jax.block_until_ready(prefill(ids))
    between = time.perf_counter()
    jax.block_until_ready(decode(state))
    return between - began, (time.perf_counter() - between) / new_tokens


def time_policy(
    config: BenchmarkConfig, model: Any, policy: Any, tokens: np.ndarray
) -> tuple[float, float, Any]:
    """Return seconds of prefill (with the first new token), seconds a decoded token, and the stats of the cache that
    prefill leaves."""
    import jax

    import kvjax
    from kvjax.inference import stream

    sampling = SamplingParams(max_new_tokens=config.new_tokens + 1, ignore_eos=True)
    options = {"policy": policy, "block": config.new_tokens, "page_size": config.page_size}
    began = time.perf_counter()
    blocks = stream(model, [tokens], sampling, **options)
    cache = next(blocks).cache
    jax.block_until_ready(cache)
    prefill = time.perf_counter() - began
    stats = kvjax.stats(cache)
    began = time.perf_counter()
    for block in blocks:
        jax.block_until_ready(block.cache)
    return prefill, (time.perf_counter() - began) / config.new_tokens, stats


Generate = Callable[[list[list[int]], int], tuple[list[list[int]], float, float]]
"""Continues each prompt greedily by a number of tokens, whatever they are. Returns them, the seconds to the first of
them, and the seconds of the others."""


def with_transformers(folder: Path, dtype: str) -> Generate:
    """Return transformers' `generate`, with the padding on the left that it wants. Raises UserError without torch."""
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        raise UserError("transformers needs torch: pip install '.[parity]'") from None
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()

    def generate(prompts: list[list[int]], count: int) -> tuple[list[list[int]], float, float]:
        came = []

        def watch(ids: Any, logits: Any) -> Any:
            came.append(time.perf_counter())
            return logits

        began, width = time.perf_counter(), max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        options = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": count, "min_new_tokens": count}
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=mask, logits_processor=[watch], **options)
        return out[:, width:].tolist(), came[0] - began, time.perf_counter() - came[0]

    return generate


def with_kvjax(model: Any, policy: Any) -> Generate:
    """Return kvjax's `stream` under a policy."""
    from kvjax.inference import stream

    def generate(prompts: list[list[int]], count: int) -> tuple[list[list[int]], float, float]:
        began, sampling = time.perf_counter(), SamplingParams(max_new_tokens=count, ignore_eos=True)
        blocks = stream(model, prompts, sampling, policy=policy)
        first = np.asarray(next(blocks).tokens)
        came = time.perf_counter()
        rest = [np.asarray(block.tokens) for block in blocks]
        return np.concatenate([first, *rest], 1).tolist(), came - began, time.perf_counter() - came

    return generate


def run_throughput(config: BenchmarkConfig) -> list[dict[str, Any]]:
    """Time a batch. Return and print tokens per second of each path, and how many answers are the rival's."""
    import kvjax
    from kvjax.models.folder import find_model

    assert config.model is not None  # BenchmarkConfig.check
    folder = find_model(config.model)
    rival = with_transformers(folder, config.dtype)
    model, tokenizer = kvjax.load(folder, config.dtype)
    policies = {name: policy_of(name, model, tokenizer) for name in config.policies}
    policies = {OWN_FULL: kvjax.make_policy("full")} | policies
    paths = {TRANSFORMERS: rival} | {name: with_kvjax(model, policy) for name, policy in policies.items()}
    random = np.random.default_rng(0)
    lengths = np.linspace(config.shortest, config.longest, config.prompts).astype(int)
    prompts = [random.integers(1, model.config.vocab_size, length).tolist() for length in lengths]
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in paths}
    answers: dict[str, list[list[int]]] = {}
    for repeat in range(config.repeats + 1):
        for name, generate in paths.items():
            # the first token counts as prefill
            answers[name], first, rest = generate(prompts, config.new_tokens + 1)
            if repeat:
                times[name].append((first, rest))
    rows = []
    for name in paths:
        first, rest = (statistics.median(seconds) for seconds in zip(*times[name], strict=True))
        decoded = config.prompts * config.new_tokens
        same = sum(own == other for own, other in zip(answers[name], answers[TRANSFORMERS], strict=True))
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
