"""Rotary embeddings in `config.json`, in the spellings of transformers 4 and 5. Misread values make a silently wrong
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
"""The numbers that each rope type reads. `original_length` has a default in every type; of the others, only some of
YaRN and LongRoPE have one."""
_SPELLING = {"original_length": "original_max_position_embeddings"}
_TYPES = {"original_length": int, "truncate": bool, "short_factor": list, "long_factor": list}


def _spellings(keys: JsonObject) -> list[JsonObject]:
    """Return the objects under `rope_scaling` (transformers 4) and `rope_parameters` (transformers 5), if present."""
    objects = {name: keys.get(name, dict, None) for name in ("rope_scaling", "rope_parameters")}
    return [JsonObject(data, f"{keys.where}: {name}") for name, data in objects.items() if data]


def rope_share(keys: JsonObject) -> float:
    """Return the share of a head's dimensions that is rotated, from either spelling."""
    shares = [source.get("partial_rotary_factor", float, None) for source in (keys, *_spellings(keys))]
    return next((share for share in shares if share is not None), 1.0)


def read_rope(
    keys: JsonObject, max_length: int | None, share: float = 1.0, theta: float = 10_000.0
) -> RopeConfig:
    """Read either spelling: `rope_theta` and `rope_scaling` (transformers 4), or both in `rope_parameters` (5).

    Args:
        share: the expected share of rotated dimensions of a head. A different one in the file is refused.
        theta: the base if the file has none.
    """
    inner = _spellings(keys)
    for source in inner:
        if any(isinstance(value, dict) for value in source.data.values()):
            raise source.error("rotary embeddings that differ by layer are not supported")
    for source in (keys, *inner):
        if source.get("partial_rotary_factor", float, share) != share:
            raise source.error(f"a partial_rotary_factor other than {share:g} is not supported")
    thetas = {source.get("rope_theta", float, None) for source in (keys, *inner)} - {None}
    if len(thetas) > 1:
        raise keys.error(f"rope_theta is given as {' and as '.join(f'{t:g}' for t in sorted(thetas))}")
    theta = thetas.pop() if thetas else theta
    configs = {
        _read_numbers(keys, source, max_length, theta=theta, share=share)
        for source in inner or [JsonObject({}, keys.where)]
    }
    if len(configs) > 1:
        raise keys.error("rope_scaling and rope_parameters contradict each other")
    return configs.pop()


def _read_numbers(keys: JsonObject, inner: JsonObject, max_length: int | None, **shared: float) -> RopeConfig:
    rope_type = inner.get("rope_type", str, None) or inner.get("type", str, "default")
    if inner.data.get("long_factor"):
        rope_type = "longrope"  # Phi-3's files also call it su and yarn
    if rope_type not in ROPE_TYPES:
        raise inner.error(f"rope type {rope_type!r} is not supported, only {', '.join(ROPE_TYPES)}")
    context = keys.get("max_position_embeddings", int)
    numbers: dict[str, Any] = {}
    for name in _NUMBERS[rope_type]:
        has_default = rope_type == "yarn" or name in ("original_length", "attention_factor")
        has_default |= (rope_type, name) == ("longrope", "factor")
        default = (None,) if has_default else ()
        numbers[name] = inner.get(_SPELLING.get(name, name), _TYPES.get(name, float), *default)
    if "original_length" in numbers:
        declared = keys.get("original_max_position_embeddings", int, None)
        default = None if rope_type == "longrope" else context
        numbers["original_length"] = declared or numbers["original_length"] or default
        if numbers["original_length"] is None:
            raise inner.error("original_max_position_embeddings is missing")
    if "factor" in numbers and numbers["factor"] is None:
        numbers["factor"] = context / max(numbers["original_length"], 1)
    if rope_type == "longrope":
        numbers |= {name: _factors(inner, name) for name in ("short_factor", "long_factor")}
        # only two values are used, so that models read with different max_length on the same side are equal
        longer = (max_length or context) > numbers["original_length"]
        numbers["length"] = context if longer else numbers["original_length"]
    if rope_type == "dynamic":
        numbers |= {"original_length": context, "length": max(max_length or context, context)}
    numbers = {name: value for name, value in numbers.items() if value is not None}
    try:
        return RopeConfig(type=rope_type, **shared, **numbers)
    except UserError as error:
        raise inner.error(str(error)) from None


def _factors(inner: JsonObject, name: str) -> tuple[float, ...]:
    values = inner.get(name, list)
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        raise inner.error(f"{name} must be a list of numbers")
    return tuple(JsonObject({name: value}, inner.where).get(name, float) for value in values)


def rope_scaling(rope: RopeConfig) -> dict[str, Any] | None:
    """Return the `rope_scaling` that `read_rope` reads, without theta and without the length at which "dynamic" and
    "longrope" were fixed."""
    if rope.type == "default":
        return None
    numbers = {_SPELLING.get(name, name): getattr(rope, name) for name in _NUMBERS[rope.type]}
    numbers = {name: [*value] if isinstance(value, tuple) else value for name, value in numbers.items()}
    return {"rope_type": rope.type} | {name: value for name, value in numbers.items() if value is not None}
