"""What a way of training is: every run's options, and what the loop asks of a method."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import numpy as np
from jaxtyping import Float, Int

from kvjax.cli.launch import MeshShape
from kvjax.errors import LARGEST_INT, UserError
from kvjax.evaluate.config import UNTRAINED

if TYPE_CHECKING:
    import jax
    import optax
    from jax.sharding import Mesh
    from jaxtyping import Array

    from kvjax.models.config import ModelConfig
    from kvjax.models.decoder import Decoder
    from kvjax.policies.policy import Policy
    from kvjax.train.data import Data, Open, Wanted

PLAIN = bool, int, float, str, type(None)
"""What `config.json` holds of an option, alone or in a tuple."""
T = TypeVar("T")
Rule = tuple[bool, str, str, Any]
"""Whether it holds, the option, what is expected of it, its value."""


@dataclasses.dataclass(frozen=True)
class Validation:
    """A recipe's figures (`Recipe.measure`) of the held-out sequences."""

    numbers: dict[str, float]
    """Means of those that are one number a sequence."""
    by_sequence: dict[str, Float[np.ndarray, "s ..."]]
    """The others, of every sequence."""
    sequences: int
    """How many."""
    unit: str = "sequences"
    """What they are (`Recipe.unit`)."""

    def __str__(self) -> str:
        """Without those of a group, which have a slash in their names."""
        shown = ((name, value) for name, value in self.numbers.items() if "/" not in name)
        figures = ", ".join(f"{name} {value:.4g}" for name, value in shown)
        return f"held out ({self.sequences} {self.unit}): {figures}"


@dataclasses.dataclass(frozen=True)
class Recipe(abc.ABC):
    """One way of training: what a run is told, and what is made of it.

    A subclass is a frozen dataclass whose fields (numbers, words, tuples of these) become command-line options and
    YAML keys beside these, which are every run's. Its methods are all that the loop knows of it; parameters are pytrees
    of arrays.
    """

    mesh: MeshShape = MeshShape()
    """Devices: 8 (fsdp), 4x2 (fsdp × tensor) or fsdp=4,tensor=2; sequences longer than a device's memory are split over
    sequence=2. Virtual CPU devices where there is no accelerator."""
    method: str = ""
    """What is trained: one of kvjax's own, a method that an installed package brings, or package.module:NAME."""
    config: str | None = None
    """A YAML file of these options, or the name of one that comes with kvjax: for wgkv builtin, smollm2-135m,
    qwen2.5-coder-0.5b, llama-3.2-1b, llama-3.1-8b, qwen2.5-7b and qwen3-4b, for other methods such as
    fast_kvzip-builtin or prulong-llama-3.1-8b (the repository's configs/ has all)."""
    model: str = "builtin"
    """A Hugging Face folder, a GGUF file, a hub id, or `builtin`."""
    dtype: str | None = None
    """The model's dtype: float32, bfloat16 or float16; by default that of its weights. What is added is float32."""
    data: str = "builtin"
    """`builtin` (for the built-in model); a .txt, .jsonl or .parquet file or a folder of them; or a hub data set,
    NAME or NAME:CONFIG, which is streamed."""
    instruction: str = "Please analyze and summarize the following text:"
    """What stands before each document in the user's turn, with an empty line, for models with a chat template."""
    lengths: tuple[int, ...] = (4096, 8192, 16384, 32768)
    """Tokens of a sequence: a document is cut to the largest length that it fills."""
    shares: tuple[float, ...] = (4000.0, 2000.0, 1000.0, 500.0)
    """How often each length is trained on, relative to the others; where --lengths alone are told, inversely
    proportional to them, as these are."""
    sequences: int = 7500
    """Sequences to train on in all, on any mesh."""
    batch: int = 1
    """Sequences of an update, rounded up to a multiple of the mesh's data × fsdp: a larger one makes fewer updates."""
    accumulate: int = 1
    """Parts of an update's sequences that are computed one after another, their gradients added: less memory."""
    master_weights: bool = False
    """Keep 16-bit parameters in float32 between updates; the loss sees them rounded."""
    seed: int = 0
    """Of the initial values, of what a loss draws, of the order of the data and of the report's tasks."""
    out: Path | None = None
    """Folder of the run: checkpoints, metrics, exports, report. By default runs/train-1, or the next number."""
    dry_run: bool = False
    """Only check the options against the model's shape, and say how much would be trained: without weights, data or
    network, in seconds. For a model of a known shape (as in kvjax.plan) or a folder with its config.json."""
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
    """The table at the end: of the built-in model with at least 192 answers a cell, with at least 500, or none; of
    another held-out text against KV size, its last 128 tokens or its last eighth predicted. Where none can be made
    (several processes, a method that compacts while it decodes) a line says so before the start, and full is refused.
    """
    tasks: tuple[str, ...] = ()
    """RULER's tasks that the report of another model than the built-in one adds: niah_single_1, …, vt, cwe, fwe."""
    tensorboard: bool = False
    """Also write TensorBoard events (needs tensorboardX)."""

    @property
    def rows(self) -> int:
        """Sequences of an update, on this mesh."""
        shards = self.mesh.batch_shards * self.accumulate
        return -(-self.batch // shards) * shards

    @property
    def steps(self) -> int:
        """Updates, on this mesh: the last one is filled up."""
        return -(-self.sequences // self.rows)

    exports: ClassVar[str] = "parameters"
    """The folder of a run that holds what it leaves for use."""
    builtin: ClassVar[str | None] = None
    """The YAML file that is taken for the built-in model, if none is named."""
    soft: ClassVar[str | None] = None
    """Which figure of `measure` is the distillation loss of what is trained, where what is used is something harder."""
    shown: ClassVar[Mapping[str, str]] = {"loss": ".4f"}
    """Which of the logged scalars the progress bar shows, where they are logged, and how."""
    unit: ClassVar[str] = "sequences"
    """What the rows of an update are, which `sequences` and `batch` count: another word where they are no sequences of
    tokens (`row`)."""

    @property
    def takes_model(self) -> bool:
        """Whether `init` takes the loaded model's memory over: then nothing else is given it."""
        return False

    @property
    def most_tokens(self) -> int:
        """Of the longest sequence that the model is run on."""
        return max(self.lengths)

    def update_of(self, length: int) -> str:
        """An update in words, of sequences of `length` tokens if it is of sequences."""
        return f"{self.rows} × {length} tokens" if self.unit == "sequences" else f"{self.rows} {self.unit}"

    def rules(self) -> Iterator[Rule]:
        """What the options must be; a subclass adds its own."""
        yield self.sequences >= 1, "--sequences", "at least 1", self.sequences
        yield self.batch >= 1, "--batch", "at least 1", self.batch
        yield self.accumulate >= 1, "--accumulate", "at least 1", self.accumulate
        yield 0 <= self.seed <= LARGEST_INT, "--seed", f"from 0 to {LARGEST_INT}", self.seed
        yield self.checkpoint_every >= 1, "--checkpoint-every", "at least 1", self.checkpoint_every
        yield self.validation >= 1, "--validation", "at least 1", self.validation
        every = self.validate_every
        yield every is None or every >= 1, "--validate-every", "at least 1", every
        yield self.keep >= 1, "--keep", "at least 1", self.keep
        known = None, "float32", "bfloat16", "float16"
        yield self.dtype in known, "--dtype", "float32, bfloat16 or float16", self.dtype

    def fitted(self, told: Container[str]) -> Recipe:
        """With what follows from the options that were `told` together (their fields' names) where others were not:
        the shares of lengths."""
        if "lengths" not in told or "shares" in told or not self.lengths or min(self.lengths) < 1:
            return self
        return dataclasses.replace(self, shares=tuple(self.lengths[-1] / length for length in self.lengths))

    def check(self) -> None:
        """Refuse values that cannot be trained with.

        Raises:
            UserError: for a value.
            TypeError: for an option of the subclass that `config.json` could not hold.
        """
        for name, value in self.own_options().items():
            if not all(isinstance(x, PLAIN) for x in (value if isinstance(value, tuple) else (value,))):
                raise TypeError(
                    f"{type(self).__name__}.{name}: an option is a number, a word or a tuple of these, got {value!r}"
                )
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            numbers = value if isinstance(value, tuple) else (value,)
            if any(isinstance(x, float) and not math.isfinite(x) for x in numbers):
                raise UserError(f"{option(field.name)} must be a number, got {value}")
        for holds, name, expected, value in self.rules():
            if not holds:
                raise UserError(f"{name} must be {expected}, got {value}")
        if not self.lengths or self.lengths[0] < 1 or sorted(set(self.lengths)) != list(self.lengths):
            raise UserError(f"--lengths must be one or more lengths, rising, got {list(self.lengths)}")
        for length in self.lengths if self.unit == "sequences" else ():
            if length % self.mesh.sequence:
                raise UserError(
                    f"--lengths {length}: --mesh {self.mesh} splits the tokens of a sequence over {self.mesh.sequence} "
                    "devices, which do not divide it"
                )
        if len(self.shares) != len(self.lengths) or min(self.shares) < 0 or sum(self.shares) <= 0:
            raise UserError(
                f"--shares must be a number for each of {len(self.lengths)} lengths, got {list(self.shares)}"
            )

    def check_model(self, model: ModelConfig) -> None:
        """Refuse options that do not go with the model. Raises UserError, before a device is used."""
        return None

    def phases(self) -> Sequence[Recipe]:
        """The run's phases, one after another, each with its own sequences, lengths, loss and optimizer."""
        return (self,)

    @abc.abstractmethod
    def init(self, model: Decoder) -> Any:
        """The parameters before the first update, float32 unless they are the model's own. Jitted under the mesh, so
        that what `jax.eval_shape` says of it holds; may hold the model, or a part of it."""

    def begin(self, params: Any) -> Any:
        """The parameters of a new run, given those of `init`: others of the same shapes, dtypes and shardings where
        they are read from files. Not jitted, and not called where a resume has a checkpoint."""
        return params

    def enter(self, params: Any) -> tuple[Any, Any]:
        """A later phase's first parameters, from those of the phase before, and what it holds of them besides (a
        teacher), which no update changes."""
        return params, None

    def frozen(self, model: Decoder | None, constants: Any) -> Any:
        """What the loss reads and nobody trains: by default the loaded model. `constants` are what `enter` gave."""
        return model

    def split(self, params: Any) -> tuple[Any, Decoder | None]:
        """The parameters as those that are the method's own and, if the run trained it, the model."""
        return params, None

    def batches(self, sequences: Iterator[Any], model: Decoder | None) -> Iterator[Any]:
        """What the loss gets, of sequences int32 [rows, length] (or as `open_data` makes them), those of one update for
        each batch: a pytree whose arrays have their rows first. A resume begins with the next update's. With several
        processes each gets its own rows, over which no program of the whole mesh can be run."""
        return sequences

    def row(self, model: Decoder, length: int) -> Any:
        """The shapes and dtypes of a row of an update, of a sequence of `length` tokens if it is of one, a pytree. The
        model may be shapes, too. None: they are what `batches` makes of any tokens."""
        return None

    def prepare(
        self,
        model: Decoder,
        sequences: Iterator[Any],
        held_out: Sequence[Any],
        mesh: Mesh,
        tokens: int,
        say: Callable[[str], None],
    ) -> None:
        """Compute what `batches` adds to sequences, in files of the run's folder or of another that is named, once and
        before the first update.

        Args:
            sequences: this process's rows of every update, and `tokens` in all of them; nothing and 0 where a
                checkpoint is exported, which needs what is held out alone.

        Raises:
            UserError: a folder of something else, or a disk that fills.
        """
        return None

    def open_data(self, wanted: Wanted) -> Data:
        """The run's sequences and those held out, by default a document that is cut to each. Raises UserError."""
        from kvjax.train.data import open_data

        return open_data(wanted)

    def collect(self) -> Open | None:
        """What opens the run's data where an update's rows are no sequences of tokens (`row`). What can be seen to be
        wrong with them is raised here, before the run has its folder; what takes long is done by what is returned."""
        return None

    @abc.abstractmethod
    def loss(
        self, params: Any, frozen: Any, batch: Any, key: jax.Array, step: Int[Array, ""]
    ) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
        """What is minimised, in float32, and the scalars to log, of any name; those with a slash in it are logged and
        not shown.

        Args:
            batch: of one update, or of one part of it; split over the mesh by its rows.
            key: another one for each update, the same for its parts, so that these are the update. step: updates before
                this one, in this phase.
        """

    @abc.abstractmethod
    def optimizer(self) -> optax.GradientTransformation:
        """Of one phase: groups with rates of their own, ascent and clipping are optax's."""

    def measure(self, params: Any, frozen: Any, batch: Any) -> dict[str, Float[Array, "b ..."]]:
        """Figures of held-out sequences, each by itself: of those [b] means are logged and exported, of others every
        sequence's is kept. By default what the loss gives, with one key and as after the last step, for a batch that
        has one sequence in every row."""
        import jax
        import jax.numpy as jnp

        key, step = jax.random.key(self.seed), jnp.int32(self.steps)
        value, numbers = self.loss(params, frozen, batch, key, step)
        return {name: x[None] for name, x in ({"loss": value} | numbers).items()}

    def remark(self, validation: Validation) -> str:
        """What a person should know of the last validation besides its means."""
        return ""

    def export(self, folder: Path, params: Any, model: Decoder, validation: Validation) -> None:
        """Write what `policy` reads into `folder`: by default the method's own parameters by name, and the recipe's own
        options. The loop adds an Orbax checkpoint of all parameters (`orbax`) and, if the run trained it, the model
        (`model`). Called in every process.

        Args:
            params, model: as `split` gives them; the loaded model if no other was trained.
        """
        from kvjax.checkpoints.folder import save_tree

        origin = {"model": self.model, "data": self.data, "sequences": self.sequences, "seed": self.seed}
        description = {"method": self.method, "options": self.own_options(), "validation": validation.numbers}
        save_tree(folder, params, description | origin)

    def draw(self, folder: Path, validation: Validation) -> None:
        """Pictures of a finished run into its folder, in the first process."""
        return None

    def own_options(self) -> dict[str, Any]:
        """The options that are this recipe's and not every run's."""
        common = {field.name for field in dataclasses.fields(Recipe)}
        names = (field.name for field in dataclasses.fields(self) if field.name not in common)
        return {name: getattr(self, name) for name in names}

    @property
    def used_as(self) -> str:
        """The policy that what was trained is for."""
        return self.method

    def evaluate_options(self, folder: Path) -> Sequence[str]:
        """What `kvjax.evaluate` is told for what was exported to `folder` to be among what it compares."""
        return "--policies", "full", *self.rivals.values(), self.method, "--gates", str(folder)

    def use_options(self, folder: Path) -> Sequence[str]:
        """What `kvjax.generate` is told to use what was exported to `folder` as `deploy` does."""
        return "--policy", self.used_as, "--gates", str(folder)

    @property
    def rivals(self) -> Mapping[str, str]:
        """The evictions that the report compares it with at its size, beside the full cache, static heads and chance,
        by the words that the report has for them."""
        return UNTRAINED

    @abc.abstractmethod
    def deploy(self, params: Any, model: Decoder) -> Policy:
        """The policy of the method's own parameters, for a model."""

    def sweep(
        self, params: Any, model: Decoder, held_out: Sequence[Int[np.ndarray, " _"]]
    ) -> Mapping[str, Policy]:
        """Return what the report of a user's own model measures, by its arguments in a policy string: the deployed
        policy first, then smaller and larger ones of the same parameters, as held-out sequences ask for them. By
        default the deployed one alone, without arguments."""
        return {"": self.deploy(params, model)}

    @classmethod
    def policy(cls, *, gates: Any, model: Any, **options: Any) -> Policy:
        """The policy of an exported folder, with its options or others, for `model`.

        Raises:
            UserError: the folder holds no such parameters, or an option that the recipe does not have.
        """
        import jax

        from kvjax.checkpoints.folder import describe, load_tree

        values: dict[str, Any] = describe(gates).get("options", {}) | options
        known = {field.name for field in dataclasses.fields(cls)} - {
            x.name for x in dataclasses.fields(Recipe)
        }
        if unknown := sorted(set(values) - known):
            raise UserError(f"{cls.__name__} has no option {unknown[0]!r}; it has {', '.join(sorted(known))}")
        arguments: dict[str, Any] = {key: tuple(x) if isinstance(x, list) else x for key, x in values.items()}
        recipe = cls(**arguments)
        recipe.check()
        like = recipe.split(jax.eval_shape(recipe.init, model))[0]
        return recipe.deploy(load_tree(gates, like), model)


def option(field: str) -> str:
    """The command line's name of a field."""
    return "--" + field.rstrip("_").replace("_", "-")


def read_init(read: Callable[[str], T], init: str) -> T:
    """What is read of the gates that a run is to begin with. Raises UserError, which names the option."""
    try:
        return read(init)
    except UserError as error:
        raise UserError(f"--init {error}") from None
