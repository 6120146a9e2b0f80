"""The description of a saved cache, `cache.json`, which holds a digest of itself, and checks of the arrays that it
describes."""

import hashlib
import json
import math
import re
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.cache.max_entries import POSITION
from kvjax.cache.packed_entries import ORIGIN, Arrays, places
from kvjax.cache.pages import SCALE
from kvjax.errors import LARGEST_INT, UserError, shown

DESCRIPTION = "cache.json"
FORMAT = 2
"""The version of the folder's format. Any other version is refused."""
FOLDER = re.compile(r"arrays-[0-9a-f]{8}")
"""Name of the folder with the arrays."""
LARGEST_DESCRIPTION = 64 * 2**20
"""The most bytes of `cache.json`."""
DTYPES = "float32", "bfloat16", "float16"
"""Dtypes of keys and values."""
NUMBERS = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int32": 4,
    "uint32": 4,
    "uint8": 1,
    "int8": 1,
    "bool": 1,
}
"""Dtypes of arrays, and the bytes of a number."""


def _text(x: Any) -> bool:
    return isinstance(x, str) and len(x) <= 4096


def _count(x: Any, least: int = 0, most: int = LARGEST_INT) -> bool:
    return type(x) is int and least <= x <= most


def _positive(x: Any) -> bool:
    return _count(x, 1)


def _listed(x: Any, kind: Callable[[Any], bool]) -> bool:
    return isinstance(x, list) and all(map(kind, x))


def _named(x: Any, kind: Callable[[Any], bool]) -> bool:
    return isinstance(x, dict) and all(map(kind, x.values()))


def _dtype(x: Any) -> bool:
    return isinstance(x, str) and x in NUMBERS


def _array(x: Any) -> bool:
    return (
        isinstance(x, dict)
        and _listed(x.get("shape"), _count)
        and len(x["shape"]) <= 32
        and _dtype(x.get("dtype"))
    )


FIELDS: dict[str, Callable[[Any], bool]] = {
    "kvjax": _text,
    "contents": _text,
    "policy": _text,
    "window": _positive,
    "page_size": lambda x: _count(x, 1, 1 << 14),
    "dtype": DTYPES.__contains__,
    "selects": lambda x: type(x) is bool,
    "metadata": lambda x: _named(x, _dtype),
    "tokens": lambda x: _listed(x, lambda n: _count(n, 1, LARGEST_INT // 2)) and len(x) > 0,
    "origin": lambda x: x is None or _listed(x, _count),  # only where tokens of the window were dropped
    "held": lambda x: (
        _listed(x, lambda row: _listed(row, _count) and 0 < len(row) == len(x[0])) and len(x) > 0
    ),
    "folder": lambda x: isinstance(x, str) and FOLDER.fullmatch(x) is not None,
    "files": lambda x: _named(x, _text),
    "arrays": lambda x: _named(x, _array) and {"entries", "ring", "seen", "length"} <= x.keys(),
    "trained": lambda x: x is None or _named(x, _text),  # older files have none
    "made_for": lambda x: _named(x, _text) and {"model", "fingerprint"} <= x.keys(),
}
"""A check of the value of each field."""


def sealed(description: Mapping[str, Any]) -> str:
    """Return the digest of a description, without the digest that it holds."""
    own = {name: x for name, x in description.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()


def describe_cache(path: str | Path) -> dict[str, Any]:
    """Return the fields of `cache.json`: among others "policy", "tokens" of each sequence, "held" entries of each layer
    and KV head, and "bytes" of the arrays.

    Raises UserError if there is none, or one that was changed, is of another version or contradicts itself.
    """
    file = Path(path) / DESCRIPTION
    try:
        if not (file.exists() or file.is_symlink()):
            raise UserError(f"{path}: no cache is saved here: it has no {DESCRIPTION}")
        size = file.lstat()
        if not stat.S_ISREG(size.st_mode) or size.st_size > LARGEST_DESCRIPTION:
            raise UserError(f"{file}: damaged (no file of at most {LARGEST_DESCRIPTION // 2**20} MiB)")
        found = json.loads(file.read_text(encoding="utf-8"))
        whole = found["sha256"] == sealed(found)
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{file}: damaged ({shown(error)})") from None
    if type(found.get("format")) is not int or found["format"] != FORMAT:
        raise UserError(
            f"{file}: saved in format {shown(found.get('format'))} by kvjax {shown(found.get('kvjax'))}, this reads "
            f"{FORMAT}"
        )
    if not whole:
        raise UserError(f"{file}: it was changed since it was written")
    for name, fits in FIELDS.items():
        if not fits(found.get(name)):
            raise UserError(f"{file}: damaged ({name} is {shown(found.get(name))})")
    counted, tokens, slots = counted_tokens(found), found["tokens"], found["window"] - 1
    if len(counted) != len(tokens) or min(counted) < 0:
        raise UserError(f"{file}: damaged (origin is {shown(found['origin'])})")
    least, most = sum(min(n, slots) for n in counted), sum(tokens)
    if not all(least <= held <= most for row in found["held"] for held in row):
        raise UserError(
            f"{file}: damaged (held is {shown(found['held'])}, expected {least} to {most} of each head)"
        )
    for name, (shape, dtype) in described_arrays(found).items():
        own = found["arrays"].get(name)
        if own is None or own["shape"] != shape or own["dtype"] != dtype:
            raise UserError(
                f"{file}: damaged (array {name} is {shown(own)}, expected {dtype} of shape {shape})"
            )
    size = sum(math.prod(x["shape"]) * NUMBERS[x["dtype"]] for x in found["arrays"].values())
    if found.get("bytes") != size:
        raise UserError(f"{file}: damaged (bytes is {shown(found.get('bytes'))}, expected {size})")
    return found


def counted_tokens(found: Mapping[str, Any]) -> list[int]:
    """Return the tokens of each sequence that its local window counts (`Cache.counted`)."""
    tokens, origin = found["tokens"], found.get("origin")
    return tokens if origin is None else [n - o for n, o in zip(tokens, origin, strict=False)]


def described_arrays(found: Mapping[str, Any]) -> dict[str, tuple[list[int], str]]:
    """Return the shapes and dtypes that the arrays must have, given the description's tokens, layers and heads. Those
    of the methods' memories are not included: they depend on the policy."""
    layers, heads, sequences, slots = (
        len(found["held"]), len(found["held"][0]), len(found["tokens"]), found["window"] - 1,
    )  # fmt: skip
    ring = sum(min(tokens, slots) for tokens in counted_tokens(found)) * layers * heads
    stored = sum(map(sum, found["held"])) - ring
    width = found["arrays"]["entries"]["shape"][-1:]
    by_slot = [layers, sequences, heads, slots]
    metadata, int8 = found["metadata"].items(), SCALE in found["metadata"]
    dtype = "int8" if int8 else found["dtype"]
    key_scale = {"key_scale": ([layers, sequences, heads, width[0] // 2], "float32")} if int8 else {}
    origin = {} if found.get("origin") is None else {"origin": ([sequences], "int32")}
    return (
        key_scale
        | origin
        | {
            "entries": ([stored, *width], dtype),
            "ring": ([ring, *width], dtype),
            "seen": ([sequences], "int32"),
            "length": ([layers, sequences, heads], "int32"),
            "priority": (by_slot, "float32"),
            **{f"metadata.{name}": ([stored], dtype) for name, dtype in metadata},
            **{
                f"numbers.{name}": (by_slot, dtype)
                for name, dtype in metadata
                if f"numbers.{name}" in found["arrays"]
            },
        }
    )


def check_lengths(path: Path, found: Mapping[str, Any], arrays: Arrays) -> None:
    """Refuse tokens and lengths that are not those of the description, or that no cache has."""
    seen, length, slots = arrays["seen"], arrays["length"], found["window"] - 1
    beyond = np.maximum(seen.astype(np.int64) - slots, 0)[:, None]
    origin = arrays[ORIGIN].tolist() if ORIGIN in arrays else None
    held = (length.astype(np.int64) + np.minimum(counted_tokens(found), slots)[:, None]).sum(1)
    missing = found["policy"] == "full" and POSITION not in found["metadata"] and (length < beyond).any()
    other = (seen.tolist(), origin) != (found["tokens"], found.get("origin"))
    if other or (length < 0).any() or (length > beyond).any() or missing:
        raise UserError(f"{path}: damaged, its rows have other lengths than its tokens allow")
    if held.tolist() != found["held"]:
        raise UserError(f"{path}: damaged, its rows have other lengths than {DESCRIPTION} says")


def check_numbers(path: Path, arrays: Arrays, window: int) -> None:
    """Refuse numbers that are not finite, and positions that no entry has. A priority may be infinite, or NaN in the
    window, where it is not known yet; a method's state may be -inf."""
    for name, x in arrays.items():
        if x.dtype.kind not in "fV":
            continue
        x = x.astype(np.float32)
        wrong = ~np.isfinite(x)
        if name.startswith("state"):
            wrong &= ~np.isneginf(x)
        elif name.startswith(("priority", "numbers.", "metadata.")):
            wrong = np.isnan(x) & (name != "priority")
        if wrong.any():
            raise UserError(f"{path}: damaged, its {name} is not finite")
    if (position := arrays.get(f"metadata.{POSITION}")) is not None:
        row = places(arrays["length"]).row
        heads = arrays["length"].shape[2]
        sequence = row // heads % len(arrays["seen"])
        if ((position < 0) | (position > (arrays["seen"] - window)[sequence])).any():
            raise UserError(f"{path}: damaged, an entry has a position that its sequence has not")
