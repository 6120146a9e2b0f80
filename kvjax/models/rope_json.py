"""Rotary embeddings in `config.json`, whose spelling changed: a theta read wrongly is a silently wrong model."""

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
}  # fmt: skip
"""What each rope type reads. Only YaRN has defaults for its numbers; `original_length` always has one."""
_SPELLING = {"original_length": "original_max_position_embeddings"}
_KIND = {"original_length": int, "truncate": bool}


def read_rope(keys: JsonObject, max_length: int | None) -> RopeConfig:
    """Both spellings: `rope_theta` beside `rope_scaling` (transformers 4), `rope_parameters` with both in it (5)."""
    spelled = {name: keys.get(name, dict, None) for name in ("rope_scaling", "rope_parameters")}
    inner = [JsonObject(data, f"{keys.where}: {name}") for name, data in spelled.items() if data]
    for each in inner:
        if any(isinstance(value, dict) for value in each.data.values()):
            raise each.error("rotary embeddings that differ by layer are not supported")
        if each.get("partial_rotary_factor", float, 1.0) != 1:
            raise each.error("a partial_rotary_factor other than 1 is not supported")
    if keys.get("partial_rotary_factor", float, 1.0) != 1:
        raise keys.error("a partial_rotary_factor other than 1 is not supported")
    thetas = {theta for each in (keys, *inner) if (theta := each.get("rope_theta", float, None)) is not None}
    if len(thetas) > 1:
        raise keys.error(f"rope_theta is given as {' and as '.join(f'{t:g}' for t in sorted(thetas))}")
    theta = thetas.pop() if thetas else 10_000.0
    read = {_read_numbers(keys, each, theta, max_length) for each in inner or [JsonObject({}, keys.where)]}
    if len(read) > 1:
        raise keys.error("rope_scaling and rope_parameters contradict each other")
    return read.pop()


def _read_numbers(keys: JsonObject, inner: JsonObject, theta: float, max_length: int | None) -> RopeConfig:
    rope_type = inner.get("rope_type", str, None) or inner.get("type", str, "default")
    if rope_type not in ROPE_TYPES:
        raise inner.error(f"rope type {rope_type!r} is not supported, only {', '.join(ROPE_TYPES)}")
    context = keys.get("max_position_embeddings", int)
    numbers: dict[str, Any] = {}
    for name in _NUMBERS[rope_type]:
        default = (None,) if rope_type == "yarn" or name == "original_length" else ()
        numbers[name] = inner.get(_SPELLING.get(name, name), _KIND.get(name, float), *default)
    if "original_length" in numbers:
        declared = keys.get("original_max_position_embeddings", int, None)
        numbers["original_length"] = declared or numbers["original_length"] or context
    if rope_type == "yarn" and numbers["factor"] is None:
        numbers["factor"] = context / max(numbers["original_length"], 1)
    if rope_type == "dynamic":
        numbers |= {"original_length": context, "length": max(max_length or context, context)}
    numbers = {name: value for name, value in numbers.items() if value is not None}
    try:
        return RopeConfig(type=rope_type, theta=theta, **numbers)
    except UserError as error:
        raise inner.error(str(error)) from None


def rope_scaling(rope: RopeConfig) -> dict[str, Any] | None:
    """The inverse of `read_rope`, without theta. "dynamic" goes back to one that is not fixed at a length."""
    if rope.type == "default":
        return None
    numbers = {_SPELLING.get(name, name): getattr(rope, name) for name in _NUMBERS[rope.type]}
    return {"rope_type": rope.type} | {name: value for name, value in numbers.items() if value is not None}
