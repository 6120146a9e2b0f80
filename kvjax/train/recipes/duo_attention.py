"""DuoAttention: which kv heads need the whole context, by how much of a frozen model's hidden states at synthetic
passkeys depends on it (arXiv:2410.10819, Sec. 2.2)."""

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
"""The learning rate rises over a fifth of the updates and falls over the last fifth, from and to a tenth."""


@dataclasses.dataclass(frozen=True)
class DuoAttention(HeadMasks):
    """Train DuoAttention's head weights: which kv heads of a frozen model keep the whole context, by passkeys.

    By default the authors' numbers for Llama-3.
    """

    method: str = "duo_attention"
    """What is trained."""
    data_kind: Literal["natural", "passkeys"] = "passkeys"
    """What is learned: random words hidden in the documents' text and asked for behind it; or documents, packed and
    each by itself, all of their tokens (as PruLong). Of the built-in tasks: the answers to questions about what is
    hidden, or all tokens."""
    sparsity: float = 0.5
    """The share of kv heads that are streaming heads where the pattern is used; it may be used at another, too."""
    window: int = 256
    """Last tokens that a streaming head sees."""
    regularized: float = 0.05
    """Weight of the mean α in the loss."""
    lr: float = 0.02
    """Peak learning rate of AdamW, without decay: a fifth of the updates leads up to it, the last fifth down."""
    lengths: tuple[int, ...] = (8000, 16000, 24000, 32000)
    """Lengths of sequences in tokens. The authors draw one of 50 from 1,000 to 32,000, each a program to compile."""
    shares: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0)
    """How often each length is trained on, relative to the others."""
    sequences: int = 2000
    """Sequences to train on in all, on any mesh: 2,000 updates of one, as the authors' eight devices share a
    sequence."""
    batch: int = 1
    """Sequences of an update, rounded up to a multiple of the mesh's data × fsdp."""

    builtin: ClassVar[str | None] = "duo_attention-builtin"
    shown: ClassVar[Mapping[str, str]] = {"distillation": ".4f", "alpha": ".3f"}

    def rules(self) -> Iterator[Rule]:
        yield from super().rules()
        yield self.regularized >= 0, "--regularized", "at least 0", self.regularized
        yield self.lr > 0, "--lr", "above 0", self.lr

    def init(self, model: Decoder) -> dict[str, Array]:
        return {"alpha": jnp.ones((model.config.num_layers, model.config.num_kv_heads))}

    def weights(self, params: dict[str, Array]) -> Float[Array, "l k"]:
        return params["alpha"]

    def _errors(self, z: Float[Array, "l k"], frozen: Decoder, batch: Any) -> Float[Array, " b"]:
        """The mean squared difference of the final hidden states that predict each sequence's labelled tokens. (The
        authors take those at the answers' own tokens, of which the last predicts nothing: of one token, that is all.)
        """
        predicts = jnp.pad(batch["labelled"][:, 1:], ((0, 0), (0, 1)))
        teacher = jax.lax.stop_gradient(frozen.hidden(batch["tokens"], batch["document"]))
        difference = self.blended(z, frozen, batch).astype(jnp.float32) - teacher.astype(jnp.float32)
        squares = jnp.where(predicts, jnp.square(difference).mean(-1), 0)
        return squares.sum(1) / jnp.maximum(predicts.sum(1), 1)

    def loss(
        self, params: dict[str, Array], frozen: Decoder, batch: Any, key: jax.Array, step: Int[Array, ""]
    ) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
        """The mean squared difference at labelled tokens + `regularized` · mean α (Eq. 2 and 3)."""
        error, alpha = self._errors(params["alpha"], frozen, batch).mean(), params["alpha"].mean()
        return error + self.regularized * alpha, {"distillation": error, "alpha": alpha}

    def measure(self, params: dict[str, Array], frozen: Decoder, batch: Any) -> dict[str, Array]:
        """The squared difference of each sequence, with heads weighted and as they are used."""
        return {
            "distillation": self._errors(params["alpha"], frozen, batch),
            "used_distillation": self._errors(self.rounded(params), frozen, batch),
        }

    def optimizer(self) -> optax.GradientTransformation:
        """AdamW, and each α brought back to [0, 1] after every update."""
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
