"""Time prefill and decoding of a whole model with compressed caches against full attention, in one run.

    python infer/benchmark.py --policies wgkv snapkv:ratio=0.25 quest:ratio=0.25

The timings include index building, page bookkeeping and compaction. The rival is the fastest path of the same model
with full attention. Its paths are contiguous caches (blockwise or einsum attention, XLA's attention, and cuDNN's on a
GPU) and kvjax's pages under the full policy; each phase is compared with the fastest of them. Paths take turns, so that
noise of the machine affects all of them. The first round compiles and does not count; the median of the others does.

Prefill reads one sequence. Decoding begins with caches of random entries, as full as each context would leave them
(`synthetic_cache.py`), and runs one program per policy and batch size for all contexts. Compactions between blocks
(`when=every`, `overflow`) are left out. Every row has a bound: for decoding, the time that this device takes to copy
the weights and entries that must be read; for prefill, the time of its products at the rate of a large product.

`wgkv` without gates follows WG-KV's protocol (App. I): tokens are admitted at random at an exact rate, and gates of the
usual size are still evaluated. `kvpop` without scorers has random ones, which cost as much as trained ones.

With --json, a run that was interrupted resumes.
"""

import dataclasses
import functools
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from kvjax.cli.launch import MeshShape, parse_command, run_command, start
from kvjax.errors import UserError
from kvjax.files import write_text
from kvjax.sampling_params import SamplingParams

FULL = "full"
"""The path of kvjax's pages under the full policy."""
COLUMNS = "phase", "batch", "context", "path", "seconds", "ratio", "roofline", "fraction", "bytes", "kv_ratio"
"""The fields of a row that are printed."""


@dataclasses.dataclass(frozen=True)
class BenchmarkConfig:
    """Time prefill and decoding with compressed caches against full attention."""

    policies: tuple[str, ...] = ("wgkv",)
    """Policies to time, each a name with its arguments, such as `snapkv:ratio=0.25`. The full cache is always timed."""
    model: str | None = None
    """A model folder, a GGUF file, a hub id or `builtin`. None: random weights of the sizes below."""
    context: tuple[int, ...] = (16384,)
    """Context lengths to time, in tokens."""
    batch: tuple[int, ...] = (1,)
    """Batch sizes to time in decoding."""
    new_tokens: int = 32
    """Tokens decoded in one timing."""
    page_size: int = 64
    """Tokens per page."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of weights and cache."""
    repeats: int = 3
    """The number of timings of each path."""
    layers: int = 2
    width: int = 128
    """Width of the residual stream. The default is narrow, so that attention dominates."""
    mlp_width: int = 128
    heads: int = 32
    """Query heads. The defaults of `heads`, `kv_heads` and `head_dim` are those of Llama-3.2-1B."""
    kv_heads: int = 8
    head_dim: int = 64
    json: Path | None = None
    """File to write the rows to, and to resume from."""

    def check(self) -> None:
        """Raise UserError for numbers out of range."""
        for name in ("new_tokens", "repeats"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")
        for name in ("context", "batch"):
            if min(getattr(self, name), default=0) < 1:
                raise UserError(f"--{name} must be at least 1, got {list(getattr(self, name))}")


def main(args: list[str] | None = None) -> None:
    """Run the command."""
    config = parse_command(BenchmarkConfig, args)
    config.check()
    mesh = start(MeshShape())

    import jax

    with jax.set_mesh(mesh):
        run(config)


def write_rows(config: Any, rows: list[dict[str, Any]]) -> None:
    """Write the rows, the device and the options to the config's file, if it names one."""
    if config.json is not None:
        write_text(config.json, json.dumps({"rows": rows} | run_description(config), indent=1) + "\n")


def run_description(config: Any) -> dict[str, Any]:
    """Return the fields of a run's JSON file that describe it: device, jax version and options."""
    import jax

    options = {k: v for k, v in dataclasses.asdict(config).items() if k != "json"}
    return {
        "device": jax.devices()[0].device_kind,
        "machine": platform.processor() or platform.machine(),
        "jax": jax.__version__,
        "config": json.loads(json.dumps(options)),
    }


def rows_so_far(config: BenchmarkConfig) -> list[dict[str, Any]]:
    """Return the rows of the config's file. Raises UserError if its device, jax version or options differ."""
    if config.json is None or not config.json.exists():
        return []
    saved = json.loads(config.json.read_text())
    rows = saved.pop("rows")
    for name, value in run_description(config).items():
        if saved[name] != value:
            raise UserError(f"--json {config.json}: its rows have another {name}; name another file")
    return rows


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
    """Return a policy that admits tokens at random at exactly this rate, and still evaluates gates."""
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
            # This is far below the resolution of the priorities, so the gates are computed but decide nothing.
            return state, priority + 1e-12 * self.gates(step.k_pre, step.k), delay

        def keep(self):
            return self.random.keep()

        def admitted(self, tokens):
            return self.random.admitted(tokens)

    shape = (model.config.num_full_layers, model.config.num_kv_heads, model.config.head_dim)
    # the paper's ratio of hidden width to head_dim for Qwen3
    gates = jax.jit(lambda: WriteGate(*shape, expand=1.5, rngs=nnx.Rngs(1)))()
    random: Any = make_policy({"random": {"ratio": rate, "window": window}}, model=model)
    return Policy(GatedRandom(gates, random.admission), name="wgkv", window=window)


def policy_of(text: str, model: Any, tokenizer: Any) -> Any:
    """Return the policy that a string describes, with random gates or scorers if it names none."""
    import kvjax
    from kvjax.policies.admission.kvpop import Sizes
    from kvjax.policies.make import parse_policy

    described = parse_policy(text)
    wgkv, kvpop = described.get("wgkv"), described.get("kvpop")
    if wgkv is not None and "gates" not in wgkv:
        if len(described) > 1:
            raise UserError(f"--policies {text}: random gates cannot be combined with other methods")
        if unknown := wgkv.keys() - {"rate", "window"}:
            raise UserError(f"--policies {text}: random gates have a rate and a window, no {min(unknown)}")
        return random_gates(model, **wgkv)
    if kvpop is not None and not kvpop.keys() & {"gates", "scorers"}:
        shape = (model.config.num_full_layers, model.config.num_kv_heads, model.config.head_dim)
        kvpop["scorers"] = Sizes(*shape).make(0)
    return kvjax.make_policy(described, model=model, tokenizer=tokenizer)


class Timing(NamedTuple):
    """One timing of a path."""

    seconds: float
    bound: float
    """The least seconds that it can take."""
    bytes: int | None = None
    """Bytes of the pages in use. None: the cache is contiguous."""
    kv_ratio: float | None = None
    """The share of a full cache's entries that is held."""


TimePath = Callable[[], Timing]
"""A function that times a phase on one path."""


def run(config: BenchmarkConfig) -> list[dict[str, Any]]:
    """Time each phase, batch, context and path. Return, print and write the rows. Decoding times are per token."""
    import jax
    from dense_attention import layers_of

    import kvjax
    from pallas_kernels import timing

    if config.model is None:
        model, tokenizer = random_model(config), None
    else:
        longest = max(config.context) + config.new_tokens + 1
        model, tokenizer = kvjax.load(config.model, config.dtype, max_length=longest)
        if model.config.sliding_layers or model.config.num_experts:
            raise UserError(
                f"--model {config.model}: models with sliding windows or experts cannot be timed, since the bounds and "
                "rivals are for full attention and dense layers"
            )
    names = (FULL, *(name for name in config.policies if name != FULL))
    policies = {name: policy_of(name, model, tokenizer) for name in names}
    setting = timing.CPU if jax.default_backend() == "cpu" else timing.ACCELERATOR
    rates = timing.bounds(setting._replace(dtype=config.dtype), jax.random.key(0))
    rows = rows_so_far(config)
    print(timing.cells(COLUMNS), timing.cells(["---"] * len(COLUMNS)), sep="\n")
    done = {(row["phase"], row["batch"], row["context"]) for row in rows}
    for context in config.context:
        if ("prefill", 1, context) not in done:
            paths = prefills(config, model, policies, rates["matrix product"], context)
            report(config, rows, "prefill", 1, context, paths)
    layers = layers_of(model)
    for batch in config.batch:
        caches: dict[str, Any] = {}
        for context in config.context:
            if ("decode", batch, context) not in done:
                paths = decodes(config, model, layers, policies, caches, rates["device copy"], batch, context)
                report(config, rows, "decode", batch, context, paths)
    return rows


def report(
    config: BenchmarkConfig,
    rows: list[dict[str, Any]],
    phase: str,
    batch: int,
    context: int,
    paths: dict[str, TimePath],
) -> None:
    """Time the paths in turn, and add, print and write their rows."""
    from pallas_kernels.timing import cells

    rounds = [{name: path() for name, path in paths.items()} for _ in range(config.repeats + 1)]
    median = {name: statistics.median(timings[name].seconds for timings in rounds[1:]) for name in paths}
    last = rounds[-1]
    full = [name for name in paths if last[name].bytes is None or name == FULL]
    rival = min(full, key=lambda name: median[name])
    for name, seconds in median.items():
        _, bound, used, kv_ratio = last[name]
        row = {
            "phase": phase, "batch": batch, "context": context, "path": name, "seconds": seconds, "rival": rival,
            "ratio": median[rival] / seconds, "roofline": last[rival].bound / bound, "fraction": bound / seconds,
            "bytes": used, "kv_ratio": kv_ratio,
        }  # fmt: skip
        rows.append(row)
        print(cells(row[column] for column in COLUMNS), flush=True)
    write_rows(config, rows)


def sizes(cache: Any) -> tuple[int, float]:
    """Return the bytes of the cache's pages in use, and the share of a full cache's entries that is held."""
    import kvjax

    stats, pages = kvjax.stats(cache), cache.pages.free.size
    return stats.bytes * (pages - int(cache.pages.free_count[0])) // pages, stats.kv_ratio


def prefills(
    config: BenchmarkConfig, model: Any, policies: dict[str, Any], rate: float, context: int
) -> dict[str, TimePath]:
    """Return the paths that read a prompt, up to its first new token. rate: FLOPs per second."""
    import jax
    from dense_attention import dense_prefills

    from kvjax.inference import stream

    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, context)
    shape = model.config
    matrices = sum(x.size for x in jax.tree.leaves(model.layers) if x.ndim == 3)

    def bound(policy: Any) -> float:
        """Return the seconds of the products, including attention to the keys that each token sees."""
        seen = context / 2
        if policy is not None:
            window = min(policy.window, context)
            kept = np.mean(policy.admission.admitted(context - window)) if context > window else 0
            seen = min(seen, window + kept / 2)
        return (
            context * (2 * matrices + 4 * shape.num_layers * shape.num_heads * shape.head_dim * seen) / rate
        )

    def time_dense(prefill: Callable) -> Timing:
        began = time.perf_counter()
        jax.block_until_ready(prefill(np.asarray(ids[None], np.int32)))
        return Timing(time.perf_counter() - began, bound(None))

    def time_policy(policy: Any) -> Timing:
        sampling = SamplingParams(max_new_tokens=1, ignore_eos=True)
        began = time.perf_counter()
        cache = next(stream(model, [ids], sampling, policy=policy, page_size=config.page_size)).cache
        jax.block_until_ready(cache)
        return Timing(time.perf_counter() - began, bound(policy), *sizes(cache))

    paths = {name: functools.partial(time_dense, prefill) for name, prefill in dense_prefills(model).items()}
    return paths | {name: functools.partial(time_policy, policy) for name, policy in policies.items()}


def decodes(
    config: BenchmarkConfig,
    model: Any,
    layers: list[Any],
    policies: dict[str, Any],
    caches: dict[str, Any],
    rate: float,
    batch: int,
    context: int,
) -> dict[str, TimePath]:
    """Return the paths that decode tokens of each sequence.

    Args:
        layers: the result of `layers_of`.
        caches: for each policy the compiled policy and the function that makes caches of this batch size. Missing ones
            are added.
        rate: bytes per second.
    """
    import jax
    from dense_attention import dense_decodes
    from synthetic_cache import bytes_read, synthetic_caches

    from kvjax.inference.decode import decode_block
    from kvjax.inference.sampler import make_sampler
    from kvjax.inference.triggers import recurring
    from kvjax.mesh import BATCH, put

    count = config.new_tokens
    sampler = make_sampler(
        [SamplingParams(ignore_eos=True)] * batch, [0] * batch, (), model.config.vocab_size
    )
    embedding = 0 if model.config.tied else model.embed.nbytes
    weights = sum(x.nbytes for x in jax.tree.leaves(model)) - embedding
    shape = model.config
    token_bytes = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * model.dtype.itemsize

    def time_dense(make: Callable, decode: Callable) -> Timing:
        entries = batch * context * token_bytes
        state = jax.block_until_ready(make())
        began = time.perf_counter()
        jax.block_until_ready(decode(state))
        return Timing((time.perf_counter() - began) / count, (weights + entries) / rate)

    def time_policy(policy: Any, make: Callable) -> Timing:
        cache = jax.block_until_ready(make(context))
        page_bytes_and_ratio, read = sizes(cache), bytes_read(policy, cache, context)
        token, running = put(np.zeros(batch, np.int32), BATCH), put(np.ones(batch, bool), BATCH)
        options = {"count": count, "recurring": recurring(policy.host, cache)}
        began = time.perf_counter()
        jax.block_until_ready(
            decode_block(model, policy.decode, cache, token, running, sampler, np.int32(0), **options)
        )
        return Timing((time.perf_counter() - began) / count, (weights + read) / rate, *page_bytes_and_ratio)

    for name, policy in policies.items():
        if name not in caches:
            compiled = policy.compile(model)
            shapes = batch, max(config.context), count, config.page_size
            caches[name] = compiled, synthetic_caches(model, compiled, *shapes)
    paths = {
        name: functools.partial(time_dense, *path)
        for name, path in dense_decodes(model, layers, batch, context, count).items()
    }
    return paths | {name: functools.partial(time_policy, *pair) for name, pair in caches.items()}


if __name__ == "__main__":
    run_command(main)
