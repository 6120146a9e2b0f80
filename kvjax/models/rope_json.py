"""Rotary embeddings in `config.json`, whose spelling changed. A theta that is read wrongly makes a silently wrong
model."""

from typing import Any

from kvjax.errors import UserError
from kvjax.models.json_file import JsonObject
from kvjax.models.rope import ROPE_TYPES, RopeConfig

_NUMBERS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "original_length", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original_length", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim",
             "truncate"),
    "longrope": ("factor", "original_length", "attention_factor", "short_factor", "long_factor"),
}  # fmt: skip
"""The numbers that each rope type reads. Only YaRN and LongRoPE have defaults for numbers; `original_length` always has
one."""
_SPELLING = {"original_length": "original_max_position_embeddings"}
_KIND = {"original_length": int, "truncate": bool, "short_factor": list, "long_factor": list}
_OLD = {"su": "longrope"}
"""Earlier names of rope types."""


def _spellings(keys: JsonObject) -> list[JsonObject]:
    """Return what stands under `rope_scaling` (transformers 4) and under `rope_parameters` (5)."""
    spelled = {name: keys.get(name, dict, None) for name in ("rope_scaling", "rope_parameters")}
    return [JsonObject(data, f"{keys.where}: {name}") for name, data in spelled.items() if data]


def rope_share(keys: JsonObject) -> float:
    """Return the share of a head's dimensions that is rotated, in either spelling."""
    shares = [each.get("partial_rotary_factor", float, None) for each in (keys, *_spellings(keys))]
    return next((share for share in shares if share is not None), 1.0)


def read_rope(
    keys: JsonObject, max_length: int | None, share: float = 1.0, theta: float = 10_000.0
) -> RopeConfig:
    """Read either spelling: `rope_theta` beside `rope_scaling` (transformers 4), or `rope_parameters` with both in it
    (5).

    Args:
        share: the share of a head's dimensions that is rotated. Another one in the file is refused.
        theta: the base where the file has none.
    """
    inner = _spellings(keys)
    for each in inner:
        if any(isinstance(value, dict) for value in each.data.values()):
            raise each.error("rotary embeddings that differ by layer are not supported")
    for each in (keys, *inner):
        if each.get("partial_rotary_factor", float, share) != share:
            raise each.error(f"a partial_rotary_factor other than {share:g} is not supported")
    thetas = {each.get("rope_theta", float, None) for each in (keys, *inner)} - {None}
    if len(thetas) > 1:
        raise keys.error(f"rope_theta is given as {' and as '.join(f'{t:g}' for t in sorted(thetas))}")
    theta = thetas.pop() if thetas else theta
    read = {
        _read_numbers(keys, each, max_length, theta=theta, share=share)
        for each in inner or [JsonObject({}, keys.where)]
    }
    if len(read) > 1:
        raise keys.error("rope_scaling and rope_parameters contradict each other")
    return read.pop()


def _read_numbers(keys: JsonObject, inner: JsonObject, max_length: int | None, **read: float) -> RopeConfig:
    rope_type = inner.get("rope_type", str, None) or inner.get("type", str, "default")
    rope_type = _OLD.get(rope_type, rope_type)
    if rope_type not in ROPE_TYPES:
        raise inner.error(f"rope type {rope_type!r} is not supported, only {', '.join(ROPE_TYPES)}")
    context = keys.get("max_position_embeddings", int)
    numbers: dict[str, Any] = {}
    for name in _NUMBERS[rope_type]:
        has_default = rope_type == "yarn" or name in ("original_length", "attention_factor")
        has_default |= (rope_type, name) == ("longrope", "factor")
        default = (None,) if has_default else ()
        numbers[name] = inner.get(_SPELLING.get(name, name), _KIND.get(name, float), *default)
    if "original_length" in numbers:
        declared = keys.get("original_max_position_embeddings", int, None)
        own = None if rope_type == "longrope" else context
        numbers["original_length"] = declared or numbers["original_length"] or own
        if numbers["original_length"] is None:
            raise inner.error("original_max_position_embeddings is missing")
    if "factor" in numbers and numbers["factor"] is None:
        numbers["factor"] = context / max(numbers["original_length"], 1)
    if rope_type == "longrope":
        numbers |= {name: _factors(inner, name) for name in ("short_factor", "long_factor")}
        # one of two, so that all lengths of a kind are one model
        longer = (max_length or context) > numbers["original_length"]
        numbers["length"] = context if longer else numbers["original_length"]
    if rope_type == "dynamic":
        numbers |= {"original_length": context, "length": max(max_length or context, context)}
    numbers = {name: value for name, value in numbers.items() if value is not None}
    try:
        return RopeConfig(type=rope_type, **read, **numbers)
    except UserError as error:
        raise inner.error(str(error)) from None


def _factors(inner: JsonObject, name: str) -> tuple[float, ...]:
    values = inner.get(name, list)
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        raise inner.error(f"{name} must be a list of numbers")
    return tuple(JsonObject({name: value}, inner.where).get(name, float) for value in values)


def rope_scaling(rope: RopeConfig) -> dict[str, Any] | None:
    """Return the inverse of `read_rope`, without theta. "dynamic" and "longrope" are written without the length that
    they were fixed at."""
    if rope.type == "default":
        return None
    numbers = {_SPELLING.get(name, name): getattr(rope, name) for name in _NUMBERS[rope.type]}
    numbers = {name: [*value] if isinstance(value, tuple) else value for name, value in numbers.items()}
    return {"rope_type": rope.type} | {name: value for name, value in numbers.items() if value is not None}
