"""Make the built-in model, its test-size sibling and the held-out text: `python -m train.builtin`.

Nothing is downloaded. The text is the Python standard library's source; the tasks are those of `kvjax.tasks`. A stopped
run resumes from its last checkpoint. The same machine makes the same model.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from flax import nnx
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard
from tokenizers import Tokenizer
from tqdm import tqdm

from kvjax.cli.launch import MeshShape, parse_command, run_command, start
from kvjax.models import save_model
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Decoder
from kvjax.models.names import TOP
from kvjax.models.rope import RopeConfig
from kvjax.tasks import Mixture, Recall, Vocabulary
from kvjax.tasks.builtin import encode_files, split_files
from train.builtin.scores import cross_entropy, model_card
from train.builtin.text import VOCABULARY, hold_out, save_tokenizer, standard_library, train_tokenizer
from train.builtin.weights import (
    Matcher,
    initial_weights,
    passage_matchers,
    record_matchers,
    settle_margins,
    trained,
)

SHARES = (0.4, 0.05, 0.25, 0.3)
"""The shares of recall, needle, copy and text among the training sequences."""


@dataclass(frozen=True)
class Stage:
    """A stage of training: `steps` updates on `batch` sequences of `length` tokens."""

    length: int
    batch: int
    steps: int


@dataclass(frozen=True)
class Recipe:
    """A model and its training.

    The learning rates warm up, stay constant, and fall to a twentieth over the last `decay` of the steps.
    """

    config: ModelConfig
    matchers: tuple[Matcher, ...]
    stages: tuple[Stage, ...]
    learning_rate: float = 3e-3
    mlp_learning_rate: float = 1e-2
    warm_up: int = 100
    decay: float = 0.5
    dtype: str = "float32"

    @property
    def steps(self) -> int:
        return sum(stage.steps for stage in self.stages)

    def summary(self, seconds: float, resumed: bool) -> str:
        """Return a few sentences on the training. `seconds` of processor time count from the last resumption."""
        tokens = sum(stage.length * stage.batch * stage.steps for stage in self.stages)
        stages = ", ".join(f"{s.steps} x {s.batch} x {s.length}" for s in self.stages)
        return (
            f"{tokens / 1e6:.2f} million tokens, in updates x sequences x tokens: {stages}.\n"
            "Muon for the mlps, Adam for the rest. "
            f"It took {seconds / 60:.0f} minutes of processor time"
            f"{', counted from where it was last resumed' if resumed else ''}."
        )


def config(
    vocabulary: Vocabulary,
    *,
    layers: int,
    width: int,
    mlp_width: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
) -> ModelConfig:
    """Return a Qwen3 with the built-in vocabulary. Its slow RoPE pairs hardly rotate over a few thousand tokens."""
    return ModelConfig(
        vocab_size=VOCABULARY,
        num_layers=layers,
        width=width,
        mlp_width=mlp_width,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope=RopeConfig(theta=1e7),
        qk_norm=True,
        tied=True,
        model_type="qwen3",
        bos_id=vocabulary.begin,
        eos_ids=(vocabulary.end,),
    )


def recipes(vocabulary: Vocabulary) -> dict[str, Recipe]:
    """Return the recipes of the model and its test-size sibling, by the folder that each is written to."""
    standard = config(vocabulary, layers=3, width=160, mlp_width=384, heads=8, kv_heads=4, head_dim=32)
    small = config(vocabulary, layers=2, width=64, mlp_width=96, heads=4, kv_heads=4, head_dim=16)
    # long sequences are expensive and only needed for adaptation; short ones near the end preserve what was learned
    lengths = (128, 16, 800), (256, 8, 330), (512, 4, 50), (1024, 2, 40), (256, 8, 40), (1024, 2, 20)
    short = Stage(128, 16, 700), Stage(256, 8, 200), Stage(1024, 2, 30)
    return {
        "model": Recipe(
            standard,
            record_matchers(layer=1) + passage_matchers(layer=2),
            tuple(Stage(*numbers) for numbers in lengths),
        ),
        "test_model": Recipe(small, record_matchers(layer=1), short, dtype="bfloat16"),
    }


def as_model(template: Decoder, weights: dict[str, Any]) -> Decoder:
    """Return a decoder of the template's shapes with the given arrays, each sharded as the decoder shards it."""
    arrays = {
        f"{'' if name in TOP else 'layers.'}{name}.value": jnp.asarray(x) for name, x in weights.items()
    }

    def place(leaf: jax.ShapeDtypeStruct, array: jax.Array) -> jax.Array:
        # the vocabulary is padded in storage
        padding = [(0, stored - size) for stored, size in zip(leaf.shape, array.shape, strict=True)]
        return reshard(jnp.pad(array, padding).astype(leaf.dtype), leaf.sharding.spec)

    return jax.tree.map(place, template, template.with_unfused(arrays))


def template_of(recipe: Recipe, dtype: str = "float32") -> Decoder:
    return jax.eval_shape(lambda: Decoder(recipe.config, rngs=nnx.Rngs(0), dtype=dtype))


def objective(
    model: Decoder, tokens: jax.Array, weights: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Return the cross-entropy of tokens outside answers plus the cross-entropy of answers, and the two separately."""
    loss, _ = cross_entropy(model, tokens)
    answers = weights[:, 1:]
    text = jnp.mean(loss * (1 - answers))
    answer = jnp.sum(loss * answers) / jnp.maximum(jnp.sum(answers), 1)
    return text + answer, (text, answer)


def optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """Return the optimizer: Muon (orthogonalised momentum) for the mlps, Adam for the rest."""
    falling = int(recipe.steps * recipe.decay)

    def schedule(rate: float) -> optax.Schedule:
        parts = [
            optax.linear_schedule(0, rate, recipe.warm_up),
            optax.constant_schedule(rate),
            optax.cosine_decay_schedule(rate, max(falling, 1), 0.05),
        ]
        return optax.join_schedules(parts, [recipe.warm_up, recipe.steps - falling])

    mask = trained(recipe.config, recipe.matchers)

    def matrices(weights: Any) -> Any:
        """Return the dimension numbers of the mlp's matrices, [layer, in, out], and None for the rest, which Adam
        updates."""
        return {
            name: optax.contrib.MuonDimensionNumbers(1, 2) if name in ("gate", "up", "down") else None
            for name in weights
        }

    def scaled(change: Any, _: Any = None) -> Any:
        return {name: x * mask.get(name, 1) for name, x in change.items()}

    muon = optax.contrib.muon(
        schedule(recipe.mlp_learning_rate),
        consistent_rms=0.2,
        adam_learning_rate=schedule(recipe.learning_rate),
        adam_b2=0.98,
        muon_weight_dimension_numbers=matrices,
    )
    masked = optax.stateless(scaled)
    return optax.chain(optax.clip_by_global_norm(1.0), muon, masked)


def batches(
    stream: Mixture, recipe: Recipe, seed: int, first_step: int
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yield (step, tokens [b, t], answer weights [b, t]) from `first_step` on."""
    step = index = 0
    for stage in recipe.stages:
        for _ in range(stage.steps):
            if step >= first_step:
                rows = [stream(seed, index + row, stage.length) for row in range(stage.batch)]
                yield (
                    step,
                    np.stack([tokens for tokens, _ in rows]),
                    np.stack([weights for _, weights in rows]),
                )
            step, index = step + 1, index + stage.batch


def train(
    recipe: Recipe,
    stream: Mixture,
    checkpoint: Path,
    *,
    seed: int = 0,
    save_every: int = 50,
    report: Callable[[int, dict[str, float]], None] = lambda step, losses: None,
) -> Decoder:
    """Return the trained model. Resume from `checkpoint` if it exists, and update it every `save_every` steps."""
    tx, template = optimizer(recipe), template_of(recipe)

    def loss(weights, tokens, answers):
        return objective(as_model(template, weights), tokens, answers)

    @partial(jax.jit, donate_argnums=(0, 1))
    def update(weights, state, tokens, answers):
        (_, losses), gradient = jax.value_and_grad(loss, has_aux=True)(weights, tokens, answers)
        change, state = tx.update(gradient, state, weights)
        return optax.apply_updates(weights, change), state, losses

    initial = initial_weights(recipe.config, recipe.matchers, stream.vocabulary, seed)
    weights = {name: jax.device_put(array, P()) for name, array in initial.items()}
    checkpoint_state, first_step = (weights, tx.init(weights)), 0
    if checkpoint.exists():
        checkpoint_state, first_step = load_checkpoint(checkpoint, checkpoint_state)
    weights, state = checkpoint_state
    for step, tokens, answers in batches(stream, recipe, seed, first_step):
        weights, state, (text, answer) = update(weights, state, tokens, answers)
        report(step, {"text": float(text), "answers": float(answer)})
        if (step + 1) % save_every == 0 or step + 1 == recipe.steps:
            save_checkpoint(checkpoint, (weights, state), step + 1)
    make = jax.jit(partial(as_model, template_of(recipe, recipe.dtype)))
    task = Recall(stream.vocabulary, stream.text)
    return make(settle_margins(weights, make, recipe.matchers, task))


def save_checkpoint(path: Path, tree: Any, step: int) -> None:
    """Write a checkpoint to a temporary file and move it into place, so that a kill leaves the old or the new one."""
    partial = path.with_suffix(".partial.npz")
    partial.parent.mkdir(parents=True, exist_ok=True)
    np.savez(partial, *jax.tree.leaves(tree), step=step)
    os.replace(partial, path)


def load_checkpoint(path: Path, like: Any) -> tuple[Any, int]:
    leaves, tree = jax.tree.flatten(like)
    with np.load(path) as stored:
        arrays = [jax.device_put(stored[f"arr_{i}"], leaf.sharding) for i, leaf in enumerate(leaves)]
        return jax.tree.unflatten(tree, arrays), int(stored["step"])


@dataclass(frozen=True)
class Options:
    """Make the built-in model, its test-size sibling and the held-out text."""

    out: Path = Path("kvjax/builtin")
    """Folder for `model`, `test_model` and `heldout.txt`. Existing ones are replaced."""
    work: Path = Path("runs/builtin_model")
    """Folder for checkpoints, from which a stopped run resumes."""
    only: Literal["all", "model", "test_model"] = "all"
    """The model to make; all: both."""
    seed: int = 0
    """The seed of the initial weights and of the order of the data."""


def show_progress(recipe: Recipe, name: str) -> Callable[[int, dict[str, float]], None]:
    """Return a function that reports losses: as a progress bar on a terminal, elsewhere as a line every 50 steps."""
    bar = tqdm(total=recipe.steps, desc=name, disable=None)

    def report(step: int, losses: dict[str, float]) -> None:
        bar.update(step + 1 - bar.n)
        shown = ", ".join(f"{part} {loss:.3f}" for part, loss in losses.items())
        bar.set_postfix_str(shown, refresh=False)
        if bar.disable and (step + 1) % 50 == 0:
            print(f"{name}: step {step + 1} of {recipe.steps}, nats a token: {shown}", flush=True)

    return report


def write_model(
    model: Decoder, tokenizer: Tokenizer, vocabulary: Vocabulary, card: str, folder: Path
) -> None:
    """Write the Hugging Face folder. An existing one is replaced."""
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        extras, finished = Path(scratch) / "extras", Path(scratch) / "made"
        extras.mkdir()
        save_tokenizer(tokenizer, vocabulary, extras)
        save_model(model, finished, tokenizer_from=extras)
        (finished / "MODEL_CARD.md").write_text(card, encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        finished.rename(folder)


def main() -> None:
    options = parse_command(Options)
    with jax.set_mesh(start(MeshShape())):
        sources, heldout = hold_out(standard_library())
        tokenizer = train_tokenizer(sources)
        vocabulary = Vocabulary.from_tokenizer(tokenizer)
        stream = Mixture(vocabulary, encode_files(tokenizer, sources), SHARES)
        text = encode_files(tokenizer, list(split_files(heldout).values())[1::2])
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "heldout.txt").write_text(heldout, encoding="utf-8")
        for name, recipe in recipes(vocabulary).items():
            if options.only in ("all", name):
                checkpoint = options.work / f"{name}-{options.seed}.npz"
                started, resumed = time.process_time(), checkpoint.exists()
                model = train(
                    recipe, stream, checkpoint, seed=options.seed, report=show_progress(recipe, name)
                )
                seconds = time.process_time() - started
                card = model_card(model, vocabulary, text, recipe.summary(seconds, resumed))
                write_model(model, tokenizer, vocabulary, card, options.out / name)
                checkpoint.unlink()
                print(card)


if __name__ == "__main__":
    run_command(main)
