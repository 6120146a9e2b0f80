"""Read a long text once into a small cache, then ask several questions of it.

python infer/generate.py --text book.txt --questions "Who …?" "Where …?" --model FOLDER --gates GATES
"""

import dataclasses
from pathlib import Path

from kvjax.command.launch import MeshShape, parse_command, run_command, start
from kvjax.generate import read_prompt


@dataclasses.dataclass(frozen=True)
class AskConfig:
    """Read a text into a cache that keeps what the gates admit, then answer questions from that cache."""

    text: Path
    """The text to read."""
    questions: tuple[str, ...]
    """Questions, each asked on its own right after the text."""
    model: str = "builtin"
    """A model folder, a GGUF file, a hub id, or `builtin`."""
    gates: Path | None = None
    """Trained WG-KV gates; without them the cache is full."""
    max_new_tokens: int = 64
    """Tokens of an answer."""
    mesh: MeshShape = MeshShape()
    """Devices: 8 (fsdp), 4x2 (fsdp × tensor) or fsdp=4,tensor=2."""


def main() -> None:
    """Run the command."""
    config = parse_command(AskConfig)
    text = read_prompt(config.text, "--text")
    mesh = start(config.mesh)

    import jax

    import kvjax

    with jax.set_mesh(mesh):
        model, tokenizer = kvjax.load(config.model)
        name = "full" if config.gates is None else "wgkv"
        policy = kvjax.make_policy(name, model=model, gates=config.gates)

        cache = kvjax.prefill(model, [text], tokenizer=tokenizer, policy=policy)
        print(f"{100 * kvjax.stats(cache).kv_ratio:.0f}% of the text's keys and values kept")

        for question in config.questions:
            out = kvjax.sample(
                model, [question], tokenizer=tokenizer, policy=policy, cache=cache,
                max_new_tokens=config.max_new_tokens,
            )  # fmt: skip
            assert out.texts is not None  # there is a tokenizer
            print(f"\n{question}\n{out.texts[0]}")


if __name__ == "__main__":
    run_command(main)
