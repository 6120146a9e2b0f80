"""Fast KVzip: gates that predict, from a token's hidden state, the attention that a context's reconstruction would pay
to it. They are trained on features of a frozen model (arXiv:2601.17668, Sec. 3)."""

import dataclasses
import functools
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import grain
import jax
import optax
import tyro
from flax import nnx
from jaxtyping import Array, Float

from kvjax.checkpoints.fingerprint import MadeFor
from kvjax.errors import UserError, shown
from kvjax.mesh import AXES, gather
from kvjax.models import load_tokenizer
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Decoder
from kvjax.policies import Policy, make_policy
from kvjax.policies.eviction.fast_kvzip import SinkGate, load_gates, save_gates
from kvjax.policies.eviction.fast_kvzip.files import Sizes, gate_sizes
from kvjax.train.batches import Rows
from kvjax.train.contexts import Choice, Context, TokenRow, builtin_contexts, prefix, text_contexts
from kvjax.train.data import Data, Open, draw_step_lengths
from kvjax.train.features import HeldOut, Memory, Shards, batches, check_positions
from kvjax.train.gate_pictures import draw_losses, draw_predictions
from kvjax.train.recipe import Recipe, Rule, Validation, read_init
from kvjax.train.reconstruction import reconstruction, repetition
from kvjax.train.score_loss import (
    IMPORTANT,
    LAYER,
    agreement,
    by_head,
    by_layer,
    cross_entropy,
    entropy,
    rate,
    scores,
)
from kvjax.train.targets import Teacher, answer, collect, kind_of, larger, next_token

TARGETS = "targets"
"""The folder of features and targets in the run's folder."""
ASKED = "answer", "both"
"""Targets that need questions."""
RATIOS = 0.2, 0.3, 0.4, 0.5
"""The shares of entries that the rows of a report keep."""
Batch = Mapping[str, Float[Array, "b l ..."]]
"""The arrays of positions: `input` [b l d] or [b l k h], and `score` [b l k]."""


@dataclasses.dataclass(frozen=True)
class KVzipGates(Recipe):
    """Train Fast KVzip's gates for a frozen model.

    Forward passes of the model over some contexts first compute features and targets (--targets). Then gates learn the
    targets from the features. The rows of an update are positions instead of sequences: --batch and --sequences count
    positions.
    """

    method: str = "fast_kvzip"
    """The method to train."""
    instruction: str = "Given the context, answer to the following question or request without explanation."
    """The text before each context in the user's turn, followed by an empty line. Only for models with a chat template.
    It always stays in the cache."""
    sequences: int = 5_000_000
    """The total number of positions to train on. Repetitions count: the default makes 5,000 updates of 1,000."""
    batch: int = 1000
    """The number of positions of an update, the same ones for all layers, rounded up to a multiple of the mesh's
    data × fsdp (times --accumulate)."""
    lengths: tuple[int, ...] = (512,)
    """The number of tokens of a context with its questions, for the built-in tasks. For text see --shortest to
    --joins."""
    shares: tuple[float, ...] = (1.0,)
    """The relative number of contexts of each length, for the built-in tasks."""
    contexts: int = 64
    """The number of contexts, for the built-in tasks."""
    shortest: int = 10_000
    """The minimum number of tokens of a document, for text, by the data set's own count (`token_count`) if it has
    one."""
    longest: int = 30_000
    """The upper limit of the tokens of a document, for text. Documents are shorter than this."""
    joined: int = 100_000
    """The minimum number of tokens of a context of joined documents, for text. Documents are joined by empty lines."""
    single: int = 29
    """The number of contexts that are one document, for text: the first documents of the data."""
    joins: int = 5
    """The number of contexts of joined documents, for text. They begin again with the first document."""
    target: Literal["reconstruction", "next_token", "answer", "both"] = "reconstruction"
    """The score that gates learn, the most attention that a key gets. reconstruction: from a repetition of the context
    (KVzip's score). For comparison: next_token: from any later query of the context; answer: from questions about it
    with their answers (built-in tasks only); both: the larger one of reconstruction and answer. If --data names text
    and there is no --target, it is reconstruction."""
    targets: str | None = None
    """The place of features and targets. `disk`: the folder targets/ of the run, so that a resumed run computes no
    context again. A folder (with a slash in its name): runs with the same model, contexts, --target and --inputs can
    share it. `memory`: the memory of this process, so that a resumed run computes them again. By default memory for the
    built-in tasks, else disk."""
    inputs: Literal["hidden", "k", "k_pre"] = "hidden"
    """The input of a gate. hidden: the layer's input after its norm. For comparison k: the token's key after RoPE;
    k_pre: before RoPE. With --init the defaults of --inputs, --form, --dim and --sinks are those of its gates."""
    form: Literal["sink", "paper", "sigmoid", "linear", "mlp"] = "sink"
    """The form of the gates: as published, or others for comparison (`kvjax.policies.eviction.fast_kvzip.FORMS`)."""
    dim: int = 16
    """The width of a gate's queries and keys."""
    sinks: int = 16
    """The number of keys that a gate learns in addition to the token's own."""
    lr: float = 0.2
    """The peak learning rate of SGD. Update i of the first 1% has i hundredths of it. It is halved after half of the
    updates, and again after three quarters."""
    momentum: float = 0.9
    """The momentum of SGD."""
    init_: Annotated[str | None, tyro.conf.arg(name="init")] = None
    """The gates to begin with instead of random ones: a folder that a run exported, or a .pt file of the authors."""
    ratio: float = 0.3
    """The share of entries that the report's policy keeps. Gates are not trained for a certain share."""

    exports: ClassVar[str] = "gates"
    unit: ClassVar[str] = "positions"
    builtin: ClassVar[str | None] = "fast_kvzip-builtin"
    shown: ClassVar[Mapping[str, str]] = {"loss": ".4f", "agreement": ".3f"}

    def rules(self) -> Iterator[Rule]:
        yield from super().rules()
        for name, least in (
            ("contexts", 1),
            ("shortest", 1),
            ("single", 0),
            ("joins", 0),
            ("dim", 1),
            ("sinks", 1),
        ):
            yield getattr(self, name) >= least, f"--{name}", f"at least {least}", getattr(self, name)
        yield self.longest > self.shortest, "--longest", f"above --shortest {self.shortest}", self.longest
        yield self.joined > self.shortest, "--joined", f"above --shortest {self.shortest}", self.joined
        yield self.single + self.joins > 0, "--single", "at least 1 where --joins is 0", self.single
        yield self.lr > 0, "--lr", "above 0", self.lr
        yield 0 <= self.momentum < 1, "--momentum", "at least 0 and below 1", self.momentum
        yield 0 < self.ratio <= 1, "--ratio", "above 0 and at most 1", self.ratio

    def fitted(self, told: Container[str]) -> Recipe:
        found: dict[str, Any] = {}
        if "data" in told and self.data != "builtin" and self.target in ASKED:
            found["target"] = "reconstruction"  # text has no questions
        if "init_" in told and self.init_ is not None:
            sizes = read_init(gate_sizes, self.init_)._asdict()
            found |= {name: sizes[name] for name in ("dim", "sinks", "form", "inputs")}
        untold = {name: value for name, value in found.items() if name not in told}
        return dataclasses.replace(super().fitted(told), **untold)

    def check(self) -> None:
        super().check()
        where = self.targets
        if where not in (None, "disk", "memory") and ("/" not in where or Path(where).expanduser().is_file()):
            raise UserError(f"--targets must be disk, memory or a folder (./NAME), got {shown(where)}")
        if self.target in ASKED and self.data != "builtin":
            raise UserError(
                f"--target {self.target}: --data {self.data} has no questions, which the built-in tasks have (--data "
                "builtin)"
            )

    @property
    def kept(self) -> Path | None:
        return None if self.targets in (None, "disk", "memory") else Path(self.targets).expanduser()

    @property
    def most_tokens(self) -> int:
        if self.data == "builtin":
            return super().most_tokens
        return self.longest + (self.joined if self.joins else 0)

    def _sizes(self, model: ModelConfig) -> Sizes:
        group = model.num_heads // model.num_kv_heads
        width = model.width if self.inputs == "hidden" else model.head_dim
        own = model.num_full_layers, model.num_kv_heads, group, width
        return Sizes(*own, self.dim, self.sinks, self.form, self.inputs)

    def check_model(self, model: ModelConfig) -> None:
        if self.init_ is None or self.resume:
            return
        wanted, found = self._sizes(model), read_init(gate_sizes, self.init_)
        for name, own, theirs in zip(Sizes._fields, wanted, found, strict=True):
            if own != theirs:
                raise UserError(f"--init {self.init_}: these gates have {name} {theirs}, the run's {own}")

    def init(self, model: Decoder) -> SinkGate:
        *sizes, dim, sinks, form, _ = self._sizes(model.config)
        return SinkGate(*sizes, dim=dim, sinks=sinks, form=form, rngs=nnx.Rngs(self.seed))

    def begin(self, params: SinkGate) -> SinkGate:
        return params if self.init_ is None else read_init(load_gates, self.init_)[0]

    def row(self, model: Decoder, length: int) -> dict[str, jax.ShapeDtypeStruct]:
        kind = kind_of(model, self.inputs)
        return {name: jax.ShapeDtypeStruct(shape, dtype) for name, (shape, dtype) in kind.arrays.items()}

    def collect(self) -> Open:
        contexts, held_out = self._contexts()
        check_positions(sum(len(context.tokens) for context in contexts), self.rows)
        return functools.partial(self._open, contexts, held_out)

    def _contexts(self) -> tuple[list[Context], list[TokenRow]]:
        """Return the contexts to train on, and held-out sequences for the report."""
        if self.data == "builtin":
            own, others = (
                draw_step_lengths(count, self.lengths, self.shares, self.seed).tolist()
                for count in (self.contexts, self.validation)
            )
            return builtin_contexts(own, others, self.seed)
        choice = Choice(self.shortest, self.longest, self.joined, self.single, self.joins)
        words = {"tokenizer": load_tokenizer(self.model), "instruction": self.instruction}
        return text_contexts(self.data, choice, self.validation, seed=self.seed, **words)

    def _open(
        self,
        contexts: Sequence[Context],
        held_out: Sequence[TokenRow],
        model: Decoder,
        rows: Rows,
        folder: Path,
        say: Callable[[str], None],
    ) -> Data:
        """Compute the missing features and targets, and begin to read them."""
        kind, sizes = kind_of(model, self.inputs), [len(context.tokens) for context in contexts]
        where = self.targets or ("memory" if self.data == "builtin" else "disk")
        store = Memory(kind, sizes)
        if where != "memory":
            store = Shards(self.kept or folder / TARGETS, kind, sizes, self._manifest(contexts, model))
        missing = len(contexts) - len(store.finished)
        say(
            f"targets ({self.target}) of {len(contexts)} contexts, {sum(sizes):,} positions: {store.plan}, "
            + (f"{missing} contexts to compute" if missing else "all are there")
        )
        collect(model, contexts, store, self._teacher(contexts), self.inputs, self.share)
        if self.shard:
            return Data(iter(grain.MapDataset.range(0).to_iter_dataset()), list(held_out))
        features = store.read()
        return Data(
            batches(features, rows, self.steps, self.seed), list(held_out), held_rows=HeldOut(features)
        )

    def _teacher(self, contexts: Sequence[Context]) -> Teacher:
        if self.target in ("next_token", "answer"):
            return {"next_token": next_token, "answer": answer}[self.target]
        policy = repetition(load_tokenizer(self.model), len(contexts[0].prefix))
        published = functools.partial(reconstruction, policy=policy)
        return published if self.target == "reconstruction" else larger(published, answer)

    def _manifest(self, contexts: Sequence[Context], model: Decoder) -> dict[str, Any]:
        """Return the values that features and targets depend on."""
        return {
            "data": self.data,
            "target": self.target,
            "inputs": self.inputs,
            "contexts": [context.digest for context in contexts],
            **MadeFor.of(model, self.model).description,
        }

    def loss(
        self, params: SinkGate, frozen: Any, batch: Batch, key: jax.Array, step: Any
    ) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
        """Return the binary cross-entropy with soft targets, averaged over positions and summed over heads and layers.
        The scalars are the share of predictions that agree with their target at .05, and each layer's loss."""
        predicted, target = scores(params, batch["input"]), by_head(batch["score"])
        layers = cross_entropy(predicted, target).mean(-1).sum(-1)
        return layers.sum(), {"agreement": agreement(predicted, target).mean()} | by_layer(layers)

    def optimizer(self) -> optax.GradientTransformation:
        return optax.sgd(functools.partial(rate, peak=self.lr, steps=self.steps), momentum=self.momentum)

    def measure(self, params: SinkGate, frozen: Any, batch: Batch) -> dict[str, Float[Array, "b ..."]]:
        """Return the loss and its scalars for each position, and its `predicted` and `target` scores by layer and kv
        head."""
        predicted, target = scores(params, batch["input"]), by_head(batch["score"])
        layers = cross_entropy(predicted, target).sum(1)
        means = {"loss": layers.sum(0), "agreement": agreement(predicted, target).mean((0, 1))}
        return (
            means | by_layer(layers) | {"predicted": predicted.transpose(2, 0, 1), "target": batch["score"]}
        )

    def remark(self, validation: Validation) -> str:
        return f"the targets' own entropy is {entropy(validation.by_sequence['target']):.4g}, below which no loss is"

    def export(self, folder: Path, params: SinkGate, model: Decoder, validation: Validation) -> None:
        """Write `gates.safetensors` and `config.json`, which `kvjax.make_policy("fast_kvzip", gates=folder)` reads."""
        numbers = validation.numbers | {"positions": validation.sequences}
        origin = {"model": self.model, "data": self.data, "validation": numbers}
        trained = {
            "sequences": self.sequences,
            "batch": self.rows,
            "seed": self.seed,
            "lengths": list(self.lengths),
        }
        whole = gather(params, *AXES)
        if jax.process_index() == 0:
            save_gates(folder, whole, self.own_options() | origin | trained | {"opening": self._opening()})

    def draw(self, folder: Path, validation: Validation) -> None:
        found = validation.by_sequence
        draw_predictions(folder / "predictions.png", found["predicted"], found["target"], IMPORTANT)
        draw_losses(folder / "losses.png", folder / "metrics.jsonl", LAYER)

    def use_options(self, folder: Path) -> Sequence[str]:
        return "--policy", f"{self.used_as}:ratio={self.ratio:g}", "--gates", str(folder)

    def _opening(self) -> list[int]:
        """Return the token ids before every context. They stay in the cache of every prompt that begins with them."""
        return prefix(load_tokenizer(self.model), self.instruction).tolist()

    def deploy(self, params: SinkGate, model: Decoder) -> Policy:
        told = {"ratio": self.ratio, "inputs": self.inputs, "opening": self._opening()}
        return make_policy({"fast_kvzip": told}, model=model, gates=params)

    def sweep(self, params: SinkGate, model: Decoder, held_out: Sequence[TokenRow]) -> Mapping[str, Policy]:
        ratios = dict.fromkeys((self.ratio, *RATIOS))
        return {f"ratio={x:g}": dataclasses.replace(self, ratio=x).deploy(params, model) for x in ratios}

    @classmethod
    def policy(cls, *, gates: Any, model: Any = None, force: bool = False, **options: Any) -> Policy:
        return make_policy({"fast_kvzip": options}, model=model, gates=gates, force=force)
