"""Makes the built-in model, its test-size sibling and the held-out text: `python -m train.builtin_model`.

It needs nothing but the machine it is on. The text is the Python standard library's source; the tasks are those of
`kvjax.evaluate.tasks`. A run that was stopped goes on from its last checkpoint. The same machine gives the same model.
"""

import json
import os
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm

from kvjax.evaluate.tasks import SPECIAL_TOKENS, TASKS, Mixture, Text, Tokens, Vocabulary, packed
from kvjax.evaluate.tasks.builtin import FILE_HEADING, encode_files, split_files
from kvjax.launch import MeshShape, parse_command, run_command, start
from kvjax.models import save_model
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Decoder, scan_layers
from kvjax.models.rope import RopeConfig
from train.builtin_weights import Matcher, Weights, initial_weights, passage_matchers, record_matchers

VOCABULARY = 1088
HELDOUT_BYTES = 295_000
SKIPPED_FOLDERS = {"site-packages", "test", "tests", "idle_test", "encodings", "__pycache__"}
"""Not the standard library's own text, or tables of characters."""
LICENCE_LINE = "Files of the Python standard library, © Python Software Foundation, under the PSF License Agreement.\n"


@dataclass(frozen=True)
class Stage:
    """`steps` updates on `batch` sequences of `length` tokens."""

    length: int
    batch: int
    steps: int


@dataclass(frozen=True)
class Recipe:
    """A model and how it is trained. The learning rate warms up, stays, and falls to a twentieth over the last `decay` of the steps."""

    config: ModelConfig
    matchers: tuple[Matcher, ...]
    stages: tuple[Stage, ...]
    learning_rate: float = 3e-3
    warm_up: int = 50
    decay: float = 0.5
    dtype: str = "float32"

    @property
    def steps(self) -> int:
        return sum(stage.steps for stage in self.stages)


def config(vocabulary: Vocabulary, **sizes: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=VOCABULARY,
        rope=RopeConfig(theta=1e7),
        qk_norm=True,
        tied=True,
        model_type="qwen3",
        bos_id=vocabulary.begin,
        eos_ids=(vocabulary.end,),
        **sizes,
    )


def recipes(vocabulary: Vocabulary) -> dict[str, Recipe]:
    """The model and its test-size sibling, by the folder they are written to."""
    sizes = {"num_layers": 3, "width": 128, "mlp_width": 384, "num_heads": 8, "num_kv_heads": 4, "head_dim": 32}
    small = {"num_layers": 2, "width": 64, "mlp_width": 96, "num_heads": 4, "num_kv_heads": 4, "head_dim": 16}
    return {
        "model": Recipe(
            config(vocabulary, **sizes),
            record_matchers(layer=1) + passage_matchers(layer=2),
            (Stage(128, 16, 1000), Stage(256, 8, 300), Stage(512, 4, 100), Stage(1024, 2, 100), Stage(256, 8, 100), Stage(1024, 2, 30)),
        ),
        "test_model": Recipe(
            config(vocabulary, **small), record_matchers(layer=1), (Stage(128, 16, 300), Stage(256, 8, 60)), dtype="bfloat16"
        ),
    }


# Text and tokenizer


def standard_library() -> dict[str, str]:
    """Path -> source of this Python's standard library, in the order of the paths."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = {}
    for file in sorted(root.rglob("*.py")):
        path = file.relative_to(root)
        if not SKIPPED_FOLDERS & set(path.parts):
            source = file.read_text(encoding="utf-8", errors="ignore")
            if source.strip():
                files[path.as_posix()] = source
    return files


def hold_out(files: dict[str, str], seed: int = 0) -> tuple[list[str], str]:
    """The sources to train on, and a packaged text of files that are not among them."""
    names, held, size = list(files), [], 0
    for i in np.random.default_rng(seed).permutation(len(names)):
        n_bytes = len(files[names[i]].encode())
        if 4_000 < n_bytes < 30_000 and size + n_bytes < HELDOUT_BYTES:
            held.append(names[i])
            size += n_bytes
    packaged = LICENCE_LINE + "".join(f"\n{FILE_HEADING}{name}\n{files[name]}" for name in sorted(held))
    return [source for name, source in files.items() if name not in set(held)], packaged


def train_tokenizer(sources: list[str]) -> Tokenizer:
    """Byte-level BPE over the sources, with the marks of the tasks as special tokens at the end."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sources, trainer)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, vocabulary: Vocabulary, folder: Path) -> None:
    """What transformers reads a tokenizer from, and the defaults of generation."""
    tokenizer.save(str(folder / "tokenizer.json"))
    marks = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "pad_token": "<|end|>"}
    ids = {"bos_token_id": vocabulary.begin, "eos_token_id": vocabulary.end, "pad_token_id": vocabulary.end}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 4096, "clean_up_tokenization_spaces": False}
    write_json(folder / "tokenizer_config.json", settings | marks)
    write_json(folder / "generation_config.json", ids)


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


# Training


def start_model(recipe: Recipe, vocabulary: Vocabulary, seed: int) -> Decoder:
    """The decoder with its initial weights, float32, on the current mesh."""
    model = Decoder(recipe.config, rngs=nnx.Rngs(seed))
    return with_weights(model, initial_weights(recipe.config, recipe.matchers, vocabulary.record, seed))


def with_weights(model: Decoder, weights: Weights) -> Decoder:
    """The model with the named arrays in the places of its own; rows that pad its vocabulary are zero."""

    def place(path: Any, leaf: jax.Array) -> jax.Array:
        name = ".".join(key.name for key in path[:-1]).removeprefix("layers.")
        if name not in weights:
            return leaf
        value = np.zeros(leaf.shape, leaf.dtype)
        value[tuple(map(slice, weights[name].shape))] = weights[name]
        return jax.device_put(value, leaf.sharding)

    return jax.tree_util.tree_map_with_path(place, model)


def cross_entropy(model: Decoder, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of each token but the first given those before it, in nats, and whether it is the likeliest: both [b, t − 1]."""
    logits, targets = model.logits(model.hidden(tokens))[:, :-1], tokens[:, 1:]
    chosen = jnp.sum(logits * jax.nn.one_hot(targets, logits.shape[-1]), -1)
    return jax.nn.logsumexp(logits, -1) - chosen, jnp.argmax(logits, -1) == targets


def objective(model: Decoder, tokens: jax.Array, weights: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Cross-entropy of the tokens that are no answers, plus that of the answers; both alone as well."""
    loss, _ = cross_entropy(model, tokens)
    answers = weights[:, 1:]
    text = jnp.mean(loss * (1 - answers))
    answer = jnp.sum(loss * answers) / jnp.maximum(jnp.sum(answers), 1)
    return text + answer, (text, answer)


def optimizer(recipe: Recipe) -> optax.GradientTransformation:
    rate, falling = recipe.learning_rate, int(recipe.steps * recipe.decay)
    parts = [
        optax.linear_schedule(0, rate, recipe.warm_up),
        optax.constant_schedule(rate),
        optax.cosine_decay_schedule(rate, max(falling, 1), 0.05),
    ]
    schedule = optax.join_schedules(parts, [recipe.warm_up, recipe.steps - falling])
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule, b2=0.98))


def batches(stream: Mixture, recipe: Recipe, seed: int, first_step: int) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """(step, tokens [b, t], answer weights [b, t]) from `first_step` on."""
    step = index = 0
    for stage in recipe.stages:
        for _ in range(stage.steps):
            if step >= first_step:
                rows = [stream(seed, index + row, stage.length) for row in range(stage.batch)]
                yield step, np.stack([tokens for tokens, _ in rows]), np.stack([weights for _, weights in rows])
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
    """The trained model. Goes on from `checkpoint` if it is there and brings it up to date every `save_every` steps."""
    tx = optimizer(recipe)

    def update(model, state, tokens, weights):
        (_, parts), gradient = jax.value_and_grad(objective, has_aux=True)(model, tokens, weights)
        change, state = tx.update(gradient, state, model)
        return optax.apply_updates(model, change), state, parts

    update = jax.jit(update, donate_argnums=(0, 1))
    model = start_model(recipe, stream.vocabulary, seed)
    carried, first_step = (model, tx.init(model)), 0
    if checkpoint.exists():
        carried, first_step = load_checkpoint(checkpoint, carried)
    model, state = carried
    for step, tokens, weights in batches(stream, recipe, seed, first_step):
        model, state, (text, answer) = update(model, state, tokens, weights)
        report(step, {"text": float(text), "answers": float(answer)})
        if (step + 1) % save_every == 0 or step + 1 == recipe.steps:
            save_checkpoint(checkpoint, (model, state), step + 1)
    return model


def save_checkpoint(path: Path, tree: Any, step: int) -> None:
    """Written beside and moved into place, so that a kill leaves the old one or the new one."""
    partial = path.with_suffix(".partial.npz")
    partial.parent.mkdir(parents=True, exist_ok=True)
    np.savez(partial, *jax.tree.leaves(tree), step=step)
    os.replace(partial, path)


def load_checkpoint(path: Path, like: Any) -> tuple[Any, int]:
    leaves, tree = jax.tree.flatten(like)
    with np.load(path) as stored:
        arrays = [jax.device_put(stored[f"arr_{i}"], leaf.sharding) for i, leaf in enumerate(leaves)]
        return jax.tree.unflatten(tree, arrays), int(stored["step"])


# Scores


def score(model: Decoder, task_name: str, vocabulary: Vocabulary, text: Tokens, length: int, samples: int) -> dict[str, float]:
    """Share of answer tokens that are the likeliest by kind of question and in all; for text bits per byte."""
    task = TASKS[task_name](vocabulary, text)
    judge = jax.jit(cross_entropy)
    right: dict[str, list[float]] = {}
    nats = n_bytes = 0.0
    for seed in range(10_000, 10_000 + samples, 4):
        group = [task.sample(s, length) for s in range(seed, seed + 4)]
        room = sum(len(question) for question in group[0].questions[1:])
        rows = [packed(sample, length + room, vocabulary.end) for sample in group]
        tokens, weights = np.stack([t for t, _ in rows]), np.stack([w for _, w in rows])
        loss, best = map(np.asarray, judge(model, tokens))
        for row, sample in enumerate(group):
            if isinstance(task, Text):
                nats += loss[row].sum()
                n_bytes += vocabulary.bytes_of(tokens[row])
                continue
            kinds = [question.kind for question in sample.questions for _ in question.answer]
            for kind, ok in zip(kinds, best[row][weights[row, 1:] > 0], strict=True):
                right.setdefault(kind, []).append(ok)
    if isinstance(task, Text):
        return {"bits per byte": nats / np.log(2) / n_bytes}
    everything = [ok for group in right.values() for ok in group]
    kinds = {kind: float(np.mean(group)) for kind, group in sorted(right.items())} if len(right) > 1 else {}
    return kinds | {"all": float(np.mean(everything))}
