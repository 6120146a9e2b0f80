"""KVzap: a small network per layer predicts the logarithm of KVzip+'s scores from hidden states (arXiv:2601.07891;
kvzap/train.py of NVIDIA/kvpress)."""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float

from kvjax.models.decoder import Decoder
from kvjax.policies import Policy, make_policy
from kvjax.policies.admission.kvzap import Surrogate, save_gates
from kvjax.train.gate_pictures import draw_losses
from kvjax.train.recipe import Rule, Validation
from kvjax.train.recipes.kvzip_scores import Batch, KVzipScores
from kvjax.train.score_loss import LAYER, by_head, by_layer, scores

LEAST = -20.0
"""The least logarithm of a score that is learned. Lower ones come from attention that no 16-bit number tells from 0,
and would dominate a squared error."""


@dataclasses.dataclass(frozen=True)
class Surrogates(KVzipScores):
    """Train KVzap's surrogates for a frozen model.

    Forward passes of the model over some contexts first compute hidden states and KVzip+'s scores (--targets). Then one
    network per layer learns the logarithms of the scores by their squared error. The rows of an update are positions
    instead of sequences: --batch and --sequences count positions.
    """

    method: str = "kvzap"
    """The method to train."""
    instruction: str = ""
    """The text before each context in the user's turn, followed by an empty line; empty: none."""
    sequences: int = 33_750_000
    """The total number of positions to train on. Repetitions count: the default is 15 epochs of the authors' data."""
    batch: int = 512
    """The number of positions of an update, the same ones for all layers, rounded up to a multiple of the mesh's
    data × fsdp (times --accumulate)."""
    shortest: int = 750
    """The minimum number of tokens of a document, for text, by the data set's own count (`token_count`) if it has
    one."""
    longest: int = 1250
    """The upper limit of the tokens of a document, for text. Documents are shorter than this. Attention to one of many
    tokens is less, so that the authors use documents of about one length."""
    single: int = 4500
    """The number of contexts that are one document, for text: the first documents of the data."""
    joins: int = 0
    """The number of contexts of joined documents, for text. They begin again with the first document."""
    hidden: int = 512
    """The number of hidden units of a layer's network; 0: it is linear (the authors fit that form by ridge
    regression)."""
    lr: float = 5e-3
    """The peak learning rate of AdamW, from which a cosine falls to 0."""

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
        sizes = config.num_full_layers, config.num_kv_heads, config.width, self.hidden
        return Surrogate(*sizes, rngs=nnx.Rngs(self.seed))

    def loss(
        self, params: Surrogate, frozen: Any, batch: Batch, key: jax.Array, step: Any
    ) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
        """Return the mean squared error of the logarithms over positions, heads and layers, and each layer's."""
        layers = _errors(params, batch).mean((1, 2))
        return layers.mean(), by_layer(layers)

    def optimizer(self) -> optax.GradientTransformation:
        schedule = optax.cosine_decay_schedule(self.lr, self.steps)
        return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.01))

    def measure(self, params: Surrogate, frozen: Any, batch: Batch) -> dict[str, Float[Array, "b ..."]]:
        """Return the loss of each position, by layer, too, and its `predicted` and `target` logarithms by layer and kv
        head."""
        layers = _errors(params, batch).mean(1)
        predicted = scores(params, batch["input"]).transpose(2, 0, 1)
        found = {"predicted": predicted, "target": _logarithm(batch["score"])}
        return {"loss": layers.mean(0)} | by_layer(layers) | found

    def remark(self, validation: Validation) -> str:
        found = _correlation(*(validation.by_sequence[name] for name in ("predicted", "target")))
        return f"squared correlation with the targets, mean over heads: {found:.3f}"

    def save(
        self, folder: Path, gates: Surrogate, description: dict[str, Any], validation: Validation
    ) -> None:
        """The threshold is the one that keeps --ratio of the held-out positions."""
        predicted = validation.by_sequence["predicted"]
        threshold = float(np.quantile(predicted, 1 - self.ratio))
        rate = (predicted >= threshold).mean(0).tolist()
        save_gates(folder, gates, description | {"threshold": threshold, "rate": rate})

    def draw(self, folder: Path, validation: Validation) -> None:
        draw_losses(folder / "losses.png", folder / "metrics.jsonl", LAYER)

    def deploy(self, params: Surrogate, model: Decoder) -> Policy:
        return make_policy({self.used_as: {"ratio": self.ratio}}, model=model, gates=params)

    @classmethod
    def policy(cls, *, gates: Any, model: Any = None, force: bool = False, **options: Any) -> Policy:
        return make_policy({"kvzap": options}, model=model, gates=gates, force=force)


def _logarithm(score: Float[Array, "..."]) -> Float[Array, "..."]:
    return jnp.maximum(jnp.log(score), LEAST)


def _errors(params: Surrogate, batch: Batch) -> Float[Array, "l k b"]:
    """Return the squared errors of the predicted logarithms."""
    return jnp.square(scores(params, batch["input"]) - by_head(_logarithm(batch["score"])))


def _correlation(predicted: Float[np.ndarray, "n l k"], target: Float[np.ndarray, "n l k"]) -> float:
    """Return the mean over heads of the squared Pearson correlation."""
    x, y = (z.astype(np.float64) - z.mean(0, np.float64) for z in (predicted, target))
    spread = np.maximum((x * x).sum(0) * (y * y).sum(0), np.finfo(np.float64).tiny)
    return float(((x * y).sum(0) ** 2 / spread).mean())
