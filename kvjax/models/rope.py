"""Rotary position embeddings: the frequencies of every rope type, and the rotation.

Sources: RoPE (arXiv 2104.09864), linear position interpolation (2306.15595), dynamic NTK (the NTK-aware base change,
fixed here at a declared length), YaRN (2309.00071, §3.1-3.4), Llama 3.1 (2407.21783, and its reference code), LongRoPE
(2402.13753, with the magnitude of Phi-3's code).
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from kvjax.errors import LARGEST_FLOAT, LARGEST_INT, UserError


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """A rope type and its numbers. Numbers that the type does not use stay at their defaults."""

    type: str = "default"
    """One of `ROPE_TYPES`."""
    theta: float = 10_000.0
    """The base of the wavelengths."""
    factor: float = 1.0
    """The ratio of the context to the original one."""
    original_length: int = 0
    """The context that the model was first trained at."""
    length: int = 0
    """The longest sequence that will be run. Only "dynamic" and "longrope" use it: their frequencies depend on it, and
    a cache of rotated keys needs fixed frequencies."""
    share: float = 1.0
    """The share of a head's dimensions that is rotated. These are the first dimensions."""
    low_freq_factor: float = 1.0
    """The "llama3" bound of long wavelengths: those above original_length / low_freq_factor are fully stretched."""
    high_freq_factor: float = 4.0
    """The "llama3" bound of short wavelengths: those below original_length / high_freq_factor stay."""
    beta_fast: float = 32.0
    """The "yarn" bound of fast pairs: those with at least this many turns in the original context stay."""
    beta_slow: float = 1.0
    """The "yarn" bound of slow pairs: those with fewer turns are fully stretched."""
    attention_factor: float | None = None
    """The factor of cos and sin in "yarn" and "longrope". None derives it from `factor`, in "yarn" also from `mscale`
    and `mscale_all_dim`, in "longrope" also from `original_length`."""
    mscale: float | None = None
    """The "yarn" rate at which cos and sin grow with the logarithm of the factor. It has an effect only together with
    `mscale_all_dim`."""
    mscale_all_dim: float | None = None
    """The "yarn" rate of growth that cos and sin are divided by. It has an effect only together with `mscale`."""
    truncate: bool = True
    """True if "yarn" rounds the range between the two betas to whole pairs."""
    short_factor: tuple[float, ...] = ()
    """The "longrope" factors by which each pair's wavelength is stretched, for sequences up to the original length."""
    long_factor: tuple[float, ...] = ()
    """The "longrope" factors for longer sequences."""

    def __post_init__(self):
        # this also refuses NaN and infinity
        if not 1 < self.theta <= LARGEST_FLOAT:
            raise UserError(f"rope theta must be finite and above 1, got {self.theta:g}")
        positive = (
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "beta_fast",
            "beta_slow",
            "attention_factor",
        )
        for name in positive:
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1e6:
                raise UserError(f"rope {name} must be above 0 and at most 1000000, got {value:g}")
        for name in ("short_factor", "long_factor"):
            if wrong := [value for value in getattr(self, name) if not 0 < value <= 1e6]:
                raise UserError(f"rope {name} must be above 0 and at most 1000000, got {wrong[0]:g}")
        if not 0 < self.share <= 1:
            raise UserError(f"partial_rotary_factor must be above 0 and at most 1, got {self.share:g}")
        if self.type == "longrope" and self.original_length < 2:
            raise UserError(f"rope original length must be at least 2, got {self.original_length}")
        if self.low_freq_factor >= self.high_freq_factor:
            raise UserError(
                f"rope low_freq_factor must be below high_freq_factor, got {self.low_freq_factor:g} and "
                f"{self.high_freq_factor:g}"
            )
        for name in ("original_length", "length", "mscale", "mscale_all_dim"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= LARGEST_INT:
                raise UserError(f"rope {name} must be at least 0 and at most {LARGEST_INT}, got {value:g}")


def _wavelengths(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Return θ^(2i/h), positions per radian, with the same roundings to float32 as the original code. Models were
    trained with these roundings: at position 10⁵ an exact frequency would differ by 10⁻² radians."""
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    # the power is taken in float64, since numpy's vectorised float32 power is off in the last bit
    return (np.float64(np.float32(rope.theta)) ** exponent.astype(np.float64)).astype(np.float32)


def _default(rope: RopeConfig, head_dim: int) -> np.ndarray:
    return 1 / _wavelengths(rope, head_dim)


def _linear(rope: RopeConfig, head_dim: int) -> np.ndarray:
    return _default(rope, head_dim) / rope.factor


def _dynamic(rope: RopeConfig, head_dim: int) -> np.ndarray:
    stretch = max(rope.length / rope.original_length, 1.0)
    base_factor = (rope.factor * stretch - (rope.factor - 1)) ** (head_dim / (head_dim - 2))
    return _default(dataclasses.replace(rope, theta=rope.theta * base_factor), head_dim)


def _llama3(rope: RopeConfig, head_dim: int) -> np.ndarray:
    fast = _default(rope, head_dim)
    # the double reciprocal reproduces the original code's roundings
    turns = rope.original_length * (1 / (2 * math.pi * (1 / fast)))
    share = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    share = np.clip(share, 0, 1)
    return (1 - share) * fast / rope.factor + share * fast


def _yarn(rope: RopeConfig, head_dim: int) -> np.ndarray:
    def dimension(turns: float) -> float:
        """Return the (fractional) pair index that makes `turns` rotations over the original length."""
        return head_dim * math.log(rope.original_length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (np.arange(head_dim // 2, dtype=np.float32) - low) / (high - low or 0.001)
    slow = np.clip(ramp, 0, 1)
    wavelengths = _wavelengths(rope, head_dim)
    return 1 / (rope.factor * wavelengths) * slow + 1 / wavelengths * (1 - slow)


def _longrope(rope: RopeConfig, head_dim: int) -> np.ndarray:
    factor = rope.long_factor if rope.length > rope.original_length else rope.short_factor
    return 1 / (np.array(factor, np.float32) * _wavelengths(rope, head_dim))


ROPE_TYPES = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}


def rotated_dims(rope: RopeConfig, head_dim: int) -> int:
    """Return the number of a head's dimensions that are rotated."""
    return int(head_dim * rope.share)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Return radians per position of each rotated pair, float32 [pairs]."""
    return ROPE_TYPES[rope.type](rope, rotated_dims(rope, head_dim))


def attention_scaling(rope: RopeConfig) -> float:
    """Return the factor of cos and sin: the temperature of YaRN (§3.4) or of LongRoPE; 1 for other types."""
    if rope.type not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.type == "longrope":
        return math.sqrt(1 + math.log(max(rope.factor, 1.0)) / math.log(rope.original_length))

    def temperature(mscale: float) -> float:
        return 0.1 * mscale * math.log(rope.factor) + 1 if rope.factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return temperature(rope.mscale) / temperature(rope.mscale_all_dim)
    return temperature(1.0)


def check_rotation(rope: RopeConfig, head_dim: int) -> None:
    """Raise UserError if the numbers, though each is in its range, do not make finite positive angles."""
    dimensions = rotated_dims(rope, head_dim)
    if dimensions % 2 or not dimensions:
        raise UserError(
            f"rotary embeddings turn {dimensions} of {head_dim} dimensions of a head, expected an even number"
        )
    for name, factors in (("short_factor", rope.short_factor), ("long_factor", rope.long_factor)):
        if rope.type == "longrope" and len(factors) != dimensions // 2:
            raise UserError(f"rope {name} has {len(factors)} numbers, expected {dimensions // 2}")
    try:
        with np.errstate(all="ignore"):
            numbers = np.append(inverse_frequencies(rope, head_dim), attention_scaling(rope))
    except (ArithmeticError, ValueError):
        numbers = np.array([np.nan])
    if not (np.isfinite(numbers) & (numbers > 0)).all():
        raise UserError(
            f"rope type {rope.type!r} with these numbers has angles that are not finite and positive"
        )


CosSin = tuple[Float32[Array, "b t pairs"], Float32[Array, "b t pairs"]]


def cos_sin(rope: RopeConfig, head_dim: int, position: Int[Array, "b t"]) -> CosSin:
    """Return cosine and sine of every pair's angle at the given positions, float32 whatever the model's dtype."""
    angle = position[..., None].astype(jnp.float32) * inverse_frequencies(rope, head_dim)
    scale = attention_scaling(rope)
    return jnp.cos(angle) * scale, jnp.sin(angle) * scale


def rotate(x: Float[Array, "b n t h"], angles: CosSin) -> Float[Array, "b n t h"]:
    """Apply RoPE. Pair i of p is (x[i], x[i + p]), as in the Hugging Face layout of weights; x[2p:] is not rotated."""
    cos, sin = (a[:, None] for a in angles)
    pairs = cos.shape[-1]
    first, second, rest = jnp.split(x.astype(jnp.float32), (pairs, 2 * pairs), axis=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return jax.lax.concatenate(rotated + [rest] * (rest.shape[-1] > 0), 3).astype(x.dtype)
