"""KVzap: a small network per layer, which predicts the logarithms of KVzip+'s scores from hidden states
(arXiv:2601.07891; kvzap/train.py of NVIDIA/kvpress)."""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from kvjax.models.decoder import Decoder
from kvjax.policies import Policy, make_policy
from kvjax.policies.admission.kvzap import Surrogate, save_gates
from kvjax.policies.admission.kvzap.files import Sizes
from kvjax.train.gate_pictures import draw_losses
from kvjax.train.recipe import Rule, Validation
from kvjax.train.recipes.kvzip_scores import Batch, KVzipScores
from kvjax.train.score_loss import LAYER, by_head, by_layer, scores

MIN_LOGARITHM = -20.0
"""The lower limit of the logarithms. Lower ones come from attention that is 0 in 16 bits, and would dominate the
squared error."""


@dataclasses.dataclass(frozen=True)
class Surrogates(KVzipScores):
    """Train KVzap's surrogates for a frozen model.

    First, forward passes of the model over some contexts compute hidden states and KVzip+'s scores (--targets). Then
    one network per layer learns the logarithms of the scores by squared error. The rows of an update are positions
    instead of sequences: --batch and --sequences count positions.
    """

    method: str = "kvzap"
    """The method to train."""
    instruction: str = ""
    """The text before each context in the user's turn, followed by an empty line; empty: none."""
    sequences: int = 33_750_000
    """The total number of positions to train on, counting repetitions. The default is 15 epochs of the authors' data.
    """
    batch: int = 512
    """The number of positions of an update, the same ones for all layers, rounded up to a multiple of the mesh's
    data × fsdp (times --accumulate)."""
    shortest: int = 750
    """For text: the minimum number of tokens of a document, by the dataset's own count (`token_count`) if it has one.
    """
    longest: int = 1250
    """For text: the exclusive upper limit of the tokens of a document. Attention to a token is less in a longer
    document, so the authors use documents of similar length."""
    single: int = 4500
    """For text: the number of contexts that are one document each. They are the first documents of the data."""
    joins: int = 0
    """For text: the number of contexts of joined documents. They start again with the first document."""
    hidden: int = 512
    """The number of hidden units of a layer's network; 0: the network is linear (the authors fit this form by ridge
    regression)."""
    lr: float = 5e-3
    """The peak learning rate of AdamW, which falls to 0 by a cosine."""

    builtin: ClassVar[str | None] = None
    plus: ClassVar[bool] = True
    shown: ClassVar[Mapping[str, str]] = {"loss": ".4f"}

    @property
    def used_as(self) -> str:
        return "kvzap_eviction"

    def rules(self) -> Iterator[Rule]:
        yield from super().rules()
        yield self.hidden >= 0, "--hidden", "at least 0", self.hidden
        yield self.lr > 0, "--lr", "above 0", self.lr

    def init(self, model: Decoder) -> Surrogate:
        config = model.config
        return Sizes(config.num_full_layers, config.num_kv_heads, config.width, self.hidden).make(self.seed)

    def loss(
        self, params: Surrogate, frozen: Any, batch: Batch, key: jax.Array, step: Any
    ) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
        """Return the mean squared error of the logarithms over positions, heads and layers, and the error of each
        layer."""
        layers = _errors(params, batch).mean((1, 2))
        return layers.mean(), by_layer(layers)

    def optimizer(self) -> optax.GradientTransformation:
        schedule = optax.cosine_decay_schedule(self.lr, self.steps)
        return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.01))

    def measure(self, params: Surrogate, frozen: Any, batch: Batch) -> dict[str, Float[Array, "b ..."]]:
        """Return the loss of each position, in all and by layer, and the `predicted` and `target` logarithms by layer
        and kv head."""
        layers = _errors(params, batch).mean(1)
        predicted = scores(params, batch["input"]).transpose(2, 0, 1)
        logarithms = {"predicted": predicted, "target": _logarithm(batch["score"])}
        return {"loss": layers.mean(0)} | by_layer(layers) | logarithms

    def remark(self, validation: Validation) -> str:
        correlation = _correlation(*(validation.by_sequence[name] for name in ("predicted", "target")))
        return f"squared correlation with the targets, mean over heads: {correlation:.3f}"

    def save(
        self, folder: Path, gates: Surrogate, description: dict[str, Any], validation: Validation
    ) -> None:
        """Write gates with the threshold that keeps --ratio of the held-out positions."""
        predicted = validation.by_sequence["predicted"]
        threshold = float(np.quantile(predicted, 1 - self.ratio))
        rate = (predicted >= threshold).mean(0).tolist()
        save_gates(folder, gates, description | {"threshold": threshold, "rate": rate})

    def draw(self, folder: Path, validation: Validation) -> None:
        draw_losses(folder / "losses.png", folder / "metrics.jsonl", LAYER)

    def deploy(self, params: Surrogate, model: Decoder) -> Policy:
        return make_policy({self.used_as: {"ratio": self.ratio}}, model=model, gates=params)


def _logarithm(score: Float[Array, "..."]) -> Float[Array, "..."]:
    return jnp.maximum(jnp.log(score), MIN_LOGARITHM)


def _errors(params: Surrogate, batch: Batch) -> Float[Array, "l k b"]:
    """Return the squared errors of the predicted logarithms."""
    return jnp.square(scores(params, batch["input"]) - by_head(_logarithm(batch["score"])))


def _correlation(predicted: Float[np.ndarray, "n l k"], target: Float[np.ndarray, "n l k"]) -> float:
    """Return the mean over heads of the squared Pearson correlation."""
    x, y = (z.astype(np.float64) - z.mean(0, np.float64) for z in (predicted, target))
    spread = np.maximum((x * x).sum(0) * (y * y).sum(0), np.finfo(np.float64).tiny)
    return float(((x * y).sum(0) ** 2 / spread).mean())
