"""`python -m kvjax.generate`: continue a prompt, with the cache that a policy keeps."""

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
    """Continue a prompt. The text is printed as it is made, then a line with what the cache held and how fast it
    went."""

    prompt: str | None = None
    """The text to continue; for a chat model, the user's turn."""
    prompt_file: Path | None = None
    """A file with the prompt, in place of --prompt."""
    model: str = "builtin"
    """A model folder, a GGUF file, a hub id, or `builtin`."""
    policy: str = "full"
    """The policy: methods joined by +, each with its arguments, such as snapkv:ratio=0.25 or wgkv+quest:ratio=0.5.
    `python -m kvjax.policies` lists them."""
    gates: str | None = None
    """Parameters trained for the policy: a training run's --out or the folder that it exported, a file of the method's
    authors, the hub id of either (Jang-Hyun/Fast-KVzip), or `builtin`, which come with the built-in model."""
    max_new_tokens: int = 128
    """The most tokens of an answer."""
    temperature: float = 0.0
    """The temperature of sampling; 0 takes the most likely token."""
    top_k: int = 0
    """Draw from the k most likely tokens only (0: all)."""
    top_p: float = 1.0
    """Draw from the fewest tokens whose probability reaches this."""
    min_p: float = 0.0
    """Draw only from tokens at least so many times as likely as the most likely one."""
    n: int = 1
    """Answers to draw, at a temperature above 0: printed with their numbers once all have ended."""
    logprobs: bool = False
    """Print the log-probability of each answer and of its tokens, a line each with the token's id and text, by the
    model's own distribution before temperature, top-k, top-p and min-p."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer, which is cut before the first."""
    seed: int = 0
    """The seed of sampling."""
    save_cache: Path | None = None
    """Read the prompt as a context, save what the policy keeps of it in this folder, and answer nothing. Ask about it
    with --cache, as often as wanted."""
    cache: Path | None = None
    """A folder with a context that was read before (--save-cache), which the prompt continues. Model and policy must be
    those that it was read with."""
    capacity: str | None = None
    """The cache's size: entries per kv head (4096), bytes (2GiB) or a share of device memory (30%)."""
    page_size: int | None = None
    """Tokens per page; by default 64 on a TPU (128 of int8 entries) and 16 elsewhere and with a selection."""
    force: bool = False
    """Take gates and patterns that were made for another model of the same shape."""
    mesh: MeshShape = MeshShape()
    """Devices: 8 (fsdp), 4x2 (fsdp × tensor) or fsdp=4,tensor=2."""
    dtype: str | None = None
    """float32, bfloat16 or float16; by default that of the weights."""
    weights: str | None = None
    """int8 or fp8: keep the layers' matrices in 8 bits, rounded on loading; by default as the files have them."""
    kv_cache_dtype: str | None = None
    """int8: keep entries in 8 bits; by default in the model's dtype."""


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
    """Return the text of a file that an option names. Raises UserError if there is none."""
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
        _say_empty_shards(config)
        tokenizer = load_tokenizer(config.model)
        part = "whole" if config.cache is None else "end"
        prompt = encode(tokenizer, text, "beginning" if config.save_cache is not None else part)
        longest = saved + len(prompt) + (0 if config.save_cache is not None else config.max_new_tokens)
        llm = LLM(
            config.model, config.policy, gates=gates, tokenizer=tokenizer, mesh=mesh, dtype=config.dtype,
            weights=config.weights, kv_cache_dtype=config.kv_cache_dtype, max_length=longest,
            page_size=config.page_size, force=config.force,
            capacity=None if config.capacity is None else caches.parse_capacity(config.capacity),
        )  # fmt: skip
        if config.save_cache is not None:
            print(_saved(config, llm, prompt), file=sys.stderr)
            return
        given: dict[str, Any] = {"capacity": llm.capacity, "page_size": llm.page_size}
        if config.cache is not None:
            # the pool's size is that of what is loaded
            cache = load_cache(config.cache, llm.model, llm.policy, capacity=llm.capacity)
            given = {"cache": cache, "share": True}
        live = LiveText(tokenizer, sampling.stop) if sampling.n == 1 else None
        blocks, laps, watch = [], [], Stopwatch()
        for block in stream(llm.model, [prompt], sampling, policy=llm.policy, tokenizer=tokenizer, **given):
            laps.append((watch.lap(), sum(map(len, block.tokens))))
            blocks.append(block)
            if live is not None:
                print(for_terminal(live.more(block.tokens[0].tolist())), end="", flush=True)
            sizes = caches.stats(block.cache, sampling.n)
        params, eos = [sampling] * sampling.n, llm.model.config.eos_ids
        found = whole_answers(blocks, params, [0] * sampling.n, sizes, eos, tokenizer)
        for index, own in enumerate(found.texts or ()):
            print(for_terminal(live.end() if live is not None else f"[{index + 1}] {own}"), flush=True)
            if found.logprobs is not None:
                chosen = found.logprobs[index].chosen.tolist()
                print(logprob_lines(tokenizer, found.tokens[index].tolist(), chosen))
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
    """Return an answer whose control characters, which a stranger's vocabulary may hold, are escapes, but for tabs and
    line feeds. Where no terminal reads it the text is as it is."""
    if not sys.stdout.isatty():
        return text
    return CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def _saved(config: GenerateConfig, llm: Any, prompt: list[int]) -> str:
    """Read the prompt, save its cache and return a line that says so."""
    from kvjax import cache as caches
    from kvjax.inference.saving import save_cache

    assert config.save_cache is not None
    cache = llm.prefill(prompt)
    held = caches.stats(cache, 1)
    size = save_cache(config.save_cache, cache, llm.model, llm.policy) / 2**20
    return (
        f"{llm.policy.name}: {len(prompt)} tokens, kept {held.entries.mean():.0f} entries a kv head "
        f"({100 * held.kv_ratio:.0f}%), {size:.2f} MiB saved; --cache {config.save_cache} asks of it"
    )


def _check(config: GenerateConfig) -> None:
    """Refuse arguments that mean nothing before weights are read."""
    from kvjax.cache import parse_capacity
    from kvjax.inference.checks import check_capacity
    from kvjax.inference.saving import checked_place
    from kvjax.models.loading import parameter_dtype

    if config.page_size is not None:
        whole_number("generate", "--page-size", config.page_size)
    if config.cache is not None and config.save_cache is not None:
        raise UserError("give either --cache, to ask of a context, or --save-cache, to read one")
    if config.cache is not None and config.page_size is not None:
        raise UserError("--page-size is for a new cache; that of --cache keeps its pages")
    if config.save_cache is not None:
        checked_place(config.save_cache)
    if config.capacity is not None:
        check_capacity(parse_capacity(config.capacity))
    if config.dtype is not None:
        parameter_dtype(config.dtype)


def _say_empty_shards(config: GenerateConfig) -> None:
    shards, some = config.mesh.batch_shards, config.n
    if shards > some:
        print(
            f"{some} answer{'s' if some > 1 else ''} on {shards} batch shards: {shards - some} of {shards} pools "
            f"stay empty. --mesh tensor={shards} splits the heads instead.",
            file=sys.stderr,
        )


def logprob_lines(tokenizer: Any, tokens: Sequence[int], logprobs: Sequence[float]) -> str:
    """Return the log-probability of an answer, and a line for each of its tokens: log-probability, id, text."""
    lines = [f"log-probability {sum(logprobs):.4f} of {len(tokens)} tokens"]
    for token, own in zip(tokens, logprobs, strict=True):
        lines.append(f"{own:9.4f} {token:7} {tokenizer.decode([token])!r}")
    return "\n".join(lines)


def summary(policy: str, prompt: int, sizes: Any, blocks: list[tuple[float, int]], samples: int = 1) -> str:
    """Return one line: tokens, kept entries and bytes against full, and tokens per second without compilation.

    `blocks` has (seconds, tokens) of prefill and of each decoded block; the prompt was read `samples` times.
    """
    new = sum(count for _, count in blocks)
    decode_s = sum(seconds for seconds, _ in blocks[1:])
    decode = f"{(new - blocks[0][1]) / decode_s:.0f}" if decode_s > 0 else "–"
    each = f"{samples} × " if samples > 1 else ""
    return (
        f"{policy}: {each}{prompt} prompt + {new} new tokens; kept {sizes.entries.mean():.0f} of "
        f"{sizes.tokens.mean():.0f} entries a kv head ({100 * sizes.kv_ratio:.0f}%), pool {sizes.bytes / 2**20:.2f} "
        f"MiB against {sizes.full_bytes / 2**20:.2f} MiB full; prefill {samples * prompt / blocks[0][0]:.0f} tokens/s, "
        f"decode {decode} tokens/s"
    )


def main(args: list[str] | None = None) -> None:
    """Run the command."""
    run(parse_command(GenerateConfig, args))


if __name__ == "__main__":
    run_command(main)
