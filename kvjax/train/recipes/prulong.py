"""PruLong: the kv heads that need the whole context. They are learned from next tokens of natural documents, under a
constraint on the share of streaming heads (arXiv:2506.17121, Sec. 4, App. B)."""

import dataclasses
import math
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from kvjax.models.decoder import Decoder
from kvjax.train import hard_concrete
from kvjax.train.objective import next_token_losses
from kvjax.train.recipe import Rule
from kvjax.train.recipes.head_masks import HeadMasks

RAMP = 0.8
"""The share of the updates over which the target sparsity rises to its final value."""
FLOOR = 0.01
"""The final learning rates, relative to their peaks."""
SPREAD = 0.01
"""The standard deviation of the initial log α."""


def decays(params: Any) -> Any:
    """Return True for each parameter with weight decay. Norms and biases have none, as in Hugging Face's trainer."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: re.search("norm|bias", jax.tree_util.keystr(path)) is None, params
    )


@dataclasses.dataclass(frozen=True)
class PruLong(HeadMasks):
    """Train PruLong's head masks. They decide which kv heads of a model keep the whole context, and are learned from
    next tokens.

    The defaults are the paper's numbers for Llama-3.1-8B.
    """

    method: str = "prulong"
    """The method to train."""
    start: float = 4.0
    """The mean of the initial log α. At 4 a mask is 1 with a probability of .92."""
    l0: Literal["sampled", "expected"] = "sampled"
    """The sparsity that the constraint limits. sampled: that of the sampled masks (the authors' code); expected: its
    expectation (App. B)."""
    frozen_model: bool = True
    """Train only the masks; otherwise train the model as well, at --model-lr."""
    lr: float = 1.0
    """The peak learning rate of the masks (AdamW). It warms up over a tenth of the updates and falls to 1% by a cosine
    (as in the authors' code; the paper's Table 5 says linear)."""
    multiplier_lr: float = 1.0
    """The peak learning rate of the two multipliers, which are trained by gradient ascent. The schedule is the same."""
    model_lr: float = 1e-5
    """The peak learning rate of the model, if it is trained. The schedule is the same."""
    weight_decay: float = 0.1
    """The weight decay of AdamW, for masks, multipliers and, if the model is trained, its matrices (as in the authors'
    code)."""
    clip: float = 1.0
    """The largest norm of the gradient of all parameters together."""
    lengths: tuple[int, ...] = (131072,)
    """The lengths of sequences in tokens."""
    shares: tuple[float, ...] = (1.0,)
    """The relative frequency of each length."""
    sequences: int = 8000
    """The total number of sequences to train on, on any mesh. The default makes 1,000 updates of 8."""
    batch: int = 8
    """The number of sequences of an update, rounded up to a multiple of the mesh's data × fsdp (times --accumulate)."""
    master_weights: bool = True
    """If a 16-bit model is trained, keep it in float32 between updates. The loss sees it rounded."""

    builtin: ClassVar[str | None] = "prulong-builtin"
    shown: ClassVar[Mapping[str, str]] = {"cross_entropy": ".4f", "streaming": ".3f", "wanted": ".3f"}

    def rules(self) -> Iterator[Rule]:
        yield from super().rules()
        yield math.isfinite(self.start), "--start", "a number", self.start
        yield self.lr > 0, "--lr", "above 0", self.lr
        yield self.multiplier_lr > 0, "--multiplier-lr", "above 0", self.multiplier_lr
        yield self.model_lr > 0, "--model-lr", "above 0", self.model_lr
        yield self.weight_decay >= 0, "--weight-decay", "at least 0", self.weight_decay
        yield self.clip > 0, "--clip", "above 0", self.clip

    @property
    def trains_model(self) -> bool:
        return not self.frozen_model

    @property
    def takes_model(self) -> bool:
        return self.trains_model

    def init(self, model: Decoder) -> dict[str, Any]:
        shape = model.config.num_full_layers, model.config.num_kv_heads
        noise = jax.random.normal(jax.random.key(self.seed), shape)
        masks = {"log_alpha": self.start + SPREAD * noise, "multipliers": jnp.zeros(2)}
        return masks if self.frozen_model else masks | {"model": model}

    def split(self, params: dict[str, Any]) -> tuple[dict[str, Array], Decoder | None]:
        return {name: x for name, x in params.items() if name != "model"}, params.get("model")

    def head_weights(self, params: dict[str, Any]) -> Float[Array, "l k"]:
        return params["log_alpha"]

    def published(self, weights: Float[np.ndarray, "l k"]) -> Float[np.ndarray, "l k"]:
        return 1 / (1 + np.exp(-super().published(weights)))

    def target_sparsity(self, step: Int[Array, ""]) -> Float[Array, ""]:
        """Return the target sparsity of an update, in float32."""
        return self.sparsity * jnp.minimum(1, step / math.ceil(RAMP * self.steps))

    def loss(
        self, params: dict[str, Any], frozen: Decoder | None, batch: Any, key: jax.Array, step: Int[Array, ""]
    ) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
        """Return the mean over sequences of the cross-entropy of labelled tokens, plus λ₁ (s − t) + λ₂ (s − t)². s is
        the share of streaming heads and t the target (Eq. 4 and 6, App. B). Each head has one sampled mask for all
        tokens."""
        model, log_alpha = params.get("model", frozen), params["log_alpha"]
        z = hard_concrete.sample(key, log_alpha)
        hidden = self.blended(z, model, batch)
        error = next_token_losses(model, hidden, batch["tokens"], batch["labelled"]).mean()
        expected = self.l0 == "expected"
        streaming = hard_concrete.probability_of_zero(log_alpha).mean() if expected else 1 - z.mean()
        target = self.target_sparsity(step)
        gap, (first, second) = streaming - target, params["multipliers"]
        numbers = {"cross_entropy": error, "streaming": streaming, "wanted": target}
        numbers |= {"lambda/1": first, "lambda/2": second}
        return error + first * gap + second * gap**2, numbers

    def measure(self, params: dict[str, Any], frozen: Decoder | None, batch: Any) -> dict[str, Array]:
        """Return the cross-entropy of each sequence with the masks of inference and with full attention."""
        model = params.get("model", frozen)
        labels = batch["tokens"], batch["labelled"]
        used = self.blended(self.rounded(params), model, batch)
        full = model.hidden(batch["tokens"], batch["document"])
        return {
            "cross_entropy": next_token_losses(model, used, *labels),
            "full_cross_entropy": next_token_losses(model, full, *labels),
        }

    def optimizer(self) -> optax.GradientTransformation:
        """Return AdamW with a learning rate for each group. All gradients are clipped together before. The multipliers'
        gradient is negated, but their weight decay is not."""
        warmup = min(-(-self.steps // 10), self.steps - 1)

        def adamw(peak):
            rate = optax.warmup_cosine_decay_schedule(0.0, peak, warmup, self.steps, FLOOR * peak)
            decay = {"weight_decay": self.weight_decay, "mask": decays}
            return optax.adamw(rate, b1=0.9, b2=0.95, eps=1e-8, **decay)

        groups: dict[Hashable, Any] = {
            "log_alpha": adamw(self.lr),
            "multipliers": optax.chain(optax.scale(-1), adamw(self.multiplier_lr)),
        }
        if not self.frozen_model:
            groups["model"] = adamw(self.model_lr)
        return optax.chain(
            optax.clip_by_global_norm(self.clip), optax.partition(groups, {name: name for name in groups})
        )

    @property
    def course(self) -> Sequence[Sequence[str]]:
        return (("cross_entropy",), ("streaming", "wanted"), ("lambda/1", "lambda/2"))
