"""The base class of Fast KVzip and KVzap, whose gates learn KVzip's scores: contexts, features and targets of a frozen
model."""

import abc
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import grain
import jax
from jaxtyping import Array, Float

from kvjax.checkpoints.fingerprint import MadeFor
from kvjax.errors import UserError, shown
from kvjax.mesh import AXES, gather
from kvjax.models import load_tokenizer
from kvjax.models.decoder import Decoder
from kvjax.policies import Policy
from kvjax.train.batches import Rows
from kvjax.train.contexts import Choice, Context, TokenRow, builtin_contexts, prefix, text_contexts
from kvjax.train.data import Data, Open, draw_step_lengths
from kvjax.train.features import FolderStore, HeldOut, MemoryStore, batches, check_positions
from kvjax.train.recipe import Recipe, Rule, Validation
from kvjax.train.reconstruction import reconstruction, repetition
from kvjax.train.targets import Teacher, collect, position_layout

TARGETS = "targets"
"""The folder of features and targets in the run's folder."""
RATIOS = 0.2, 0.3, 0.4, 0.5
"""The shares of entries that the rows of a report keep."""
Batch = Mapping[str, Float[Array, "b l ..."]]
"""The arrays of positions: `input` [b l d] or [b l k h], and `score` [b l k]."""


@dataclasses.dataclass(frozen=True)
class KVzipScores(Recipe):
    """The base class of recipes whose gates learn scores of the tokens of contexts."""

    instruction: str = "Given the context, answer to the following question or request without explanation."
    """The text before each context in the user's turn, followed by an empty line. Only for models with a chat template.
    Its tokens always stay in the cache."""
    sequences: int = 5_000_000
    """The total number of positions to train on, counting repetitions. The default makes 5,000 updates of 1,000."""
    batch: int = 1000
    """The number of positions of an update, the same ones for all layers, rounded up to a multiple of the mesh's
    data × fsdp (times --accumulate)."""
    lengths: tuple[int, ...] = (512,)
    """For the built-in tasks: the number of tokens of a context with its questions. For text see --shortest, --longest,
    --joined, --single and --joins."""
    shares: tuple[float, ...] = (1.0,)
    """For the built-in tasks: the relative number of contexts of each length."""
    contexts: int = 64
    """For the built-in tasks: the number of contexts."""
    shortest: int = 10_000
    """For text: the minimum number of tokens of a document, by the dataset's own count (`token_count`) if it has one.
    """
    longest: int = 30_000
    """For text: the exclusive upper limit of the tokens of a document."""
    joined: int = 100_000
    """For text: the minimum number of tokens of a context of joined documents. Documents are joined by empty lines."""
    single: int = 29
    """For text: the number of contexts that are one document each. They are the first documents of the data."""
    joins: int = 5
    """For text: the number of contexts of joined documents. They start again with the first document."""
    targets: str | None = None
    """The place of features and targets. `disk`: the folder targets/ of the run, from which a resumed run reads them. A
    folder (with a slash in its name): runs with the same model, contexts, --target and --inputs can share it. `memory`:
    the memory of this process, so a resumed run computes them again. By default memory for the built-in tasks, else
    disk."""
    ratio: float = 0.3
    """The share of entries that the report's policy keeps. The gates' training does not depend on it."""

    exports: ClassVar[str] = "gates"
    unit: ClassVar[str] = "positions"
    plus: ClassVar[bool] = False
    """True if the scores are KVzip+'s."""

    @property
    def learned(self) -> tuple[str, str]:
        """The name of the target, and the gates' input (one of `kvjax.policies.eviction.fast_kvzip.INPUTS`)."""
        return "KVzip+" if self.plus else "reconstruction", "hidden"

    def rules(self) -> Iterator[Rule]:
        yield from super().rules()
        for name, least in (("contexts", 1), ("shortest", 1), ("single", 0), ("joins", 0)):
            yield getattr(self, name) >= least, f"--{name}", f"at least {least}", getattr(self, name)
        yield self.longest > self.shortest, "--longest", f"above --shortest {self.shortest}", self.longest
        yield self.joined > self.shortest, "--joined", f"above --shortest {self.shortest}", self.joined
        yield self.single + self.joins > 0, "--single", "at least 1 where --joins is 0", self.single
        yield 0 < self.ratio <= 1, "--ratio", "above 0 and at most 1", self.ratio

    def check(self) -> None:
        super().check()
        targets = self.targets
        if targets not in (None, "disk", "memory") and (
            "/" not in targets or Path(targets).expanduser().is_file()
        ):
            raise UserError(f"--targets must be disk, memory or a folder (./NAME), got {shown(targets)}")

    @property
    def kept(self) -> Path | None:
        return None if self.targets in (None, "disk", "memory") else Path(self.targets).expanduser()

    @property
    def most_tokens(self) -> int:
        if self.data == "builtin":
            return super().most_tokens
        return self.longest + (self.joined if self.joins else 0)

    def row(self, model: Decoder, length: int) -> dict[str, jax.ShapeDtypeStruct]:
        layout = position_layout(model, self.learned[1])
        return {name: jax.ShapeDtypeStruct(shape, dtype) for name, (shape, dtype) in layout.arrays.items()}

    def collect(self) -> Open:
        contexts, held_out = self._contexts()
        check_positions(sum(len(context.tokens) for context in contexts), self.rows)
        return functools.partial(self._open, contexts, held_out)

    def _contexts(self) -> tuple[list[Context], list[TokenRow]]:
        """Return the contexts to train on, and held-out sequences for the report."""
        if self.data == "builtin":
            lengths, held_out_lengths = (
                draw_step_lengths(count, self.lengths, self.shares, self.seed).tolist()
                for count in (self.contexts, self.validation)
            )
            return builtin_contexts(lengths, held_out_lengths, self.seed)
        choice = Choice(self.shortest, self.longest, self.joined, self.single, self.joins)
        encoding = {"tokenizer": load_tokenizer(self.model), "instruction": self.instruction}
        return text_contexts(self.data, choice, self.validation, seed=self.seed, **encoding)

    def _open(
        self,
        contexts: Sequence[Context],
        held_out: Sequence[TokenRow],
        model: Decoder,
        rows: Rows,
        folder: Path,
        say: Callable[[str], None],
    ) -> Data:
        """Compute the missing features and targets, and open them."""
        target, inputs = self.learned
        layout, sizes = position_layout(model, inputs), [len(context.tokens) for context in contexts]
        place = self.targets or ("memory" if self.data == "builtin" else "disk")
        store = MemoryStore(layout, sizes)
        if place != "memory":
            store = FolderStore(self.kept or folder / TARGETS, layout, sizes, self._manifest(contexts, model))
        missing = len(contexts) - len(store.finished)
        say(
            f"targets ({target}) of {len(contexts)} contexts, {sum(sizes):,} positions: {store.plan}, "
            + (f"{missing} contexts to compute" if missing else "all are there")
        )
        collect(model, contexts, store, self._teacher(contexts), inputs, self.share)
        if self.shard:
            return Data(iter(grain.MapDataset.range(0).to_iter_dataset()), list(held_out))
        features = store.read()
        return Data(
            batches(features, rows, self.steps, self.seed), list(held_out), held_rows=HeldOut(features)
        )

    def _teacher(self, contexts: Sequence[Context]) -> Teacher:
        """Return the function that computes the scores of contexts."""
        policy = repetition(load_tokenizer(self.model), len(contexts[0].prefix), plus=self.plus)
        return functools.partial(reconstruction, policy=policy)

    def _manifest(self, contexts: Sequence[Context], model: Decoder) -> dict[str, Any]:
        """Return the values that features and targets depend on."""
        target, inputs = self.learned
        return {
            "data": self.data,
            "target": target,
            "inputs": inputs,
            "contexts": [context.digest for context in contexts],
            **MadeFor.of(model, self.model).description,
        }

    @abc.abstractmethod
    def save(self, folder: Path, gates: Any, description: dict[str, Any], validation: Validation) -> None:
        """Write the gathered gates and their description to a folder. Called in the first process."""

    def export(self, folder: Path, params: Any, model: Decoder, validation: Validation) -> None:
        """Write `gates.safetensors` and `config.json`, which the method's policy reads."""
        numbers = validation.numbers | {"positions": validation.sequences}
        origin = {"model": self.model, "data": self.data, "validation": numbers}
        trained = {
            "sequences": self.sequences,
            "batch": self.rows,
            "seed": self.seed,
            "lengths": list(self.lengths),
        }
        gathered = gather(params, *AXES)
        if jax.process_index() == 0:
            self.save(folder, gathered, self.own_options() | origin | trained, validation)

    def use_options(self, folder: Path) -> Sequence[str]:
        return "--policy", f"{self.used_as}:ratio={self.ratio:g}", "--gates", str(folder)

    def sweep(self, params: Any, model: Decoder, held_out: Sequence[TokenRow]) -> Mapping[str, Policy]:
        ratios = dict.fromkeys((self.ratio, *RATIOS))
        return {f"ratio={x:g}": dataclasses.replace(self, ratio=x).deploy(params, model) for x in ratios}

    def opening(self) -> list[int]:
        """Return the token ids before every context. If a prompt begins with them, they stay in its cache."""
        return prefix(load_tokenizer(self.model), self.instruction).tolist()
