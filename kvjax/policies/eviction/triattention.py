"""TriAttention (Mao et al., 2026, arXiv:2604.04921): the logits that a head's mean query gives at future distances."""

import dataclasses
import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from kvjax.checkpoints.fingerprint import MadeFor
from kvjax.checkpoints.folder import read_sizes, readable_as, save_exported
from kvjax.checkpoints.gates import OpenGates, open_gates
from kvjax.checkpoints.module import arrays_of, filled
from kvjax.checkpoints.torch_file import TorchFile, shape_of
from kvjax.errors import UserError, one_of, shown
from kvjax.policies.base import Eviction
from kvjax.policies.schedule import Schedule
from kvjax.policies.trigger import Trigger
from kvjax.policies.views import Stored
from kvjax.struct import assign, remembered, static, struct

OFFSETS = 2.0 ** np.arange(17)
"""The distances of future queries at which a key is scored, 1 to 65,536."""
LEAST_DEVIATION = 1e-6
"""The least standard deviation by which scores are divided."""
LAYERS = "mean", "own"
"""The values of `TriAttention.layers`: the mean of all layers' scores decides, or each layer's own."""
HEAD = re.compile(r"layer(\d{1,4})_head(\d{1,4})")
"""The pattern of names in the authors' files."""
PUBLISHED = {"real": "q_mean_real", "imaginary": "q_mean_imag", "length": "q_abs_mean"}
"""The names of the arrays in the authors' files."""


class QueryStatistics(nnx.Module):
    """Statistics of queries before RoPE, by layer, query head and pair of dimensions [l n pairs].

    A pair is the two dimensions that RoPE turns together, read as a complex number (`pairs`).
    """

    def __init__(self, layers: int, heads: int, head_dim: int):
        zeros = functools.partial(jnp.zeros, (layers, heads, head_dim // 2))
        self.real, self.imaginary = nnx.Param(zeros()), nnx.Param(zeros())
        """The mean of the complex numbers."""
        self.length = nnx.Param(zeros())
        """The mean of their absolute values."""


class Sizes(NamedTuple):
    """The sizes of statistics."""

    layers: int
    heads: int
    """The number of query heads in each layer."""
    head_dim: int

    @classmethod
    def of(cls, statistics: QueryStatistics) -> "Sizes":
        """Return the sizes of statistics."""
        layers, heads, count = statistics.real.shape
        return cls(layers, heads, 2 * count)


def pairs(x: Float[Array, "... h"], turned: int) -> tuple[Float[Array, "... p"], Float[Array, "... p"]]:
    """Return the real and imaginary parts of a vector's h/2 pairs. RoPE turns the first `turned` pairs,
    (i, i + turned) of the first 2 · turned dimensions. The other dimensions are paired in the same way."""
    parts = x[..., :turned], x[..., turned : 2 * turned], *jnp.split(x[..., 2 * turned :], 2, -1)
    return jnp.concatenate(parts[::2], -1), jnp.concatenate(parts[1::2], -1)


@struct
class TriAttention(Eviction):
    """The largest normalised score over a group's query heads. The score of a query head for a key k at position p,
    when t tokens were read, is

        mean_d Σ_f ρ²|q̄_f||k_f| cos(ω_f (t − p + d) + arg q̄_f k_f*) + Σ_f ρ² (E|q_f| − |q̄_f|)|k_f|

    1. q̄_f, E|q_f|: mean and mean length of the head's queries before RoPE, of each pair f (`QueryStatistics`).
    2. d: the `OFFSETS`. ω_f, ρ: RoPE's frequency and factor. k_f: the key before RoPE.
    3. A head's scores are normalised to mean 0 and variance 1 over the entries that compete.
    4. The largest ones are averaged over the layers, which then all keep the same tokens, unless `layers` is "own".

    A key is stored after RoPE, as K_f = ρ exp(i ω_f p) k_f. The first sum is therefore ρ Re Σ_f q̄_f E_f K_f* with
    E_f = mean_d exp(i ω_f (t + d)), and needs no position.

    These are the modes "per head" and "per layer and head" of the authors' code, without its noise that breaks ties.
    By default their code keeps a prompt whole.
    """

    statistics: Any = dataclasses.field(repr=False)
    """The `QueryStatistics`, or the folder or the authors' .pt file that holds them."""
    layers: str = static(default="mean")
    """One of `LAYERS`. Under CriticalKV, which weighs scores by each layer's values, it is always "own"."""
    made_for: MadeFor | None = remembered()
    """The model that the folder's statistics were made for; None: it does not say."""
    name = "triattention"
    trained = "statistics"

    def __post_init__(self):
        statistics, description = self.statistics, {}
        if isinstance(statistics, str | Path):
            statistics, description = load_statistics(statistics)
        if not isinstance(statistics, QueryStatistics):
            raise UserError(
                f"{self.name}: statistics must be a folder or a file of statistics or QueryStatistics, got "
                f"{shown(statistics)}"
            )
        one_of(self.name, "layers", self.layers, LAYERS)
        assign(self, statistics=statistics, made_for=MadeFor.described(description))

    def check(self, model: Any) -> None:
        check_made_for(Sizes.of(self.statistics), model)
        if self.layers == "mean" and model.head_order is not None:
            raise UserError(
                f"{self.name}: averages scores over layers, and this model's kv heads were placed in another order in "
                "each: layers must be 'own'"
            )

    def refusal(self, schedule: Schedule, stores_all: bool) -> str:
        if self.layers == "own":
            return ""
        if not stores_all:
            return "averages scores over layers, and under an admission their tokens differ: layers must be 'own'"
        if schedule.shares.over == "model" or schedule.shares.pyramid is not None:
            return "averages scores over layers, and their budgets differ: layers must be 'own'"
        return ""

    @property
    def usual_trigger(self) -> Trigger:
        return Trigger("every", every=128)

    @jax.default_matmul_precision("highest")
    def score(self, state: tuple[()], stored: Stored) -> Float[Array, "b k s"]:
        turned, heads = stored.frequencies.size, stored.k.shape[1]
        group = stored.output.shape[0] // heads
        head = stored.head[:, None] * group + jnp.arange(group)
        q_real, q_imaginary, length = (
            x[...][head] for x in (self.statistics.real, self.statistics.imaginary, self.statistics.length)
        )
        k_real, k_imaginary = pairs(stored.k.astype(jnp.float32), turned)
        padding = (0, k_real.shape[-1] - turned)  # pairs that RoPE leaves as they are
        frequency = jnp.pad(stored.frequencies, padding)
        factor = jnp.pad(jnp.full(turned, stored.rope_scale), padding, constant_values=1.0)
        # an offset is a power of two, so its angle is exact; only the angle of `seen` is rounded
        now, ahead = stored.seen[:, None] * frequency, OFFSETS[:, None] * frequency
        cos_ahead, sin_ahead = jnp.cos(ahead).mean(0), jnp.sin(ahead).mean(0)
        cos = jnp.cos(now) * cos_ahead - jnp.sin(now) * sin_ahead
        sin = jnp.sin(now) * cos_ahead + jnp.cos(now) * sin_ahead
        cos, sin = (factor * x[:, None, None] for x in (cos, sin))

        def products(q, k):
            return jnp.einsum("bkgp,bksp->bkgs", q, k)

        spread = factor * (length - jnp.hypot(q_real, q_imaginary))
        score = products(q_real * cos - q_imaginary * sin, k_real)
        score += products(q_real * sin + q_imaginary * cos, k_imaginary)
        score += jnp.einsum("kgp,bksp->bkgs", spread, jnp.hypot(k_real, k_imaginary))
        return _normalised(score, (stored.eligible & ~stored.forced)[:, :, None]).max(2)

    def over_layers(self, scores: Float[Array, "l b k s"]) -> Float[Array, "l b k s"]:
        if self.layers == "own":
            return scores
        return jnp.broadcast_to(scores.mean(0), scores.shape)


def _normalised(x: Float[Array, "b k g s"], competing: Array) -> Float[Array, "b k g s"]:
    """Return scores with mean 0 and variance 1 over the entries that compete."""
    count = jnp.maximum(competing.sum(-1, keepdims=True), 1)
    centred = x - jnp.where(competing, x, 0).sum(-1, keepdims=True) / count
    variance = jnp.where(competing, centred**2, 0).sum(-1, keepdims=True) / count
    return centred / jnp.maximum(jnp.sqrt(variance), LEAST_DEVIATION)


def save_statistics(folder: str | Path, statistics: QueryStatistics, description: Mapping[str, Any]) -> None:
    """Write statistics to a folder. `description` says how they were made."""
    sizes = Sizes.of(statistics)._asdict()
    save_exported(folder, arrays_of(statistics), {"method": TriAttention.name} | sizes | dict(description))


def load_statistics(path: str | Path) -> tuple[QueryStatistics, dict[str, Any]]:
    """Return statistics and their description. `path` is a folder that `save_statistics` wrote, or a .pt file that the
    authors' code wrote, which is read without torch.

    Raises UserError naming the faulty file.
    """
    with open_gates(path, _described, _published) as (found, file):
        return filled(lambda: QueryStatistics(*found.sizes), found.arrays(), file), found.description


def check_made_for(sizes: Sizes, model: Any) -> None:
    """Raise UserError if the statistics are for another configuration."""
    expected = model.num_full_layers, model.num_heads, model.head_dim
    if sizes != expected:
        raise UserError(
            f"triattention: these statistics are for (layers, query heads, head_dim) = {tuple(sizes)}, the model "
            f"has {expected}"
        )


def _described(folder: str | Path, description: dict[str, Any]) -> Sizes:
    with readable_as("statistics of TriAttention", folder):
        if description["method"] != TriAttention.name:
            raise ValueError(f"the method is {shown(description['method'])}")
        sizes = Sizes(**read_sizes(description, Sizes.__annotations__))
    return sizes


def _published(opened: TorchFile) -> OpenGates[Sizes]:
    """Return the statistics in an authors' file, which has three vectors for every layer and query head."""
    match opened.content:
        case {"metadata": dict() as metadata, "stats": dict() as stats} if stats:
            pass
        case _:
            raise UserError(
                f"{opened.file}: these are no statistics of TriAttention: expected metadata and stats"
            )
    if (style := metadata.get("rope_style")) != "half":
        raise UserError(f"{opened.file}: rope_style should be 'half', found {shown(style)}")
    layers: dict[int, dict[str, Any]] = {}
    heads = 0
    for name, vectors in stats.items():
        match = HEAD.fullmatch(str(name))
        if match is None or not isinstance(vectors, dict):
            raise UserError(f"{opened.file}: stats has {shown(name)}, expected layer00_head00 and so on")
        layer, head = map(int, match.groups())
        layers.setdefault(layer, {}).update({f"head {head}, {key}": x for key, x in vectors.items()})
        heads = max(heads, head + 1)
    match shape_of(layers.get(0, {}), "head 0, q_mean_real"):
        case (int(count),) if metadata.get("head_dim") == 2 * count > 0:
            sizes = Sizes(max(layers) + 1, heads, 2 * count)
        case other:
            raise UserError(
                f"{opened.file}: layer 0: head 0, q_mean_real should have half of head_dim "
                f"{shown(metadata.get('head_dim'))} numbers, found {other}"
            )
    arrays_of_layers = [layers.get(index, {}) for index in range(sizes.layers)]
    shapes = {f"head {head}, {key}": (count,) for key in PUBLISHED.values() for head in range(heads)}
    opened.check(arrays_of_layers, shapes)

    def arrays() -> dict[str, np.ndarray]:
        stacked = opened.stack(arrays_of_layers, shapes)
        return {
            name: np.stack([stacked[f"head {head}, {key}"] for head in range(heads)], 1)
            for name, key in PUBLISHED.items()
        }

    return OpenGates(sizes, {"method": TriAttention.name} | sizes._asdict(), arrays)
