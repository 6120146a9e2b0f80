"""DuoAttention: the kv heads that need the whole context. They are found by how much a frozen model's hidden states at
synthetic passkeys depend on it (arXiv:2410.10819, Sec. 2.2)."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from kvjax.models.decoder import Decoder
from kvjax.train.recipe import Rule
from kvjax.train.recipes.head_masks import HeadMasks

RAMP, FLOOR = 5, 0.1
"""The learning rate rises over the first 1/5 of the updates and falls over the last 1/5, and is at least 0.1 of its
peak."""


@dataclasses.dataclass(frozen=True)
class DuoAttention(HeadMasks):
    """Train DuoAttention's head weights. They decide which kv heads of a frozen model keep the whole context, and are
    learned on passkeys.

    The defaults are the authors' numbers for Llama-3.
    """

    method: str = "duo_attention"
    """The method to train."""
    data_kind: Literal["natural", "passkeys"] = "passkeys"
    """The tokens that are learned. passkeys: random words that are hidden in the documents' text and asked for at its
    end. natural: all tokens of packed documents, which do not see each other (as PruLong). With the built-in tasks: the
    answers to questions about what is hidden, or all tokens."""
    sparsity: float = 0.5
    """The share of kv heads that stream at inference. The pattern can be used with another share, too."""
    window: int = 256
    """The number of last tokens that a streaming head sees."""
    regularized: float = 0.05
    """The weight of the mean α in the loss."""
    lr: float = 0.02
    """The peak learning rate of AdamW, without decay. It rises over the first fifth of the updates and falls over the
    last fifth."""
    lengths: tuple[int, ...] = (8000, 16000, 24000, 32000)
    """The lengths of sequences in tokens. The authors use 50 lengths from 1,000 to 32,000. Here there are fewer, since
    each length is a program to compile."""
    shares: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0)
    """The relative frequency of each length."""
    sequences: int = 2000
    """The total number of sequences to train on, on any mesh. The default makes 2,000 updates of one sequence, as the
    authors do."""
    batch: int = 1
    """The number of sequences of an update, rounded up to a multiple of the mesh's data × fsdp (times --accumulate)."""

    builtin: ClassVar[str | None] = "duo_attention-builtin"
    shown: ClassVar[Mapping[str, str]] = {"distillation": ".4f", "alpha": ".3f"}

    def rules(self) -> Iterator[Rule]:
        yield from super().rules()
        yield self.regularized >= 0, "--regularized", "at least 0", self.regularized
        yield self.lr > 0, "--lr", "above 0", self.lr

    def init(self, model: Decoder) -> dict[str, Array]:
        return {"alpha": jnp.ones((model.config.num_full_layers, model.config.num_kv_heads))}

    def head_weights(self, params: dict[str, Array]) -> Float[Array, "l k"]:
        return params["alpha"]

    def _errors(self, z: Float[Array, "l k"], frozen: Decoder, batch: Any) -> Float[Array, " b"]:
        """Return the mean squared difference of the final hidden states that predict each sequence's labelled tokens.
        The authors take the states at the answer's tokens instead. The last of these predicts nothing, so an answer of
        one token would have no useful state.
        """
        predicts = jnp.pad(batch["labelled"][:, 1:], ((0, 0), (0, 1)))
        teacher = jax.lax.stop_gradient(frozen.hidden(batch["tokens"], batch["document"]))
        difference = self.blended(z, frozen, batch).astype(jnp.float32) - teacher.astype(jnp.float32)
        squares = jnp.where(predicts, jnp.square(difference).mean(-1), 0)
        return squares.sum(1) / jnp.maximum(predicts.sum(1), 1)

    def loss(
        self, params: dict[str, Array], frozen: Decoder, batch: Any, key: jax.Array, step: Int[Array, ""]
    ) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
        """Return the mean squared difference at labelled tokens + `regularized` · mean α (Eq. 2 and 3)."""
        error, alpha = self._errors(params["alpha"], frozen, batch).mean(), params["alpha"].mean()
        return error + self.regularized * alpha, {"distillation": error, "alpha": alpha}

    def measure(self, params: dict[str, Array], frozen: Decoder, batch: Any) -> dict[str, Array]:
        """Return the mean squared difference of each sequence, with weighted heads and with the heads of inference."""
        return {
            "distillation": self._errors(params["alpha"], frozen, batch),
            "used_distillation": self._errors(self.rounded(params), frozen, batch),
        }

    def optimizer(self) -> optax.GradientTransformation:
        """Return AdamW, with each α clipped to [0, 1] after every update."""
        ramp = max(self.steps // RAMP, 1)

        def rate(step):
            up, down = ((x / ramp) for x in (step + 1, self.steps - step))
            return self.lr * jnp.minimum(1, jnp.maximum(jnp.minimum(up, down), FLOOR))

        within = optax.stateless(
            lambda change, params: jax.tree.map(lambda x, p: jnp.clip(p + x, 0, 1) - p, change, params)
        )
        return optax.chain(optax.adamw(rate, weight_decay=0.0), within)

    @property
    def course(self) -> Sequence[Sequence[str]]:
        return (("distillation",), ("alpha",))
