"""Calibrate TriAttention for a model: the statistics of its queries on any text, from one forward pass.

    python train/calibrate_triattention.py --model Qwen/Qwen3-8B --text book.txt --out runs/triattention
    python -m kvjax.generate --model Qwen/Qwen3-8B --policy triattention:entries=2048 --gates runs/triattention …

The text should be coherent and at least `--tokens` long. Its domain hardly matters (the authors' calibration guide).
"""

import dataclasses
import functools
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.checkpoints.fingerprint import MadeFor
from kvjax.checkpoints.module import filled
from kvjax.cli.launch import MeshShape, parse_command, run_command, start
from kvjax.errors import UserError, whole_number
from kvjax.generate import read_prompt
from kvjax.inference.capture import captured_layers
from kvjax.mesh import use_mesh
from kvjax.models import load_model, load_tokenizer
from kvjax.models.chat import token_ids
from kvjax.models.decoder import Decoder
from kvjax.policies import Policy
from kvjax.policies.eviction.triattention import QueryStatistics, pairs, save_statistics


@dataclasses.dataclass(frozen=True)
class CalibrateConfig:
    """Write the statistics of a model's queries on a text."""

    text: Path
    """The text to read."""
    out: Path
    """A new folder for gates.safetensors and config.json."""
    model: str = "builtin"
    """A model folder, a GGUF file, a hub id, or `builtin`."""
    tokens: int = 32768
    """The maximum number of tokens of the text that are read."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """The model's dtype; by default its weights' dtype."""
    mesh: MeshShape = MeshShape()
    """Devices: 8 (fsdp), 4x2 (fsdp × tensor) or fsdp=4,tensor=2."""


def main(args: list[str] | None = None) -> None:
    """Run the command."""
    config = parse_command(CalibrateConfig, args)
    if config.out.exists():
        raise UserError(f"--out {config.out} already exists")
    max_tokens = whole_number("calibrate_triattention", "--tokens", config.tokens)
    text = read_prompt(config.text, "--text")
    with jax.set_mesh(start(config.mesh)):
        model = load_model(config.model, config.dtype)
    tokens = np.array(
        token_ids(load_tokenizer(config.model), text, add_special_tokens=True)[:max_tokens], np.int32
    )
    description = {"model": config.model, "data": config.text.name, "tokens": tokens.size}
    statistics = query_statistics(model, tokens)
    save_statistics(config.out, statistics, description | MadeFor.of(model).description)
    print(f"{config.out}: statistics of {tokens.size:,} queries of each head")


def query_statistics(model: Decoder, tokens: Int[np.ndarray, " t"]) -> QueryStatistics:
    """Return the statistics of a model's queries on a sequence of tokens.

    Raises UserError as `captured_layers` does.
    """
    config = model.config
    rotated = config.rotation()[0].shape[1]
    layers = captured_layers(model, Policy(), None, [tokens], ("q_pre",))
    means = [jax.device_get(_means(layer["q_pre"][0], rotated)) for layer in layers]
    make = functools.partial(QueryStatistics, len(means), config.num_heads, config.head_dim)
    with use_mesh(model):
        return filled(make, jax.tree.map(lambda *x: np.stack(x), *means), "calibration")


@functools.partial(jax.jit, static_argnums=1)
def _means(q: Float[Array, "n t h"], rotated: int) -> dict[str, Float[Array, "n pairs"]]:
    real, imaginary = pairs(q.astype(jnp.float32), rotated)
    parts = {"real": real, "imaginary": imaginary, "length": jnp.hypot(real, imaginary)}
    return {name: x.mean(1) for name, x in parts.items()}


if __name__ == "__main__":
    run_command(main)
