"""The base class of recipes that learn which kv heads need the whole context. It has the streaming heads, and makes a
pattern from a number for each head."""

import abc
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvjax.errors import UserError
from kvjax.mesh import AXES, gather
from kvjax.models.decoder import Decoder
from kvjax.policies import Policy, make_policy
from kvjax.policies.admission.head_pattern import whole_count
from kvjax.policies.admission.pattern_folder import read_pattern, write_pattern
from kvjax.policies.make import format_policy
from kvjax.train.blend import Blend
from kvjax.train.labelled import LabelledRecipe
from kvjax.train.mask_pictures import draw_course, draw_weights
from kvjax.train.objective import student
from kvjax.train.recipe import Rule, Validation


@dataclasses.dataclass(frozen=True)
class HeadMasks(LabelledRecipe):
    """Learn a number for each layer and kv head. Higher numbers mean that a head needs the whole context more."""

    sparsity: float = 0.7
    """The share of kv heads that stream at inference. The pattern can be used with another share, too."""
    sink: int = 128
    """The number of first tokens that a streaming head sees."""
    window: int = 1024
    """The number of last tokens that a streaming head sees."""
    block: int = 128
    """The block size of streaming heads in training, in tokens. --sink and --window are rounded up to whole blocks. 1:
    exactly these tokens, as at inference."""

    exports: ClassVar[str] = "pattern"

    def rules(self) -> Iterator[Rule]:
        yield from super().rules()
        yield 0 <= self.sparsity <= 1, "--sparsity", "from 0 to 1", self.sparsity
        yield self.sink >= 0, "--sink", "at least 0", self.sink
        yield self.window >= 1, "--window", "at least 1", self.window
        yield self.block >= 1, "--block", "at least 1", self.block

    def check(self) -> None:
        super().check()
        blocks = -(-self.sink // self.block) + -(-self.window // self.block)
        if self.lengths[0] <= blocks * self.block:
            raise UserError(
                f"--lengths {self.lengths[0]} must be above the {blocks * self.block} tokens of --sink {self.sink} and "
                f"--window {self.window} in blocks of {self.block}: streaming heads would see everything"
            )

    @abc.abstractmethod
    def head_weights(self, params: Any) -> Float[Array, "l k"]:
        """Return the weights by which heads are ordered, from the method's own parameters."""

    def published(self, weights: Float[np.ndarray, "l k"]) -> Float[np.ndarray, "l k"]:
        """Return the weights in float64, from 0 to 1 and in the same order, since other programs that read the pattern
        clip weights to this range."""
        return weights.astype(np.float64)

    def blended(
        self, z: Float[Array, "l k"], model: Decoder, batch: Mapping[str, Array]
    ) -> Float[Array, "b t d"]:
        """Return the final hidden states, with each kv head's attention z · full + (1 − z) · streaming."""
        blend = Blend(z, self.sink, self.window, self.block)
        return student(blend, model, batch["tokens"], batch["document"], window=blend.band)[0]

    def rounded(self, params: Any) -> Float[Array, "l k"]:
        """Return the masks of inference: 0 for the share `sparsity` of the heads with the lowest weights, and 1 for the
        others. Weights that are all 0 or 1 are used as masks directly."""
        weights = self.head_weights(params)
        order = jnp.argsort(-weights.reshape(-1), stable=True)
        whole_heads = order[: whole_count(weights.size, self.sparsity)]
        chosen = jnp.zeros(weights.size).at[whole_heads].set(1).reshape(weights.shape)
        return jnp.where(((weights == 0) | (weights == 1)).all(), weights, chosen)

    def export(self, folder: Path, params: Any, model: Decoder, validation: Validation) -> None:
        """Write a pattern folder in DuoAttention's format, for `kvjax.make_policy("head_pattern", gates=folder)`."""
        weights = np.asarray(gather(self.head_weights(params), *AXES))
        if jax.process_index() == 0:
            options = {
                "sparsity": self.deployed_sparsity(weights),
                "described": self.description(validation),
            }
            write_pattern(folder, self.published(weights), self.sink, self.window, **options)

    def deployed_sparsity(self, weights: Float[np.ndarray, "l k"]) -> float | None:
        """Return the sparsity to use with these weights, None if all are 0 or 1, since then they determine it."""
        return None if np.isin(weights, (0, 1)).all() else self.sparsity

    def draw(self, folder: Path, validation: Validation) -> None:
        weights = read_pattern(folder / self.exports).weights
        draw_weights(folder / "weights.png", weights, self.deployed_sparsity(weights))
        draw_course(folder / "course.png", folder / "metrics.jsonl", self.course)

    @property
    def course(self) -> Sequence[Sequence[str]]:
        """The logged scalars to draw over the updates, by panel."""
        return (("loss",),)

    @property
    def used_as(self) -> str:
        return "head_pattern"

    def evaluate_options(self, folder: Path) -> Sequence[str]:
        return (
            "--policies",
            "full",
            *self.rivals.values(),
            format_policy({self.used_as: {"gates": str(folder)}}),
        )

    def deploy(self, params: Any, model: Decoder) -> Policy:
        weights = np.asarray(gather(self.head_weights(params), *AXES))
        arguments = {"sparsity": self.deployed_sparsity(weights), "sink": self.sink, "window": self.window}
        return make_policy({self.used_as: arguments}, model=model, gates=weights)

    def sweep(self, params: Any, model: Decoder, held_out: Sequence[Any]) -> Mapping[str, Policy]:
        if self.deployed_sparsity(np.asarray(gather(self.head_weights(params), *AXES))) is None:
            return super().sweep(params, model, held_out)
        shares = dict.fromkeys([self.sparsity, *SWEPT])
        return {
            f"sparsity={share:g}": dataclasses.replace(self, sparsity=share).deploy(params, model)
            for share in shares
        }


SWEPT = 0.3, 0.5, 0.7, 0.9
"""The sparsities of a report's other rows, as in PruLong's sweep."""
