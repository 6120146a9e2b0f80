"""Fast KVzip: gates that predict, from a token's hidden state, the attention that the token would get while the context
is reconstructed. They are trained on features of a frozen model (arXiv:2601.17668, Sec. 3)."""

import dataclasses
import functools
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import jax
import optax
import tyro
from jaxtyping import Array, Float

from kvjax.errors import UserError
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Decoder
from kvjax.policies import Policy, make_policy
from kvjax.policies.eviction.fast_kvzip import SinkGate, load_gates, save_gates
from kvjax.policies.eviction.fast_kvzip.files import Sizes, gate_sizes
from kvjax.train.contexts import Context
from kvjax.train.gate_pictures import draw_losses, draw_predictions
from kvjax.train.recipe import Recipe, Rule, Validation, read_init
from kvjax.train.recipes.kvzip_scores import Batch, KVzipScores
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
from kvjax.train.targets import Teacher, answer, larger, next_token

NEED_QUESTIONS = "answer", "both"
"""Targets that need questions."""


@dataclasses.dataclass(frozen=True)
class KVzipGates(KVzipScores):
    """Train Fast KVzip's gates for a frozen model.

    First, forward passes of the model over some contexts compute features and targets (--targets). Then gates learn the
    targets from the features. The rows of an update are positions instead of sequences: --batch and --sequences count
    positions.
    """

    method: str = "fast_kvzip"
    """The method to train."""
    target: Literal["reconstruction", "next_token", "answer", "both"] = "reconstruction"
    """The score that gates learn: the maximum attention that a key gets. reconstruction: while the context is repeated
    (KVzip's score). For comparison: next_token: from later queries of the context; answer: from questions about the
    context with their answers (built-in tasks only); both: the larger of reconstruction and answer. If --data names
    text, the default is reconstruction."""
    inputs: Literal["hidden", "k", "k_pre"] = "hidden"
    """The input of a gate. hidden: the layer's input after its norm. For comparison: k: the token's key after RoPE;
    k_pre: the key before RoPE. With --init the defaults of --inputs, --form, --dim and --sinks are those of its
    gates."""
    form: Literal["sink", "paper", "sigmoid", "linear", "mlp"] = "sink"
    """The form of the gates: as published, or others for comparison (`kvjax.policies.eviction.fast_kvzip.FORMS`)."""
    dim: int = 16
    """The width of a gate's queries and keys."""
    sinks: int = 16
    """The number of keys that a gate learns in addition to the token's own."""
    lr: float = 0.2
    """The peak learning rate of SGD. In the first 1% of the updates, update i has i/100 of it. It is halved after half
    of the updates, and again after three quarters."""
    momentum: float = 0.9
    """The momentum of SGD."""
    init_: Annotated[str | None, tyro.conf.arg(name="init")] = None
    """The gates to begin with instead of random ones: a folder that a run exported, or a .pt file of the authors."""

    builtin: ClassVar[str | None] = "fast_kvzip-builtin"
    shown: ClassVar[Mapping[str, str]] = {"loss": ".4f", "agreement": ".3f"}

    @property
    def learned(self) -> tuple[str, str]:
        return self.target, self.inputs

    def rules(self) -> Iterator[Rule]:
        yield from super().rules()
        for name in ("dim", "sinks"):
            yield getattr(self, name) >= 1, f"--{name}", "at least 1", getattr(self, name)
        yield self.lr > 0, "--lr", "above 0", self.lr
        yield 0 <= self.momentum < 1, "--momentum", "at least 0 and below 1", self.momentum

    def with_derived_defaults(self, given: Container[str]) -> Recipe:
        defaults: dict[str, Any] = {}
        if "data" in given and self.data != "builtin" and self.target in NEED_QUESTIONS:
            defaults["target"] = "reconstruction"  # text has no questions
        if "init_" in given and self.init_ is not None:
            sizes = read_init(gate_sizes, self.init_)._asdict()
            defaults |= {name: sizes[name] for name in ("dim", "sinks", "form", "inputs")}
        missing = {name: value for name, value in defaults.items() if name not in given}
        return dataclasses.replace(super().with_derived_defaults(given), **missing)

    def check(self) -> None:
        super().check()
        if self.target in NEED_QUESTIONS and self.data != "builtin":
            raise UserError(
                f"--target {self.target}: --data {self.data} has no questions; only the built-in tasks have them "
                "(--data builtin)"
            )

    def _sizes(self, model: ModelConfig) -> Sizes:
        group = model.num_heads // model.num_kv_heads
        width = model.width if self.inputs == "hidden" else model.head_dim
        shape = model.num_full_layers, model.num_kv_heads, group, width
        return Sizes(*shape, self.dim, self.sinks, self.form, self.inputs)

    def check_model(self, model: ModelConfig) -> None:
        if self.init_ is None or self.resume:
            return
        expected, sizes = self._sizes(model), read_init(gate_sizes, self.init_)
        for name, value, init_value in zip(Sizes._fields, expected, sizes, strict=True):
            if value != init_value:
                raise UserError(
                    f"--init {self.init_}: these gates have {name} {init_value}, the run's {value}"
                )

    def init(self, model: Decoder) -> SinkGate:
        return self._sizes(model.config).make(self.seed)

    def begin(self, params: SinkGate) -> SinkGate:
        return params if self.init_ is None else read_init(load_gates, self.init_)[0]

    def _teacher(self, contexts: Sequence[Context]) -> Teacher:
        if self.target in ("next_token", "answer"):
            return {"next_token": next_token, "answer": answer}[self.target]
        reconstruction_teacher = super()._teacher(contexts)
        return (
            reconstruction_teacher
            if self.target == "reconstruction"
            else larger(reconstruction_teacher, answer)
        )

    def loss(
        self, params: SinkGate, frozen: Any, batch: Batch, key: jax.Array, step: Any
    ) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
        """Return the binary cross-entropy with soft targets, averaged over positions and summed over heads and layers.
        The scalars are the share of predictions that agree with their targets at .05, and each layer's loss."""
        predicted, target = scores(params, batch["input"]), by_head(batch["score"])
        layers = cross_entropy(predicted, target).mean(-1).sum(-1)
        return layers.sum(), {"agreement": agreement(predicted, target).mean()} | by_layer(layers)

    def optimizer(self) -> optax.GradientTransformation:
        return optax.sgd(functools.partial(rate, peak=self.lr, steps=self.steps), momentum=self.momentum)

    def measure(self, params: SinkGate, frozen: Any, batch: Batch) -> dict[str, Float[Array, "b ..."]]:
        """Return the loss and its scalars for each position, and the `predicted` and `target` scores by layer and kv
        head."""
        predicted, target = scores(params, batch["input"]), by_head(batch["score"])
        layers = cross_entropy(predicted, target).sum(1)
        means = {"loss": layers.sum(0), "agreement": agreement(predicted, target).mean((0, 1))}
        return (
            means | by_layer(layers) | {"predicted": predicted.transpose(2, 0, 1), "target": batch["score"]}
        )

    def remark(self, validation: Validation) -> str:
        minimum = entropy(validation.by_sequence["target"])
        return f"the targets' entropy, the minimum of the loss, is {minimum:.4g}"

    def save(
        self, folder: Path, gates: SinkGate, description: dict[str, Any], validation: Validation
    ) -> None:
        save_gates(folder, gates, description | {"opening": self.opening()})

    def draw(self, folder: Path, validation: Validation) -> None:
        figures = validation.by_sequence
        draw_predictions(folder / "predictions.png", figures["predicted"], figures["target"], IMPORTANT)
        draw_losses(folder / "losses.png", folder / "metrics.jsonl", LAYER)

    def deploy(self, params: SinkGate, model: Decoder) -> Policy:
        arguments = {"ratio": self.ratio, "inputs": self.inputs, "opening": self.opening()}
        return make_policy({"fast_kvzip": arguments}, model=model, gates=params)
