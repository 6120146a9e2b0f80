"""The files that make a tokenizer, checked before transformers reads them.

The checks refuse what makes a small file cause unlimited work, or end the process, inside the tokenizers library. The
time of a regex is not bounded beyond that library's own limit for one match.
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
"""The folder of the templates that have names."""
_STEPS, _GROWTH, _LETTERS, _IDS, _ADDED = 100, 10_000, 1024, 2**22, 100_000
"""Most steps around a tokenizer's model, times that they lengthen a text, characters of a token, token ids, and added
tokens."""
_LENGTHENS = {
    "ByteLevel": 2,
    "Lowercase": 2,
    "BertNormalizer": 2,
    "Metaspace": 4,
    "NFC": 3,
    "NFD": 3,
    "NFKC": 11,
    "NFKD": 11,
}
"""The most times that a step lengthens a text, in bytes of UTF-8."""


def copy_tokenizer_files(folder: Path, to: Path) -> JsonObject:
    """Copy the files that make a tokenizer, without entries that name other files or code, and return
    tokenizer_config.json.

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
        for listed in (added, *(value for value in keys.data.values() if isinstance(value, list))):
            _check_added(keys, listed)
        for id_ in added.values() if name == "added_tokens.json" else added:
            if not str(id_).isdecimal() or int(id_) >= _IDS:
                raise keys.error(f"an added token has the id {shown(id_)}, expected one below {_IDS:,}")


def _check_lengths(keys: JsonObject, tokens: Iterable[Any]) -> None:
    if longest := max((len(x) for x in tokens if isinstance(x, str) and len(x) > _LETTERS), default=0):
        raise keys.error(f"a token has {longest:,} characters, expected at most {_LETTERS:,}")


def _check_added(keys: JsonObject, added: Sized) -> None:
    if len(added) > _ADDED:
        raise keys.error(f"it has {len(added):,} added tokens, expected at most {_ADDED:,}")


def _check_pieces(data: bytes, file: Path) -> None:
    """Refuse a SentencePiece model with a piece (field 1 of the message) so long that taking it apart would not end."""
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while at < len(data):
            value, shift, at = value | (data[at] & 127) << shift, shift + 7, at + 1
            if data[at - 1] < 128 or shift > 63:
                break
        return value

    while at < len(data):
        field, kind = divmod(number(), 8)
        size = {0: 0, 1: 8, 2: -1, 5: 4}.get(kind, len(data))
        if kind == 0:
            number()
        size = number() if size < 0 else size
        if field == 1 and size > 4 * _LETTERS:
            raise UserError(f"{file}: a piece has {size:,} bytes, expected at most {4 * _LETTERS:,}")
        at += size


def _check_steps(keys: JsonObject) -> None:
    """Refuse normalizers and the like that have too many steps, or that lengthen a text without measure."""
    _check_added(keys, keys.get("added_tokens", list))
    vocabulary = keys.get("model", dict).get("vocab")
    pieces = (piece[0] if isinstance(piece, list) and piece else piece for piece in vocabulary or ())
    _check_lengths(keys, pieces)
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        growth = 1
        for number, step in enumerate(_steps(keys.get(name, dict, {}))):
            growth *= _lengthening(JsonObject(step, f"{keys.where}: {name}"))
            if number >= _STEPS:
                raise keys.error(f"its {name} has more than {_STEPS} steps")
            if growth > _GROWTH:
                raise keys.error(f"its {name} may lengthen a text more than {_GROWTH:,} times")


def _steps(part: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield every step of a part, from the outside in."""
    left = [part]
    while left:
        step = left.pop()
        yield step
        left += [
            each
            for value in step.values()
            if isinstance(value, list)
            for each in value
            if isinstance(each, dict)
        ]


def _lengthening(step: JsonObject) -> int:
    """Return the most times that a step lengthens a text."""
    kind = step.data.get("type")
    if kind == "Replace":
        pattern, content = step.data.get("pattern"), len(step.get("content", str).encode(errors="replace"))
        found = pattern.get("String") if isinstance(pattern, dict) else pattern
        # a regex, like an empty text, is found anywhere
        return (
            -(-content // len(found.encode(errors="replace")))
            if isinstance(found, str) and found
            else 1 + content
        )
    if kind == "Prepend":
        return 1 + len(step.get("prepend", str).encode(errors="replace"))
    if kind == "Precompiled":
        return _longest_replacement(step.get("precompiled_charsmap", str, ""))
    if kind == "TemplateProcessing":
        texts = [step.get(name, list, []) for name in ("single", "pair")]
        tokens = [token for token in step.get("special_tokens", dict, {}).values() if isinstance(token, dict)]
        ids = [token["ids"] for token in tokens if isinstance(token.get("ids"), list)]
        return max(1, *map(len, texts)) * max([1, *map(len, ids)])
    return _LENGTHENS.get(kind, 1) if isinstance(kind, str) else 1


def _longest_replacement(encoded: str) -> int:
    """Return the bytes of the longest replacement in a SentencePiece model's table, which holds its trie's size, the
    trie and the texts."""
    try:
        table = base64.b64decode(encoded)
        (size,) = struct.unpack_from("<I", table)
    except (ValueError, struct.error):
        return 1  # the library will say that it is none
    return max(1, *map(len, table[4 + size :].split(b"\0")))
