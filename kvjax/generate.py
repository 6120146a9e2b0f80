"""`python -m kvjax.generate`: continue a prompt, with the cache that a policy keeps."""

import dataclasses
import sys
from pathlib import Path
from typing import Annotated, Any

import tyro

from kvjax.command.launch import MeshShape, parse_command, run_command, start
from kvjax.errors import UserError
from kvjax.files import read_text


@dataclasses.dataclass(frozen=True)
class GenerateConfig:
    """Continue a prompt. Text comes as it is made; then one line says what the cache held and how fast it went."""

    prompt: str | None = None
    """The text to continue; for a chat model, the user's turn."""
    prompt_file: Path | None = None
    """A file with the text instead."""
    model: str = "builtin"
    """A model folder, a GGUF file (or a wheel with one inside), a hub id, or `builtin`."""
    policy: Annotated[str, tyro.conf.arg(aliases=["--method"])] = "full"
    """What to keep, one of those that `python -m kvjax.policies` lists: an admission (wgkv, streaming_llm, …), an
    eviction (snapkv, adakv, …) or a selection (quest); or what another package brings: its name, or
    package.module:NAME."""
    eviction: str | None = None
    """How entries are scored that an admission let in, or that adakv, pyramidkv and critical_kv choose from: a name, or
    a name with its arguments, snapkv:observed=32,pool=7."""
    selection: str | None = None
    """How a decoded token chooses the pages that it reads: quest:tokens=1024."""
    gates: Path | None = None
    """What was trained for the policy: a training run's --out or the folder that it exported, or for wgkv `builtin`,
    those of the built-in model."""
    window: int | None = None
    """Last tokens that are always visible."""
    ratio: float | None = None
    """random: share of tokens to admit; head_pattern: share of heads that keep everything; with an eviction: share of
    the prompt's entries that stay; quest, with neither: share of the tokens that are read."""
    entries: int | None = None
    """With an eviction, instead of a ratio: entries of each kv head that stay, on average."""
    tokens: int | None = None
    """quest, as the policy: entries of each kv head that it reads."""
    set: Annotated[tuple[tuple[str, ...], ...], tyro.conf.UseAppendAction] = ()
    """Any other arguments of the policy, as NAME=VALUE: --set sink=4 tau=0.2 when=every every=128 observed=32."""
    max_new_tokens: int = 128
    """Stop after so many."""
    temperature: float = 0.0
    """0 takes the most likely token."""
    top_k: int = 0
    """Draw from the k most likely tokens only (0: all)."""
    top_p: float = 1.0
    """Draw from the fewest tokens whose probability reaches this."""
    min_p: float = 0.0
    """Draw only from tokens at least so many times as likely as the most likely one."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer, which is cut before the first."""
    seed: int = 0
    """Seed of the drawing."""
    capacity: str | None = None
    """The cache's size: entries per kv head (4096), bytes (2GiB) or a share of device memory (30%)."""
    page_size: int = 16
    """Tokens per page."""
    force: bool = False
    """Take gates and patterns that were made for another model of the same shape."""
    mesh: MeshShape = MeshShape()
    """Devices: 8 (fsdp), 4x2 (fsdp × tensor) or fsdp=4,tensor=2."""
    dtype: str | None = None
    """float32, bfloat16 or float16; by default that of the weights."""

    def policy_arguments(self) -> dict[str, Any]:
        """What the policy is told. Raises UserError for a --set that is not NAME=VALUE, or names an option's own."""
        from kvjax.policies.assignments import assignments

        names = "eviction", "selection", "gates", "window", "ratio", "entries", "tokens"
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        others = assignments([text for texts in self.set for text in texts], "--set")
        for name, option in {"name": "--policy", "model": "--model", "force": "--force"}.items():
            if name in others:
                raise UserError(f"--set {name}=…: that is {option} here")
        if twice := sorted(set(given) & set(others)):
            raise UserError(f"--set {twice[0]}=… and --{twice[0]} say the same: give one of them")
        return given | others


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
    """The text of a file that an option names. Raises UserError if there is none."""
    text = read_text(path, option)
    if not text:
        raise UserError(f"{option} {path}: the prompt is empty")
    return text


def run(config: GenerateConfig) -> None:
    """Generate and print. Raises UserError for what a person can mend."""
    text, arguments = _prompt(config), config.policy_arguments()

    from kvjax.policies.make import check_names

    check_names(config.policy, **arguments)
    mesh = start(config.mesh)

    import jax

    from kvjax import cache as caches
    from kvjax.command.stopwatch import Stopwatch
    from kvjax.inference.sampling import stream
    from kvjax.inference.stop import decoded, settled, stop_place
    from kvjax.models import load_model, load_tokenizer
    from kvjax.models.chat import encode
    from kvjax.policies import make_policy

    if config.mesh.batch_shards > 1:
        shards = config.mesh.batch_shards
        print(
            f"One prompt on {shards} batch shards: {shards - 1} of {shards} pools stay empty. --mesh tensor={shards} "
            f"splits the heads instead.",
            file=sys.stderr,
        )
    with jax.set_mesh(mesh):
        tokenizer = load_tokenizer(config.model)
        prompt = encode(tokenizer, text)
        model = load_model(config.model, dtype=config.dtype, max_length=len(prompt) + config.max_new_tokens)
        policy = make_policy(config.policy, model=model, force=config.force, **arguments)
        new: list[int] = []
        shown, blocks = "", []
        watch = Stopwatch()
        for (block,), cache in stream(
            model,
            [prompt],
            policy=policy,
            max_new_tokens=config.max_new_tokens,
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            min_p=config.min_p,
            stop=config.stop,
            tokenizer=tokenizer,
            key=jax.random.key(config.seed),
            capacity=None if config.capacity is None else caches.parse_capacity(config.capacity),
            page_size=config.page_size,
        ):
            blocks.append((watch.lap(), len(block)))
            new += block.tolist()
            # a character may still lack bytes that the next tokens bring
            text = decoded(tokenizer, new).rstrip("\N{REPLACEMENT CHARACTER}")
            place = stop_place(text, config.stop)
            whole = text[: settled(text, config.stop) if place is None else place]
            if whole.startswith(shown):
                print(whole[len(shown) :], end="", flush=True)
                shown = whole
            sizes = caches.stats(cache, 1)
        # what might have been the beginning of a stop text
        rest = text[len(shown) :] if place is None and text.startswith(shown) else ""
        print(rest, flush=True)
    print(summary(policy.name, len(prompt), sizes, blocks), file=sys.stderr)


def summary(policy: str, prompt: int, sizes: Any, blocks: list[tuple[float, int]]) -> str:
    """One line: tokens, kept entries and bytes against full, and tokens per second without compilation.

    `blocks` has (seconds, tokens) of prefill and of each decoded block.
    """
    new = sum(count for _, count in blocks)
    decode_s = sum(seconds for seconds, _ in blocks[1:])
    decode = f"{(new - blocks[0][1]) / decode_s:.0f}" if decode_s > 0 else "–"
    return (
        f"{policy}: {prompt} prompt + {new} new tokens; kept {sizes.entries.mean():.0f} of {sizes.tokens.mean():.0f} "
        f"entries a kv head ({100 * sizes.kv_ratio:.0f}%), pool {sizes.bytes / 2**20:.2f} MiB against "
        f"{sizes.full_bytes / 2**20:.2f} MiB full; prefill {prompt / blocks[0][0]:.0f} tokens/s, "
        f"decode {decode} tokens/s"
    )


def main(args: list[str] | None = None) -> None:
    """The command."""
    run(parse_command(GenerateConfig, args))


if __name__ == "__main__":
    run_command(main)
