"""Checks of the files of a tokenizer before transformers reads them.

The checks refuse small files that would cause unlimited work in the tokenizers library, or crash it. The time of a
regex is bounded only by that library's own limit for one match.
"""

import base64
import codecs
import json
import os
import struct
from collections.abc import Iterable, Iterator, Sized
from pathlib import Path
from typing import Any

from kvjax.errors import UserError, shown
from kvjax.models.json_file import JSON_BYTES, VOCABULARY_BYTES, JsonObject, read_file

VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")
TOKENIZER_FILES = (
    *VOCABULARIES,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
)
TEMPLATES = "additional_chat_templates"
"""The folder of named chat templates."""
_MAX_STEPS = 100
"""The maximum number of steps of each part of a tokenizer, such as its normalizer."""
_MAX_GROWTH = 10_000
"""The maximum factor by which a part of a tokenizer lengthens a text."""
_MAX_CHARACTERS = 1024
"""The maximum characters of a token."""
_MAX_ID = 2**22
"""The bound of token ids."""
_MAX_ADDED = 100_000
"""The maximum number of added tokens."""
_GROWTH = {
    "ByteLevel": 2,
    "Lowercase": 2,
    "BertNormalizer": 2,
    "Metaspace": 4,
    "NFC": 3,
    "NFD": 3,
    "NFKC": 11,
    "NFKD": 11,
}
"""The maximum factor by which a step lengthens a text, in bytes of UTF-8."""


def copy_tokenizer_files(folder: Path, to: Path) -> JsonObject:
    """Copy the files of a tokenizer without entries that name other files or code, and return tokenizer_config.json.

    Raises UserError for a file that is not what its name says, or that may cause unlimited work.
    """
    config = JsonObject({}, str(folder / "tokenizer_config.json"))
    for file in (*(folder / name for name in TOKENIZER_FILES), *(folder / TEMPLATES).glob("*.jinja")):
        if not os.path.lexists(file):
            continue
        large = file.name in (*VOCABULARIES, "merges.txt")
        data = read_file(file, VOCABULARY_BYTES if large else JSON_BYTES)
        if file.suffix == ".model":
            _check_pieces(data, file)
        else:
            data = data.removeprefix(codecs.BOM_UTF8)
        if file.suffix == ".json":
            keys = JsonObject.parse(data, str(file))
            _check(file.name, keys)
            if file.name == "tokenizer_config.json":
                config = keys
                data = json.dumps({key: value for key, value in keys.data.items() if _is_plain(key)}).encode()
        copy = to / file.relative_to(folder)
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(data)
    return config


def _is_plain(key: str) -> bool:
    """Return False for a key of tokenizer_config.json that names other files or code."""
    return key not in ("auto_map", "init_inputs") and not key.endswith(("_file", "_files"))


def _check(name: str, keys: JsonObject) -> None:
    if name == "tokenizer.json":
        _check_steps(keys)
    elif name == "vocab.json":
        _check_lengths(keys, keys.data)
    elif name in ("added_tokens.json", "tokenizer_config.json"):
        added = keys.data if name == "added_tokens.json" else keys.get("added_tokens_decoder", dict, {})
        for tokens in (added, *(value for value in keys.data.values() if isinstance(value, list))):
            _check_added(keys, tokens)
        for id_ in added.values() if name == "added_tokens.json" else added:
            if not str(id_).isdecimal() or int(id_) >= _MAX_ID:
                raise keys.error(f"an added token has the id {shown(id_)}, expected one below {_MAX_ID:,}")


def _check_lengths(keys: JsonObject, tokens: Iterable[Any]) -> None:
    if longest := max((len(x) for x in tokens if isinstance(x, str) and len(x) > _MAX_CHARACTERS), default=0):
        raise keys.error(f"a token has {longest:,} characters, expected at most {_MAX_CHARACTERS:,}")


def _check_added(keys: JsonObject, added: Sized) -> None:
    if len(added) > _MAX_ADDED:
        raise keys.error(f"it has {len(added):,} added tokens, expected at most {_MAX_ADDED:,}")


def _check_pieces(data: bytes, file: Path) -> None:
    """Refuse a SentencePiece model with a piece so long that splitting it would not end. The model is a protocol buffer
    message, whose field 1 is a piece."""
    position = 0

    def varint() -> int:
        nonlocal position
        value = shift = 0
        while position < len(data):
            value, shift, position = value | (data[position] & 127) << shift, shift + 7, position + 1
            if data[position - 1] < 128 or shift > 63:
                break
        return value

    while position < len(data):
        field, wire_type = divmod(varint(), 8)
        size = {0: 0, 1: 8, 2: -1, 5: 4}.get(wire_type, len(data))
        if wire_type == 0:
            varint()
        size = varint() if size < 0 else size
        if field == 1 and size > 4 * _MAX_CHARACTERS:
            raise UserError(f"{file}: a piece has {size:,} bytes, expected at most {4 * _MAX_CHARACTERS:,}")
        position += size


def _check_steps(keys: JsonObject) -> None:
    """Refuse a tokenizer whose parts, such as its normalizer, have too many steps or lengthen a text too much."""
    _check_added(keys, keys.get("added_tokens", list))
    vocabulary = keys.get("model", dict).get("vocab")
    pieces = (piece[0] if isinstance(piece, list) and piece else piece for piece in vocabulary or ())
    _check_lengths(keys, pieces)
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        growth = 1
        for number, step in enumerate(_steps(keys.get(name, dict, {}))):
            growth *= _growth(JsonObject(step, f"{keys.where}: {name}"))
            if number >= _MAX_STEPS:
                raise keys.error(f"its {name} has more than {_MAX_STEPS} steps")
            if growth > _MAX_GROWTH:
                raise keys.error(f"its {name} may lengthen a text more than {_MAX_GROWTH:,} times")


def _steps(part: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield every step of a part, outer steps before the steps that they contain."""
    pending = [part]
    while pending:
        step = pending.pop()
        yield step
        lists = (value for value in step.values() if isinstance(value, list))
        pending += [inner for values in lists for inner in values if isinstance(inner, dict)]


def _growth(step: JsonObject) -> int:
    """Return the maximum factor by which a step lengthens a text."""
    kind = step.data.get("type")
    if kind == "Replace":
        pattern, content = step.data.get("pattern"), len(step.get("content", str).encode(errors="replace"))
        text = pattern.get("String") if isinstance(pattern, dict) else pattern
        if isinstance(text, str) and text:
            return -(-content // len(text.encode(errors="replace")))
        # a regex or an empty text may match between any two characters
        return 1 + content
    if kind == "Prepend":
        return 1 + len(step.get("prepend", str).encode(errors="replace"))
    if kind == "Precompiled":
        return _longest_replacement(step.get("precompiled_charsmap", str, ""))
    if kind == "TemplateProcessing":
        texts = [step.get(name, list, []) for name in ("single", "pair")]
        tokens = [token for token in step.get("special_tokens", dict, {}).values() if isinstance(token, dict)]
        ids = [token["ids"] for token in tokens if isinstance(token.get("ids"), list)]
        return max(1, *map(len, texts)) * max([1, *map(len, ids)])
    return _GROWTH.get(kind, 1) if isinstance(kind, str) else 1


def _longest_replacement(encoded: str) -> int:
    """Return the bytes of the longest replacement in the table of a SentencePiece normalizer. The table holds the size
    of a trie, the trie and the replacements."""
    try:
        table = base64.b64decode(encoded)
        (size,) = struct.unpack_from("<I", table)
    except (ValueError, struct.error):
        return 1  # the library will refuse it
    return max(1, *map(len, table[4 + size :].split(b"\0")))
