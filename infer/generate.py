"""Read a long text once, keep the small cache, ask it several things: the Python behind `python -m kvjax.generate`.

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
    """What to ask, each on its own, right after the text."""
    model: str = "builtin"
    """A model folder, a GGUF file, a hub id, or `builtin`."""
    gates: Path | None = None
    """Trained WG-KV gates; without them the cache is full."""
    max_new_tokens: int = 64
    """Tokens of an answer."""
    mesh: MeshShape = MeshShape()
    """Devices: 8 (fsdp), 4x2 (fsdp × tensor) or fsdp=4,tensor=2."""


def main() -> None:
    """The command."""
    config = parse_command(AskConfig)
    text = read_prompt(config.text, "--text")
    mesh = start(config.mesh)

    import jax

    import kvjax
    from kvjax.models import load_tokenizer

    with jax.set_mesh(mesh):
        # a policy waits for its model: gates that are none are found before weights are read
        gated = {} if config.gates is None else {"name": "wgkv", "gates": config.gates}
        policy = kvjax.make_policy(**gated)
        tokenizer = load_tokenizer(config.model)
        context = tokenizer(text)["input_ids"]
        asked = [tokenizer(question, add_special_tokens=False)["input_ids"] for question in config.questions]
        longest = len(context) + max(map(len, asked)) + config.max_new_tokens
        model = kvjax.load_model(config.model, max_length=longest)

        cache = kvjax.prefill(model, [context], policy=policy)
        sizes = kvjax.stats(cache)
        print(f"{len(context)} tokens read; {100 * sizes.kv_ratio:.0f}% of their keys and values kept")

        for question, ids in zip(config.questions, asked, strict=True):
            answer = kvjax.sample(
                model, [ids], policy=policy, cache=cache, max_new_tokens=config.max_new_tokens
            )
            print(f"\n{question}\n{tokenizer.decode(answer.tokens[0])}")


if __name__ == "__main__":
    run_command(main)
