"""How often a cache of stated size overflows while an answer is written: SnapKV alone, and behind write gates.

    python infer/overflow.py --entries 96 --new-tokens 1024

Both may hold the same number of entries of each kv head, window included; whenever there are more, every head loses a
tenth by SnapKV's scores (WG-KV's composition). What gates refuse never has to be evicted.
"""

import dataclasses

from kvjax.command.launch import MeshShape, parse_command, run_command, start


@dataclasses.dataclass(frozen=True)
class OverflowConfig:
    """Count evictions while a model writes on."""

    model: str = "builtin"
    """A model folder, a GGUF file, a hub id, or `builtin`."""
    gates: str = "builtin"
    """A folder with trained gates."""
    text: str = "builtin"
    """A text file to write on from, or `builtin`: the packaged text."""
    prompts: int = 8
    """How many passages of it are continued."""
    prompt_tokens: int = 256
    """Tokens of each."""
    new_tokens: int = 1024
    """Tokens that are written."""
    entries: int = 96
    """Entries of each kv head that may be held, on average."""
    observed: int = 8
    """Last tokens whose queries score what is stored; at most the gates' window."""
    temperature: float = 0.8
    """Of the drawing."""
    seed: int = 0
    """Seed of the drawing."""


def main(args: list[str] | None = None) -> None:
    """The command."""
    config = parse_command(OverflowConfig, args)
    mesh = start(MeshShape())

    import jax
    import numpy as np

    from kvjax.evaluate.footprint import occupancy
    from kvjax.inference.record import Calls
    from kvjax.inference.sampling import sample
    from kvjax.models import load_model
    from kvjax.policies import SnapKV, make_policy

    with jax.set_mesh(mesh):
        model = load_model(config.model, max_length=config.prompt_tokens + config.new_tokens)
        prompts = passages(config)
        bound = {
            "model": model, "eviction": SnapKV(config.observed, group="max", pooling="max"),
            "entries": config.entries, "when": "overflow",
        }  # fmt: skip
        policies = {
            "snapkv": make_policy(**bound),
            "wgkv+snapkv": make_policy("wgkv", gates=config.gates, **bound),
        }
        for name, policy in policies.items():
            calls = Calls()
            sample(
                model, prompts, policy=policy, max_new_tokens=config.new_tokens, temperature=config.temperature,
                key=jax.random.key(config.seed), eos=(), calls=calls, block=2,
            )  # fmt: skip
            held = np.array(calls.held)
            times = (np.diff(held, axis=0) < 0).sum(0)
            footprint = np.mean([occupancy(calls, row).footprint for row in range(len(prompts))])
            print(
                f"{name}: {times.mean():.1f} evictions in {config.new_tokens} tokens "
                f"({times.min()} to {times.max()}), at most {held.max():.0f} entries held, footprint {footprint:.3f}"
            )


def passages(config: OverflowConfig):
    """Prompts of equal length from all over the text."""
    import numpy as np

    from kvjax.errors import UserError
    from kvjax.generate import read_prompt
    from kvjax.models import load_tokenizer
    from kvjax.tasks import builtin_text

    if config.text == "builtin":
        text = builtin_text("evaluate")
    else:
        from pathlib import Path

        text = np.asarray(load_tokenizer(config.model)(read_prompt(Path(config.text), "--text"))["input_ids"])
    if len(text) < config.prompts * config.prompt_tokens:
        raise UserError(
            f"{config.prompts} prompts of {config.prompt_tokens} tokens do not fit into a text of {len(text)}"
        )
    starts = np.linspace(0, len(text) - config.prompt_tokens, config.prompts).astype(int)
    return [text[start : start + config.prompt_tokens] for start in starts]


if __name__ == "__main__":
    run_command(main)
