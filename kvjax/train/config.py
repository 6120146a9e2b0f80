"""What a training run is told. Imports no jax: a wrong value is refused before anything starts."""

import dataclasses
import math
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro

from kvjax.config import parse_with_config
from kvjax.errors import UserError
from kvjax.launch import MeshShape

RUNS = Path("runs")
"""Where runs without an --out go."""


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Train WG-KV write gates for a frozen model.

    With nothing but --mesh: gates for the built-in small model (configs/builtin.yaml), a report of accuracy against
    measured cache size, checkpoints and plots. Without --config, another --model starts from the paper's values.
    """

    mesh: MeshShape = MeshShape()
    """Devices: 8 (fsdp), 4x2 (fsdp × tensor) or fsdp=4,tensor=2. Virtual CPU devices where there is no accelerator."""
    config: str | None = None
    """A YAML file of these options, or the name of one that comes with kvjax: builtin, llama-3.2-1b, llama-3.1-8b,
    qwen2.5-7b, qwen3-4b."""
    model: str = "builtin"
    """A Hugging Face folder, a hub id, or `builtin`."""
    dtype: str | None = None
    """The frozen model's dtype: float32, bfloat16 or float16; by default that of its weights. Gates are float32."""
    data: str = "builtin"
    """`builtin` (for the built-in model); a .txt, .jsonl or .parquet file or a folder of them; or a hub data set,
    NAME or NAME:CONFIG, which is streamed."""
    instruction: str = "Please analyze and summarize the following text:\n\n"
    """What stands before each document in the user's turn, for models with a chat template."""
    lengths: tuple[int, ...] = (4096, 8192, 16384, 32768)
    """Tokens of a sequence: a document of at least that many and less than twice as many is cut to it."""
    shares: tuple[float, ...] = (4000, 2000, 1000, 500)
    """How often each length is trained on, relative to the others."""
    batch: int | None = None
    """Sequences of a step, rounded up to a multiple of the mesh's data × fsdp; by default one for each of them."""
    steps: int = 7500
    """Updates. Warm-up takes the first tenth, a cosine to 0 the rest."""
    lambda_: Annotated[float, tyro.conf.arg(name="lambda")] = 0.04
    """Weight of the sparsity term: a larger one keeps less."""
    window: int = 256
    """The last tokens that are always visible."""
    tau: float = 0.1
    """A token is kept for good iff its gate is at least this."""
    sparsity: Literal["lifetime", "paper"] = "lifetime"
    """Sparsity term: weighted by the share of a token's life spent outside the window (the paper's code), or the plain
    mean (the paper's text)."""
    expand: float | None = None
    """Hidden width of the gates over head_dim; by default 1.5 for Qwen3 and 4 for the others."""
    lr: float = 1e-3
    """Peak learning rate of AdamW."""
    weight_decay: float = 0.01
    """AdamW's, on every gate parameter."""
    seed: int = 0
    """Of the gates' initial values, the order of the data and the report's tasks."""
    out: Path | None = None
    """Folder of the run: checkpoints, metrics, exported gates, report. By default runs/train-1, the next free number."""
    resume: bool = False
    """Go on from the last checkpoint in --out (by default the newest in runs/)."""
    checkpoint_every: int = 250
    """Steps between two checkpoints."""
    keep: int = 2
    """Checkpoints that are kept."""
    report: Literal["default", "full", "none"] = "default"
    """The table at the end: with at least 192 answers a cell, with at least 500, or none. Built-in model only."""
    tensorboard: bool = False
    """Also write TensorBoard events (needs tensorboardX)."""

    @property
    def rows(self) -> int:
        """Sequences of a step, on this mesh."""
        shards = self.mesh.batch_shards
        return -(-(self.batch or shards) // shards) * shards

    def check(self) -> None:
        """Refuse values that cannot be trained with. Raises UserError."""
        finite = all(map(math.isfinite, (self.lambda_, self.tau, self.lr, self.weight_decay, *self.shares)))
        rules = (
            (finite, "lambda, tau, lr, weight-decay, shares", "a number", "nan or infinite"),
            (self.lambda_ >= 0, "--lambda", "at least 0", self.lambda_),
            (self.window >= 1, "--window", "at least 1", self.window),
            (0 <= self.tau <= 1, "--tau", "between 0 and 1", self.tau),
            (self.steps >= 1, "--steps", "at least 1", self.steps),
            (self.batch is None or self.batch >= 1, "--batch", "at least 1", self.batch),
            (self.expand is None or self.expand > 0, "--expand", "above 0", self.expand),
            (self.lr > 0, "--lr", "above 0", self.lr),
            (self.weight_decay >= 0, "--weight-decay", "at least 0", self.weight_decay),
            (self.seed >= 0, "--seed", "at least 0", self.seed),
            (self.checkpoint_every >= 1, "--checkpoint-every", "at least 1", self.checkpoint_every),
            (self.keep >= 1, "--keep", "at least 1", self.keep),
            (self.dtype in (None, "float32", "bfloat16", "float16"), "--dtype", "float32, bfloat16 or float16", self.dtype),
        )
        for holds, option, expected, given in rules:
            if not holds:
                raise UserError(f"{option} must be {expected}, got {given}")
        self._check_lengths()
        if self.data == "builtin" and self.model != "builtin":
            raise UserError(
                f"--data builtin is made of the built-in model's tokens and --model is {self.model}: name a file, a "
                "folder or a hub data set"
            )

    def _check_lengths(self) -> None:
        if not self.lengths or sorted(set(self.lengths)) != list(self.lengths):
            raise UserError(f"--lengths must be one or more lengths, rising, got {list(self.lengths)}")
        if self.lengths[0] <= self.window:
            raise UserError(
                f"--lengths {self.lengths[0]} is not longer than --window {self.window}: no token would leave the window"
            )
        if len(self.shares) != len(self.lengths) or min(self.shares) < 0 or sum(self.shares) <= 0:
            raise UserError(f"--shares must be a number for each of {len(self.lengths)} lengths, got {list(self.shares)}")


def parse(args: Sequence[str] | None = None) -> TrainConfig:
    """The run's configuration from the command line, over its --config. Raises UserError for anything wrong."""
    import sys

    args = sys.argv[1:] if args is None else args
    model = _option(args, "--model")
    config = parse_with_config(TrainConfig, args, fallback="builtin" if model in (None, "builtin") else None)
    config.check()
    return config


def _option(args: Sequence[str], name: str) -> str | None:
    for index, arg in enumerate(args):
        if arg == name and index + 1 < len(args):
            return args[index + 1]
        if arg.startswith(name + "="):
            return arg.removeprefix(name + "=")
    return None


def prepare_folder(config: TrainConfig) -> TrainConfig:
    """`config` with `out` chosen, there, and seen to be writable.

    Raises:
        UserError: it cannot be written, it holds another run and --resume was not given, or there is nothing to resume.
    """
    out = config.out or _default_folder(config.resume)
    held = (out / "checkpoints").is_dir()
    if config.resume and not held:
        raise UserError(f"--resume: {out} holds no run (it has no checkpoints folder)")
    if held and not config.resume:
        raise UserError(f"--out {out} already holds a run: pass --resume to go on with it, or another --out")
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out) as probe:
            probe.write(b"kvjax")
    except OSError as error:
        raise UserError(f"--out {out} cannot be written: {error.strerror or error}") from None
    return dataclasses.replace(config, out=out)


def _default_folder(resume: bool) -> Path:
    """The newest numbered run to go on with, or the next number's folder."""
    names = os.listdir(RUNS) if RUNS.is_dir() else []
    numbers = [int(match[1]) for name in names if (match := re.fullmatch(r"train-(\d+)", name))]
    newest = max(numbers, default=0)
    if resume and not newest:
        raise UserError(f"--resume: there is no run in {RUNS}/; name its folder with --out")
    return RUNS / f"train-{newest if resume else newest + 1}"
