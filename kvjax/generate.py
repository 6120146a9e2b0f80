"""`python -m kvjax.generate`: continue a prompt with a cache that a policy compresses."""

import dataclasses
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvjax.cli.launch import MeshShape, first_process_prints, parse_command, run_command, start
from kvjax.errors import UserError, whole_number
from kvjax.files import read_text
from kvjax.sampling_params import SamplingParams

CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclasses.dataclass(frozen=True)
class GenerateConfig:
    """Continue a prompt. The text is printed as it is generated, followed by a line with the cache's size and the
    speed."""

    prompt: str | None = None
    """The text to continue; for a chat model, the user's turn."""
    prompt_file: Path | None = None
    """A file with the prompt, instead of --prompt."""
    model: str = "builtin"
    """A model folder, a GGUF file, a hub id, or `builtin`."""
    policy: str = "full"
    """The policy: methods joined by +, each with its arguments, such as snapkv:ratio=0.25 or wgkv+quest:ratio=0.5.
    `python -m kvjax.policies` lists them."""
    gates: str | None = None
    """Parameters trained for the policy: a training run's --out or exported folder, a file of the method's authors, the
    hub id of either (Jang-Hyun/Fast-KVzip), or `builtin` for those of the built-in model."""
    max_new_tokens: int = 128
    """The maximum tokens of an answer."""
    temperature: float = 0.0
    """The temperature of sampling; 0 takes the most likely token."""
    top_k: int = 0
    """Sample from the k most likely tokens only (0: from all)."""
    top_p: float = 1.0
    """Sample from the fewest most likely tokens whose probabilities sum to at least this."""
    min_p: float = 0.0
    """Sample only from tokens with at least this fraction of the most likely token's probability."""
    n: int = 1
    """The number of answers, which needs a temperature above 0 if above 1. They are printed once all have ended."""
    logprobs: bool = False
    """Print the log-probability of each answer, and a line with the log-probability, id and text of each token. They
    are from the model's distribution before temperature, top-k, top-p and min-p."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer. The answer is cut before the first of them."""
    seed: int = 0
    """The seed of sampling."""
    save_cache: Path | None = None
    """Read the prompt as a context and save its compressed cache in this folder, without generating. --cache continues
    it, any number of times."""
    cache: Path | None = None
    """A folder with a saved context (--save-cache) that the prompt continues. Model and policy must be the same as when
    it was saved."""
    capacity: str | None = None
    """The size of the cache: entries per kv head (4096), bytes (2GiB) or a share of device memory (30%)."""
    page_size: int | None = None
    """Tokens per page; by default 64 on a TPU (128 for int8 entries), and 16 elsewhere or with a selection."""
    force: bool = False
    """Accept gates and patterns that were made for another model of the same shape."""
    mesh: MeshShape = MeshShape()
    """Devices: 8 (fsdp), 4x2 (fsdp × tensor) or fsdp=4,tensor=2."""
    dtype: str | None = None
    """float32, bfloat16 or float16; by default the dtype of the weights."""
    weights: str | None = None
    """int8 or fp8: round the layers' matrices to 8 bits on loading; by default they stay as in the files."""
    kv_cache_dtype: str | None = None
    """int8: store entries in 8 bits; by default in the model's dtype."""


def _prompt(config: GenerateConfig) -> str:
    if (config.prompt is None) == (config.prompt_file is None):
        raise UserError("give either --prompt or --prompt-file")
    if config.prompt is not None:
        if not config.prompt:
            raise UserError("--prompt: the prompt is empty")
        return config.prompt
    assert config.prompt_file is not None
    return read_prompt(config.prompt_file, "--prompt-file")


def read_prompt(path: Path, option: str) -> str:
    """Return the text of a file that an option names. Raises UserError if it is empty or cannot be read."""
    text = read_text(path, option, pipe=True)
    if not text:
        raise UserError(f"{option} {path}: the prompt is empty")
    return text


def run(config: GenerateConfig) -> None:
    """Generate and print. Raises UserError for errors that a user can fix."""
    text = _prompt(config)
    sampling = _sampling(config)
    from kvjax.models.shapes import fit_mesh_to

    mesh = start(fit_mesh_to(config.mesh, config.model))

    import jax

    from kvjax import cache as caches
    from kvjax.cache.saved import describe_cache
    from kvjax.checkpoints.published import find_gates
    from kvjax.cli.stopwatch import Stopwatch
    from kvjax.inference.answers import LiveText, whole_answers
    from kvjax.inference.generate import stream
    from kvjax.inference.saving import load_cache
    from kvjax.llm import LLM
    from kvjax.models import load_tokenizer
    from kvjax.models.chat import encode
    from kvjax.policies.make import check_policy

    with jax.set_mesh(mesh), first_process_prints():
        _check(config)
        saved = 0 if config.cache is None else max(describe_cache(config.cache)["tokens"])
        gates = find_gates(config.gates, config.model)
        check_policy(config.policy, gates=gates, force=config.force)
        _report_empty_shards(config)
        tokenizer = load_tokenizer(config.model)
        part = "whole" if config.cache is None else "end"
        prompt = encode(tokenizer, text, "beginning" if config.save_cache is not None else part)
        max_length = saved + len(prompt) + (0 if config.save_cache is not None else config.max_new_tokens)
        llm = LLM(
            config.model, config.policy, gates=gates, tokenizer=tokenizer, mesh=mesh, dtype=config.dtype,
            weights=config.weights, kv_cache_dtype=config.kv_cache_dtype, max_length=max_length,
            page_size=config.page_size, force=config.force,
            capacity=None if config.capacity is None else caches.parse_capacity(config.capacity),
        )  # fmt: skip
        if config.save_cache is not None:
            print(_save(config, llm, prompt), file=sys.stderr)
            return
        cache_options: dict[str, Any] = {"capacity": llm.capacity, "page_size": llm.page_size}
        if config.cache is not None:
            # the saved cache determines the size of the pool
            cache = load_cache(config.cache, llm.model, llm.policy, capacity=llm.capacity)
            cache_options = {"cache": cache, "share": True}
        live = LiveText(tokenizer, sampling.stop) if sampling.n == 1 else None
        blocks, laps, watch = [], [], Stopwatch()
        for block in stream(
            llm.model, [prompt], sampling, policy=llm.policy, tokenizer=tokenizer, **cache_options
        ):
            laps.append((watch.lap(), sum(map(len, block.tokens))))
            blocks.append(block)
            if live is not None:
                print(for_terminal(live.more(block.tokens[0].tolist())), end="", flush=True)
            sizes = caches.stats(block.cache, sampling.n)
        params, eos = [sampling] * sampling.n, llm.model.config.eos_ids
        generation = whole_answers(blocks, params, [0] * sampling.n, sizes, eos, tokenizer)
        for index, answer in enumerate(generation.texts or ()):
            print(for_terminal(live.end() if live is not None else f"[{index + 1}] {answer}"), flush=True)
            if generation.logprobs is not None:
                chosen = generation.logprobs[index].chosen.tolist()
                print(logprob_lines(tokenizer, generation.tokens[index].tolist(), chosen))
        print(summary(llm.policy.name, len(prompt), sizes, laps, sampling.n), file=sys.stderr)


def _sampling(config: GenerateConfig) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        min_p=config.min_p,
        n=config.n,
        seed=config.seed,
        stop=config.stop,
        logprobs=0 if config.logprobs else None,
    )


def for_terminal(text: str) -> str:
    """Return an answer with control characters other than tabs and line feeds escaped, since a vocabulary is not
    trusted. If stdout is not a terminal, the text is unchanged."""
    if not sys.stdout.isatty():
        return text
    return CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def _save(config: GenerateConfig, llm: Any, prompt: list[int]) -> str:
    """Read the prompt, save its cache and return a line about it."""
    from kvjax import cache as caches
    from kvjax.inference.saving import save_cache

    assert config.save_cache is not None
    cache = llm.prefill(prompt)
    stats = caches.stats(cache, 1)
    size = save_cache(config.save_cache, cache, llm.model, llm.policy) / 2**20
    return (
        f"{llm.policy.name}: {len(prompt)} tokens, kept {stats.entries.mean():.0f} entries a kv head "
        f"({100 * stats.kv_ratio:.0f}%), {size:.2f} MiB saved; --cache {config.save_cache} continues it"
    )


def _check(config: GenerateConfig) -> None:
    """Refuse invalid options before weights are read."""
    from kvjax.cache import check_capacity, parse_capacity
    from kvjax.inference.saving import checked_place
    from kvjax.models.loading import parameter_dtype

    if config.page_size is not None:
        whole_number("generate", "--page-size", config.page_size)
    if config.cache is not None and config.save_cache is not None:
        raise UserError("give either --cache, to continue a context, or --save-cache, to save one")
    if config.cache is not None and config.page_size is not None:
        raise UserError("--page-size is for a new cache; a saved cache keeps its page size")
    if config.save_cache is not None:
        checked_place(config.save_cache)
    if config.capacity is not None:
        check_capacity(parse_capacity(config.capacity))
    if config.dtype is not None:
        parameter_dtype(config.dtype)


def _report_empty_shards(config: GenerateConfig) -> None:
    shards, answers = config.mesh.batch_shards, config.n
    if shards > answers:
        print(
            f"{answers} answer{'s' if answers > 1 else ''} on {shards} batch shards: {shards - answers} of {shards} "
            f"pools stay empty. --mesh tensor={shards} splits the heads instead.",
            file=sys.stderr,
        )


def logprob_lines(tokenizer: Any, tokens: Sequence[int], logprobs: Sequence[float]) -> str:
    """Return a line with the log-probability of an answer, and one for each token with its log-probability, id and
    text."""
    lines = [f"log-probability {sum(logprobs):.4f} of {len(tokens)} tokens"]
    for token, logprob in zip(tokens, logprobs, strict=True):
        lines.append(f"{logprob:9.4f} {token:7} {tokenizer.decode([token])!r}")
    return "\n".join(lines)


def summary(policy: str, prompt: int, sizes: Any, blocks: list[tuple[float, int]], samples: int = 1) -> str:
    """Return a line with the number of tokens, the cache's entries and bytes compared with a full cache, and tokens per
    second without compilation.

    Args:
        prompt: the number of tokens of the prompt, which was read `samples` times.
        blocks: (seconds, tokens) of prefill and of each decoded block.
    """
    new = sum(count for _, count in blocks)
    decode_s = sum(seconds for seconds, _ in blocks[1:])
    decode = f"{(new - blocks[0][1]) / decode_s:.0f}" if decode_s > 0 else "–"
    times = f"{samples} × " if samples > 1 else ""
    return (
        f"{policy}: {times}{prompt} prompt + {new} new tokens; kept {sizes.entries.mean():.0f} of "
        f"{sizes.tokens.mean():.0f} entries a kv head ({100 * sizes.kv_ratio:.0f}%), pool {sizes.bytes / 2**20:.2f} "
        f"MiB against {sizes.full_bytes / 2**20:.2f} MiB full; prefill {samples * prompt / blocks[0][0]:.0f} tokens/s, "
        f"decode {decode} tokens/s"
    )


def main(args: list[str] | None = None) -> None:
    """Run the command."""
    run(parse_command(GenerateConfig, args))


if __name__ == "__main__":
    run_command(main)
