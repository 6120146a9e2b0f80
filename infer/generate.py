"""Read a long text once into a small cache, then ask several questions about it.

python infer/generate.py --text book.txt --questions "Who …?" "Where …?" --model FOLDER --gates GATES
"""

import dataclasses
from pathlib import Path

from kvjax.cli.launch import MeshShape, parse_command, run_command, start
from kvjax.generate import read_prompt
from kvjax.sampling_params import SamplingParams


@dataclasses.dataclass(frozen=True)
class AskConfig:
    """Read a text into a cache that keeps what the gates admit, then answer questions from that cache."""

    text: Path
    """The text to read."""
    questions: tuple[str, ...]
    """Questions. Each is asked separately, right after the text."""
    model: str = "builtin"
    """A model folder, a GGUF file, a hub id, or `builtin`."""
    gates: Path | None = None
    """Trained WG-KV gates. None: the full cache."""
    max_new_tokens: int = 64
    """The most tokens of an answer."""
    mesh: MeshShape = MeshShape()
    """Devices: 8 (fsdp), 4x2 (fsdp × tensor) or fsdp=4,tensor=2."""


def main() -> None:
    """Run the command."""
    config = parse_command(AskConfig)
    text = read_prompt(config.text, "--text")
    sampling = SamplingParams(max_new_tokens=config.max_new_tokens)
    mesh = start(config.mesh)

    import kvjax

    policy = "full" if config.gates is None else "wgkv"
    llm = kvjax.LLM(config.model, policy, gates=config.gates, mesh=mesh)
    context = llm.prefill(text)
    print(f"{100 * kvjax.stats(context).kv_ratio:.0f}% of the text's keys and values kept")

    for question, out in zip(
        config.questions, llm.generate(config.questions, sampling, context=context), strict=True
    ):
        print(f"\n{question}\n{out.text}")


if __name__ == "__main__":
    run_command(main)
