"""The description of a saved cache, `cache.json`, and checks of the arrays that it describes. The description holds a
digest of itself."""

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
"""The version of the folder's format. Other versions are refused."""
FOLDER = re.compile(r"arrays-[0-9a-f]{8}")
"""Name of the folder with the arrays."""
LARGEST_DESCRIPTION = 64 * 2**20
"""The most bytes of `cache.json`."""
DTYPES = "float32", "bfloat16", "float16"
"""Dtypes of keys and values."""
ITEM_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int32": 4,
    "uint32": 4,
    "uint8": 1,
    "int8": 1,
    "bool": 1,
}
"""Dtypes of arrays, and the bytes of a number in each."""


def _is_text(x: Any) -> bool:
    return isinstance(x, str) and len(x) <= 4096


def _is_count(x: Any, smallest: int = 0, largest: int = LARGEST_INT) -> bool:
    return type(x) is int and smallest <= x <= largest


def _is_positive(x: Any) -> bool:
    return _is_count(x, 1)


def _is_list(x: Any, kind: Callable[[Any], bool]) -> bool:
    return isinstance(x, list) and all(map(kind, x))


def _is_mapping(x: Any, kind: Callable[[Any], bool]) -> bool:
    return isinstance(x, dict) and all(map(kind, x.values()))


def _is_dtype(x: Any) -> bool:
    return isinstance(x, str) and x in ITEM_BYTES


def _is_array(x: Any) -> bool:
    return (
        isinstance(x, dict)
        and _is_list(x.get("shape"), _is_count)
        and len(x["shape"]) <= 32
        and _is_dtype(x.get("dtype"))
    )


FIELDS: dict[str, Callable[[Any], bool]] = {
    "kvjax": _is_text,
    "contents": _is_text,
    "policy": _is_text,
    "window": _is_positive,
    "page_size": lambda x: _is_count(x, 1, 1 << 14),
    "dtype": DTYPES.__contains__,
    "selects": lambda x: type(x) is bool,
    "metadata": lambda x: _is_mapping(x, _is_dtype),
    "tokens": lambda x: _is_list(x, lambda n: _is_count(n, 1, LARGEST_INT // 2)) and len(x) > 0,
    "origin": lambda x: x is None or _is_list(x, _is_count),  # None unless tokens of a window were dropped
    "held": lambda x: (
        _is_list(x, lambda row: _is_list(row, _is_count) and 0 < len(row) == len(x[0])) and len(x) > 0
    ),
    "folder": lambda x: isinstance(x, str) and FOLDER.fullmatch(x) is not None,
    "files": lambda x: _is_mapping(x, _is_text),
    "arrays": lambda x: _is_mapping(x, _is_array) and {"entries", "ring", "seen", "length"} <= x.keys(),
    "trained": lambda x: x is None or _is_mapping(x, _is_text),  # older files have none
    "made_for": lambda x: _is_mapping(x, _is_text) and {"model", "fingerprint"} <= x.keys(),
}
"""For each field, the check of its value."""


def digest_of(description: Mapping[str, Any]) -> str:
    """Return the digest of a description's fields without "sha256", which holds the digest."""
    fields = {name: x for name, x in description.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def describe_cache(path: str | Path) -> dict[str, Any]:
    """Return the fields of `cache.json`, such as "policy", "tokens" of each sequence, "held" entries of each layer and
    KV head, and "bytes" of the arrays.

    Raises UserError if the file does not exist, was changed, has another version or contradicts itself.
    """
    file = Path(path) / DESCRIPTION
    try:
        if not (file.exists() or file.is_symlink()):
            raise UserError(f"{path}: no cache is saved here: it has no {DESCRIPTION}")
        status = file.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > LARGEST_DESCRIPTION:
            raise UserError(f"{file}: damaged (no file of at most {LARGEST_DESCRIPTION // 2**20} MiB)")
        description = json.loads(file.read_text(encoding="utf-8"))
        unchanged = description["sha256"] == digest_of(description)
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{file}: damaged ({shown(error)})") from None
    if type(description.get("format")) is not int or description["format"] != FORMAT:
        raise UserError(
            f"{file}: saved in format {shown(description.get('format'))} by kvjax {shown(description.get('kvjax'))}, "
            f"this reads {FORMAT}"
        )
    if not unchanged:
        raise UserError(f"{file}: it was changed since it was written")
    for name, is_valid in FIELDS.items():
        if not is_valid(description.get(name)):
            raise UserError(f"{file}: damaged ({name} is {shown(description.get(name))})")
    counted, tokens, slots = counted_tokens(description), description["tokens"], description["window"] - 1
    if len(counted) != len(tokens) or min(counted) < 0:
        raise UserError(f"{file}: damaged (origin is {shown(description['origin'])})")
    fewest, most = sum(min(n, slots) for n in counted), sum(tokens)
    if not all(fewest <= held <= most for row in description["held"] for held in row):
        raise UserError(
            f"{file}: damaged (held is {shown(description['held'])}, expected {fewest} to {most} of each head)"
        )
    for name, (shape, dtype) in described_arrays(description).items():
        array = description["arrays"].get(name)
        if array is None or array["shape"] != shape or array["dtype"] != dtype:
            raise UserError(
                f"{file}: damaged (array {name} is {shown(array)}, expected {dtype} of shape {shape})"
            )
    size = sum(math.prod(x["shape"]) * ITEM_BYTES[x["dtype"]] for x in description["arrays"].values())
    if description.get("bytes") != size:
        raise UserError(f"{file}: damaged (bytes is {shown(description.get('bytes'))}, expected {size})")
    return description


def counted_tokens(description: Mapping[str, Any]) -> list[int]:
    """Return the number of tokens of each sequence that its local window counts (`Cache.counted`)."""
    tokens, origin = description["tokens"], description.get("origin")
    return tokens if origin is None else [n - before for n, before in zip(tokens, origin, strict=False)]


def described_arrays(description: Mapping[str, Any]) -> dict[str, tuple[list[int], str]]:
    """Return the shapes and dtypes that the arrays must have, given the description's tokens, layers and heads. The
    methods' memories are not included, since they depend on the policy."""
    layers, heads = len(description["held"]), len(description["held"][0])
    sequences, slots = len(description["tokens"]), description["window"] - 1
    ring = sum(min(tokens, slots) for tokens in counted_tokens(description)) * layers * heads
    stored = sum(map(sum, description["held"])) - ring
    width = description["arrays"]["entries"]["shape"][-1:]
    by_slot = [layers, sequences, heads, slots]
    metadata, int8 = description["metadata"].items(), SCALE in description["metadata"]
    dtype = "int8" if int8 else description["dtype"]
    key_scale = {"key_scale": ([layers, sequences, heads, width[0] // 2], "float32")} if int8 else {}
    origin = {} if description.get("origin") is None else {"origin": ([sequences], "int32")}
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
                if f"numbers.{name}" in description["arrays"]
            },
        }
    )


def check_lengths(path: Path, description: Mapping[str, Any], arrays: Arrays) -> None:
    """Refuse tokens and lengths that differ from the description, or that no cache can have."""
    seen, length, slots = arrays["seen"], arrays["length"], description["window"] - 1
    left_window = np.maximum(seen.astype(np.int64) - slots, 0)[:, None]
    origin = arrays[ORIGIN].tolist() if ORIGIN in arrays else None
    held = (length.astype(np.int64) + np.minimum(counted_tokens(description), slots)[:, None]).sum(1)
    incomplete = (
        description["policy"] == "full"
        and POSITION not in description["metadata"]
        and (length < left_window).any()
    )
    differs = (seen.tolist(), origin) != (description["tokens"], description.get("origin"))
    if differs or (length < 0).any() or (length > left_window).any() or incomplete:
        raise UserError(f"{path}: damaged, its head caches have other lengths than its tokens allow")
    if held.tolist() != description["held"]:
        raise UserError(f"{path}: damaged, its head caches have other lengths than {DESCRIPTION} says")


def check_numbers(path: Path, arrays: Arrays, window: int) -> None:
    """Refuse numbers that are not finite, and positions that no entry can have. A priority may be infinite, and NaN in
    the window, where it is not known yet. A method's state may be -inf."""
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
            raise UserError(f"{path}: damaged, an entry has an impossible position")
