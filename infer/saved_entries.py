"""What it costs to save a cache's keys and values in 8 bits: the bytes that are left, and how well texts go on behind a
context that was saved so, against the context as it was read.

python infer/saved_entries.py --model models/SmolLM2-135M-Instruct.Q4_1.gguf --texts text/heldout/persuasion-011.txt
"""

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.command.launch import MeshShape, parse_command, run_command, start
from kvjax.errors import UserError
from kvjax.generate import read_prompt


@dataclasses.dataclass(frozen=True)
class SavedEntriesConfig:
    """Compare what a model expects of texts behind contexts that were saved in 8 bits, and behind those as they were
    read."""

    texts: tuple[Path, ...]
    """Text files, of each of which the beginning is read."""
    model: str = "builtin"
    """A model folder, a GGUF file, a hub id, or `builtin`."""
    tokens: int = 1792
    """Of a text, which are saved."""
    behind: int = 256
    """The tokens after these, which are compared."""


def main(args: list[str] | None = None) -> None:
    """The command."""
    config = parse_command(SavedEntriesConfig, args)
    texts = [read_prompt(path, "--texts") for path in config.texts]
    mesh = start(MeshShape())

    import jax

    import kvjax

    with jax.set_mesh(mesh):
        tokenizer, whole = kvjax.load_tokenizer(config.model), config.tokens + config.behind
        rows = [np.asarray(tokenizer(text, verbose=False)["input_ids"][:whole]) for text in texts]
        for path, row in zip(config.texts, rows, strict=True):
            if len(row) < whole:
                raise UserError(f"--texts {path}: it has {len(row)} tokens, {whole} are compared")
        model = kvjax.load_model(config.model, max_length=whole)
        for path, row in zip(config.texts, rows, strict=True):
            print(f"{path.name}: {compared(model, *np.split(row, [config.tokens]))}", flush=True)


def compared(model: Any, context: np.ndarray, behind: np.ndarray) -> str:
    """A line about a context that was saved in 8 bits, and the tokens behind it."""
    import kvjax

    exact = kvjax.prefill(model, [context])
    with tempfile.TemporaryDirectory() as folder:
        small = kvjax.save_cache(folder, exact, model, entries="int8")
        near, far = (expected(model, cache, behind) for cache in (exact, kvjax.load_cache(folder, model)))
    perplexities = [np.exp(-x[np.arange(len(behind) - 1), behind[1:]].mean()) for x in (near, far)]
    same = (near.argmax(-1) == far.argmax(-1)).sum()
    return (
        f"{small / kvjax.saved_bytes(exact, model):.3f} of the bytes, perplexity {perplexities[0]:.4g} to "
        f"{perplexities[1]:.4g}, {same} of {len(behind)} likeliest next tokens stay"
    )


def expected(model: Any, cache: Any, tokens: np.ndarray) -> np.ndarray:
    """The log-probabilities of what follows each of these tokens behind a cache, which stays as it is."""
    import jax
    import jax.numpy as jnp

    import kvjax
    from kvjax.inference.forward import forward

    policy = kvjax.make_policy("full", model=model).traced
    run = jax.jit(forward, static_argnames="write")
    _, hidden, _ = run(model, policy, cache, jnp.asarray(tokens)[None], jnp.array([len(tokens)]), write=False)
    return np.asarray(jax.nn.log_softmax(model.logits(hidden)[0].astype(jnp.float32)))


if __name__ == "__main__":
    run_command(main)
