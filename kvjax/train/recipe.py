"""The base class of training methods: the options of every run, and the interface that the loop calls."""

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
from kvjax.cli.shards import WHOLE, Shard
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
    from kvjax.train.data import Data, DataRequest, Open

PLAIN = bool, int, float, str, type(None)
"""The types of options that `config.json` can hold, alone or in a tuple."""
T = TypeVar("T")
Rule = tuple[bool, str, str, Any]
"""A check of an option: True if it holds, the option, what is expected, and the value."""


@dataclasses.dataclass(frozen=True)
class Validation:
    """The results of `Recipe.measure` on the held-out sequences."""

    numbers: dict[str, float]
    """The means of the figures that are one number per sequence."""
    by_sequence: dict[str, Float[np.ndarray, "s ..."]]
    """The other figures, for every sequence."""
    sequences: int
    """The number of held-out sequences."""
    unit: str = "sequences"
    """The word for sequences (`Recipe.unit`)."""

    def __str__(self) -> str:
        """Return a line with the means, except those with a slash in their names."""
        shown = ((name, value) for name, value in self.numbers.items() if "/" not in name)
        figures = ", ".join(f"{name} {value:.4g}" for name, value in shown)
        return f"held out ({self.sequences} {self.unit}): {figures}"


@dataclasses.dataclass(frozen=True)
class Recipe(abc.ABC):
    """The base class of a training method: its options and its steps.

    A subclass is a frozen dataclass. Its fields (numbers, words, tuples of these) become command-line options and YAML
    keys, in addition to the fields here, which every run has. The loop calls its methods only. Parameters are pytrees
    of arrays.
    """

    mesh: MeshShape = MeshShape()
    """The devices: 8 (fsdp), 4x2 (fsdp × tensor) or fsdp=4,tensor=2. sequence=2 splits sequences that are too long for
    a device's memory. Without an accelerator these are virtual CPU devices."""
    method: str = ""
    """The method to train: one of kvjax's own, a method of an installed package, or package.module:NAME."""
    config: str | None = None
    """A YAML file of these options, or the name of one that comes with kvjax. For wgkv: builtin, smollm2-135m,
    qwen2.5-coder-0.5b, llama-3.2-1b, llama-3.1-8b, qwen2.5-7b and qwen3-4b; for other methods such as
    fast_kvzip-builtin or prulong-llama-3.1-8b (the repository's configs/ has all)."""
    model: str = "builtin"
    """A Hugging Face folder, a GGUF file, a hub id, or `builtin`."""
    dtype: str | None = None
    """The model's dtype: float32, bfloat16 or float16; by default its weights' dtype. Added parameters are float32."""
    weights: str | None = None
    """int8 or fp8: round the frozen model's matrices to 8 bits on loading; by default they stay as in the files."""
    data: str = "builtin"
    """The training data: `builtin` (for the built-in model), a .txt, .jsonl or .parquet file or a folder of them, or a
    hub dataset, NAME or NAME:CONFIG, which is streamed."""
    instruction: str = "Please analyze and summarize the following text:"
    """The text before each document in the user's turn, followed by an empty line. Only for models with a chat
    template."""
    lengths: tuple[int, ...] = (4096, 8192, 16384, 32768)
    """The lengths of sequences in tokens. A document is cut to the largest length that it fills."""
    shares: tuple[float, ...] = (4000.0, 2000.0, 1000.0, 500.0)
    """The relative frequency of each length. If --lengths is given without --shares, frequencies are inversely
    proportional to the lengths, as they are by default."""
    sequences: int = 7500
    """The total number of sequences to train on, on any mesh."""
    batch: int = 1
    """The number of sequences of an update, rounded up to a multiple of the mesh's data × fsdp (times --accumulate).
    Larger batches make fewer updates."""
    accumulate: int = 1
    """The number of parts of an update, which are computed one after another to save memory. Their gradients are
    averaged."""
    master_weights: bool = False
    """Keep 16-bit parameters in float32 between updates. The loss sees them rounded."""
    seed: int = 0
    """The seed of initial values, of samples drawn by a loss, of the data's order and generated tasks, and of the
    report's random policies."""
    out: Path | None = None
    """The folder of the run: checkpoints, metrics, exports, report. By default runs/train-1, or the next number."""
    dry_run: bool = False
    """Only check the options against the model's shape and say how much would be trained. This takes seconds and needs
    no weights, data or network. The model must have a known shape (see kvjax.plan) or be a folder with config.json."""
    resume: bool = False
    """Go on from the last checkpoint in --out (by default the newest run in runs/)."""
    checkpoint_every: int = 250
    """The number of updates between two checkpoints."""
    validation: int = 8
    """The number of held-out sequences, with lengths in proportion to --shares. Their documents are never trained
    on."""
    validate_every: int | None = None
    """The number of updates between two validations; by default --checkpoint-every. The last update is always
    validated."""
    shard: str | None = None
    """Only compute one of several shares of the targets or of the teacher's predictions, into the folder that --targets
    or --teacher names. 0/8 is the first of eight shares. 8 alone takes the index from a Slurm array, an indexed job of
    Kubernetes or SkyPilot's rank."""
    keep: int = 2
    """The number of checkpoints that are kept."""
    report: Literal["default", "full", "none"] = "default"
    """The table at the end. For the built-in model each result has at least 192 answers (default) or 500 (full). For
    another model the last eighth of held-out text is predicted at several KV sizes, at most 128 tokens of it (default)
    or all (full). If no report can be made (several processes, a method that compacts while it decodes), a line says so
    before the start, and full or --tasks is an error."""
    tasks: tuple[str, ...] = ()
    """RULER tasks to add to the report of a model other than the built-in one: niah_single_1, …, vt, cwe, fwe."""
    tensorboard: bool = False
    """Also write TensorBoard events (needs tensorboardX)."""

    @property
    def rows(self) -> int:
        """The number of sequences of an update on this mesh."""
        shards = self.mesh.batch_shards * self.accumulate
        return -(-self.batch // shards) * shards

    @property
    def steps(self) -> int:
        """The number of updates on this mesh. The last update has as many sequences as the others."""
        return -(-self.sequences // self.rows)

    exports: ClassVar[str] = "parameters"
    """The folder of a run's exported parameters, in the run's folder."""
    builtin: ClassVar[str | None] = None
    """The name of the YAML file for the built-in model if --config names none."""
    soft: ClassVar[str | None] = None
    """The figure of `measure` that is the distillation loss of soft masks, if masks are hard at inference."""
    shown: ClassVar[Mapping[str, str]] = {"loss": ".4f"}
    """The logged scalars that the progress bar shows, with their formats. Scalars that are not logged are left out."""
    unit: ClassVar[str] = "sequences"
    """The word for the rows of an update, which `sequences` and `batch` count. Recipes whose rows are not sequences of
    tokens (`row`) have another word."""

    @property
    def takes_model(self) -> bool:
        """True if `init` takes over the memory of the loaded model. Afterwards nothing else gets that model."""
        return False

    @property
    def trains_model(self) -> bool:
        """True if the model itself is trained, and not only the parameters that are added to it."""
        return False

    @property
    def share(self) -> Shard:
        """The share of the work that `shard` names; without it, all of the work."""
        return WHOLE if self.shard is None else Shard.parse(self.shard)

    @property
    def kept(self) -> Path | None:
        """The folder, named by an option, of arrays that are computed before the first update; None: there is none."""
        return None

    @property
    def most_tokens(self) -> int:
        """The number of tokens of the longest sequence that the model reads."""
        return max(self.lengths)

    def update_of(self, length: int) -> str:
        """Describe an update in words. `length`: the tokens of a sequence, if rows are sequences."""
        return f"{self.rows} × {length} tokens" if self.unit == "sequences" else f"{self.rows} {self.unit}"

    def rules(self) -> Iterator[Rule]:
        """Yield the rules that the options must obey. A subclass adds its own."""
        yield self.sequences >= 1, "--sequences", "at least 1", self.sequences
        yield self.batch >= 1, "--batch", "at least 1", self.batch
        yield self.accumulate >= 1, "--accumulate", "at least 1", self.accumulate
        yield 0 <= self.seed <= LARGEST_INT, "--seed", f"from 0 to {LARGEST_INT}", self.seed
        yield self.checkpoint_every >= 1, "--checkpoint-every", "at least 1", self.checkpoint_every
        yield self.validation >= 1, "--validation", "at least 1", self.validation
        interval = self.validate_every
        yield interval is None or interval >= 1, "--validate-every", "at least 1", interval
        yield self.keep >= 1, "--keep", "at least 1", self.keep
        dtypes = None, "float32", "bfloat16", "float16"
        yield self.dtype in dtypes, "--dtype", "float32, bfloat16 or float16", self.dtype

    def with_derived_defaults(self, given: Container[str]) -> Recipe:
        """Return the recipe with defaults that depend on other options. Here these are the shares of lengths.

        Args:
            given: the names of the fields that the user has set.
        """
        if "lengths" not in given or "shares" in given or not self.lengths or min(self.lengths) < 1:
            return self
        return dataclasses.replace(self, shares=tuple(self.lengths[-1] / length for length in self.lengths))

    def check(self) -> None:
        """Check the values of the options.

        Raises:
            UserError: a value is wrong.
            TypeError: `config.json` could not hold an option of the subclass.
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
        if self.shard is not None:
            Shard.parse(self.shard)
            if self.kept is None:
                raise UserError(
                    f"--shard {self.shard} is for what a run computes before its first update, in a folder that all "
                    "machines see: give fast_kvzip --targets ./FOLDER, or kvpop --teacher FOLDER"
                )
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
        """Raise UserError if the options do not fit the model. This is called before a device is used."""
        return None

    @abc.abstractmethod
    def init(self, model: Decoder) -> Any:
        """Return the parameters before the first update, in float32 unless they are the model's own. They may include
        the model or a part of it. The loop jits this under the mesh, so `jax.eval_shape` must work on it."""

    def begin(self, params: Any) -> Any:
        """Return the first parameters of a new run, given the result of `init`. Parameters from files must have the
        same shapes, dtypes and shardings. This is not jitted, and not called if a run resumes from a checkpoint."""
        return params

    def split(self, params: Any) -> tuple[Any, Decoder | None]:
        """Split the parameters into the method's own and, if the run trained it, the model."""
        return params, None

    def batches(self, sequences: Iterator[Any], model: Decoder | None) -> Iterator[Any]:
        """Make a batch for the loss from the sequences of each update. A batch is a pytree of arrays [rows …].

        `sequences` are int32 [rows, length], or what `open_data` returns. After a resume they start with the next
        update. Each of several processes gets its own rows, so no program of the whole mesh can run here.
        """
        return sequences

    def row(self, model: Decoder, length: int) -> Any:
        """Return the shapes and dtypes of a row of an update, a pytree. None: they can be found by calling `batches` on
        any tokens. `length`: the tokens of a sequence, if rows are sequences. `model` may have shapes for arrays."""
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
        """Compute the arrays that `batches` adds to sequences. This happens once, before the first update. They are
        stored in the run's folder or in another folder that an option names.

        Args:
            sequences: this process's rows of every update; none if a checkpoint is exported, which only needs the
                held-out sequences.
            tokens: the number of tokens of all updates; 0 if a checkpoint is exported.

        Raises:
            UserError: the folder belongs to something else, or the disk fills up.
        """
        return None

    def open_data(self, request: DataRequest) -> Data:
        """Open the run's sequences and the held-out ones. By default each is one document, cut to its length. Raises
        UserError if the data cannot be used."""
        from kvjax.train.data import open_data

        return open_data(request)

    def collect(self) -> Open | None:
        """Return a function that opens the run's data if an update's rows are not sequences of tokens (`row`), else
        None. Raise errors in the data here, before the run has its folder. Leave long computations to the function."""
        return None

    @abc.abstractmethod
    def loss(
        self, params: Any, frozen: Any, batch: Any, key: jax.Array, step: Int[Array, ""]
    ) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
        """Return the loss, in float32, and the scalars to log. Scalars with a slash in their names are logged but not
        shown.

        Args:
            frozen: the loaded model, which no update changes; None if `takes_model`.
            batch: the batch of an update or of a part of it, split over the mesh by rows.
            key: the key of the update, which all its parts share.
            step: the number of updates before this one.
        """

    @abc.abstractmethod
    def optimizer(self) -> optax.GradientTransformation:
        """Return the optimizer. Groups with their own rates, ascent and clipping are made with optax."""

    def measure(self, params: Any, frozen: Any, batch: Any) -> dict[str, Float[Array, "b ..."]]:
        """Return figures for each held-out sequence. The means of figures [b] are logged and exported; other figures
        are kept for every sequence. By default the figures are the loss and its scalars, with a fixed key and as after
        the last step; then all rows of the batch are the same sequence."""
        import jax
        import jax.numpy as jnp

        key, step = jax.random.key(self.seed), jnp.int32(self.steps)
        value, numbers = self.loss(params, frozen, batch, key, step)
        return {name: x[None] for name, x in ({"loss": value} | numbers).items()}

    def remark(self, validation: Validation) -> str:
        """Return a remark on the last validation, for the user, in addition to the means."""
        return ""

    def export(self, folder: Path, params: Any, model: Decoder, validation: Validation) -> None:
        """Write the files that `policy` reads into `folder`, by default the method's own parameters by name and the
        recipe's own options. The run adds an Orbax checkpoint of all parameters (`orbax`) and, if the run trained the
        model, the model (`model`). Called in every process.

        Args:
            params, model: the results of `split`; the loaded model if the run did not train it.
        """
        from kvjax.checkpoints.folder import save_tree

        save_tree(folder, params, self.description(validation))

    def description(self, validation: Validation) -> dict[str, Any]:
        """Return what an exported folder says about its training."""
        return {
            "method": self.method,
            "options": self.own_options(),
            "validation": validation.numbers,
            "model": self.model,
            "data": self.data,
            "sequences": self.sequences,
            "seed": self.seed,
        }

    def draw(self, folder: Path, validation: Validation) -> None:
        """Draw pictures of a finished run into its folder. Called in the first process."""
        return None

    def own_options(self) -> dict[str, Any]:
        """Return the options that this recipe adds to those of every run."""
        common = {field.name for field in dataclasses.fields(Recipe)}
        names = (field.name for field in dataclasses.fields(self) if field.name not in common)
        return {name: getattr(self, name) for name in names}

    @property
    def used_as(self) -> str:
        """The name of the policy that uses the trained parameters."""
        return self.method

    def evaluate_options(self, folder: Path) -> Sequence[str]:
        """Return the options with which `kvjax.evaluate` compares the export in `folder` with other policies."""
        return "--policies", "full", *self.rivals.values(), self.used_as, "--gates", str(folder)

    def use_options(self, folder: Path) -> Sequence[str]:
        """Return the options with which `kvjax.generate` uses the export in `folder` as `deploy` does."""
        return "--policy", self.used_as, "--gates", str(folder)

    @property
    def rivals(self) -> Mapping[str, str]:
        """The evictions with which the report compares the trained policy at equal size, by their names in the report.
        The full cache, static patterns and random policies are compared, too."""
        return UNTRAINED

    @abc.abstractmethod
    def deploy(self, params: Any, model: Decoder) -> Policy:
        """Return the policy with the method's own parameters, for a model."""

    def sweep(
        self, params: Any, model: Decoder, held_out: Sequence[Int[np.ndarray, " _"]]
    ) -> Mapping[str, Policy]:
        """Return the policies that the report of a user's own model measures, by their arguments in a policy string.
        The deployed policy is first. Smaller and larger ones with the same parameters follow, which may be chosen on
        the held-out sequences. By default there is only the deployed policy, without arguments."""
        return {"": self.deploy(params, model)}

    @classmethod
    def policy(cls, *, gates: Any, model: Any, **options: Any) -> Policy:
        """Return the policy of an exported folder for `model`. `options` override the options in the folder.

        Raises:
            UserError: the folder holds no such parameters, or the recipe does not have an option.
        """
        import jax

        from kvjax.checkpoints.folder import describe, load_tree

        values: dict[str, Any] = describe(gates).get("options", {}) | options
        option_names = {field.name for field in dataclasses.fields(cls)} - {
            x.name for x in dataclasses.fields(Recipe)
        }
        if unknown := sorted(set(values) - option_names):
            raise UserError(
                f"{cls.__name__} has no option {unknown[0]!r}; it has {', '.join(sorted(option_names))}"
            )
        arguments: dict[str, Any] = {key: tuple(x) if isinstance(x, list) else x for key, x in values.items()}
        recipe = cls(**arguments)
        recipe.check()
        like = recipe.split(jax.eval_shape(recipe.init, model))[0]
        return recipe.deploy(load_tree(gates, like), model)


def option(field: str) -> str:
    """Return the command-line option of a field."""
    return "--" + field.rstrip("_").replace("_", "-")


def read_init(read: Callable[[str], T], init: str) -> T:
    """Call `read` on the gates that a run begins with. A UserError names the option --init."""
    try:
        return read(init)
    except UserError as error:
        raise UserError(f"--init {error}") from None
