"""Compare weights and cache entries in 8 bits with bfloat16 and float32: predictions, bytes, and the time of a token.

    python infer/eight_bits.py --model FILE.gguf --text text/heldout

Every form reads the same pieces of text with a full cache. Over all of them it has a perplexity, and a share of
positions at which its most likely next token is that of float32. Then the forms take turns decoding one answer each.
The first round compiles and does not count; the least time of the others does.
"""

import dataclasses
import itertools
import time
from pathlib import Path
from typing import Any

import numpy as np
from benchmark import write_rows

from kvjax.cli.launch import MeshShape, parse_command, run_command, start
from kvjax.errors import UserError

FORMS = {
    "float32": ("float32", None, None),
    "bfloat16": ("bfloat16", None, None),
    "int8, float32": ("float32", "int8", None),
    "int8, bfloat16": ("bfloat16", "int8", None),
    "fp8, float32": ("float32", "fp8", None),
    "fp8, bfloat16": ("bfloat16", "fp8", None),
    "int8 entries, float32": ("float32", None, "int8"),
    "int8 entries, bfloat16": ("bfloat16", None, "int8"),
}
"""The dtypes of activations, of the layers' matrices and of the cache's entries."""
CHUNK = 64
"""Tokens of a piece that are read in one call. Later calls read their entries."""


@dataclasses.dataclass(frozen=True)
class EightBitsConfig:
    """Compare weights and cache entries in 8 bits with bfloat16 and float32."""

    model: str
    """A model folder, a GGUF file or a hub id."""
    text: str
    """A text file, or a folder of them."""
    pieces: int = 32
    """The number of pieces of text, spread over all of it."""
    length: int = 512
    """Tokens of a piece."""
    prompt: int = 256
    """Tokens of the prompt that is continued."""
    new_tokens: int = 64
    """Tokens decoded after the first."""
    repeats: int = 5
    """The number of timings of each form."""
    json: Path | None = None
    """File to write the rows to."""

    def check(self) -> None:
        """Raise UserError for numbers out of range and for a missing text."""
        for name, least in {"pieces": 1, "length": 2, "prompt": 1, "new_tokens": 1, "repeats": 1}.items():
            if getattr(self, name) < least:
                raise UserError(
                    f"--{name.replace('_', '-')} must be at least {least}, got {getattr(self, name)}"
                )
        if self.prompt > self.length:
            raise UserError(f"--prompt must be at most --length {self.length}, got {self.prompt}")
        if not Path(self.text).exists():
            raise UserError(f"--text {self.text}: no such file or folder")


def main(args: list[str] | None = None) -> None:
    """Run the command."""
    config = parse_command(EightBitsConfig, args)
    config.check()
    start(MeshShape())
    write_rows(config, run(config))


def run(config: EightBitsConfig) -> list[dict[str, Any]]:
    """Return and print a row for each form."""
    import jax

    import kvjax
    from kvjax.inference.allocation import token_bytes

    tokenizer = kvjax.load_tokenizer(config.model)
    pieces = read_pieces(config, tokenizer)
    longest = max(config.length, config.prompt + config.new_tokens + 1)
    models, rows, likeliest = {}, [], None
    for name, (dtype, weights, entries) in FORMS.items():
        stored = {"weights": weights, "kv_cache_dtype": entries}
        model = kvjax.load_model(config.model, dtype, **stored, max_length=longest)
        loss, predicted = predictions(model, pieces)
        likeliest = predicted if likeliest is None else likeliest
        rows.append(
            {
                "form": name,
                "MiB": sum(x.nbytes for x in jax.tree.leaves(model)) / 2**20,
                "KiB_per_token": token_bytes(model.config, model.dtype) / 2**10,
                "perplexity": float(np.exp(loss.mean())),
                "agreement": float((predicted == likeliest).mean()),
            }
        )
        models[name] = model
    times: dict[str, list[float]] = {name: [] for name in models}
    for repeat, (name, model) in itertools.product(range(config.repeats + 1), models.items()):
        seconds = decode(model, pieces[0, : config.prompt], config.new_tokens)
        if repeat:
            times[name].append(seconds)
    for row in rows:
        row["ms_per_token"] = 1e3 * min(times[row["form"]])
        print(
            f"{row['form']:22} {row['MiB']:6.0f} MiB  {row['KiB_per_token']:5.1f} KiB of entries a token  "
            f"perplexity {row['perplexity']:7.3f}  {100 * row['agreement']:6.2f}% as float32  "
            f"{row['ms_per_token']:6.1f} ms a token"
        )
    return rows


def read_pieces(config: EightBitsConfig, tokenizer: Any) -> np.ndarray:
    """Return token ids of pieces of the text, [pieces length]. Raises UserError if the text is too short."""
    path = Path(config.text)
    files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
    tokens = np.concatenate(
        [tokenizer(file.read_text(encoding="utf-8"))["input_ids"] for file in files] or [[]]
    )
    if len(tokens) < config.pieces * config.length:
        raise UserError(
            f"--text {config.text} has {len(tokens):,} tokens, expected {config.pieces * config.length:,}"
        )
    starts = np.linspace(0, len(tokens) - config.length, config.pieces).astype(int)
    return np.stack([tokens[start : start + config.length] for start in starts]).astype(np.int32)


def predictions(model: Any, pieces: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the losses of the next tokens and the most likely next tokens, of all pieces one after another."""
    import jax
    import jax.numpy as jnp

    from kvjax.inference.allocation import new_cache
    from kvjax.inference.forward import forward
    from kvjax.mesh import use_mesh
    from kvjax.policies import Policy

    @jax.jit
    def read(model, view, cache, tokens, following):
        cache, hidden, _ = forward(model, view, cache, tokens, jnp.full(1, tokens.shape[1], jnp.int32))
        logits = model.logits(hidden)
        loss = -jnp.take_along_axis(jax.nn.log_softmax(logits), following[..., None], -1)
        return cache, (loss[0, :, 0], logits[0].argmax(-1))

    results = []
    with use_mesh(model):
        policy = Policy().compile(model)
        for piece in pieces:
            cache = new_cache(model, policy, [piece])
            for start in range(0, len(piece) - 1, CHUNK):
                end = min(start + CHUNK, len(piece) - 1)
                tokens = piece[None, start:end], piece[None, start + 1 : end + 1]
                cache, result = read(model, policy.read, cache, *tokens)
                results.append(jax.device_get(result))
    loss, predicted = (np.concatenate(x) for x in zip(*results, strict=True))
    return loss, predicted


def decode(model: Any, prompt: np.ndarray, count: int) -> float:
    """Return the mean seconds of a decoded token after the first."""
    from kvjax.inference import stream
    from kvjax.sampling_params import SamplingParams

    blocks = stream(model, [prompt], SamplingParams(max_new_tokens=count + 1, ignore_eos=True))
    np.asarray(next(blocks).tokens)
    began = time.perf_counter()
    for block in blocks:
        np.asarray(block.tokens)
    return (time.perf_counter() - began) / count


if __name__ == "__main__":
    run_command(main)
