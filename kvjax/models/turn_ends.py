"""The tokens with which a chat template ends the model's turn, which a model's files do not always name as its end."""

import contextlib
import functools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvjax.chat_template import CONVERSATION, PLACE, default_template, render
from kvjax.errors import UserError
from kvjax.models.json_file import JSON_BYTES, VOCABULARY_BYTES, JsonObject, read_file

_KNOWN = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|eot|>",
    "<end_of_turn>",
    "<|end_of_turn|>",
    "<|endofturn|>",
    "[|endofturn|]",
    "<|END_OF_TURN_TOKEN|>",
    "<|return|>",
)
"""Tokens that end nothing but a turn or a message. `<|end|>` also ends parts of some models' turns."""


def turn_ends(template: str, tokens: Mapping[str, int], special: Mapping[str, Any]) -> dict[str, int]:
    """Return the tokens that end a turn in a chat template, and their ids: the known ones that it contains, and the one
    that it shows behind an assistant's text.

    tokens: those that may end a turn. special: the texts of `bos_token`, `eos_token` and so on, which templates use.
    """
    behind = _behind_an_answer(template, json.dumps(special, sort_keys=True))
    shown = sorted((token for token in tokens if token and behind.startswith(token)), key=len)[-1:]
    known = [token for token in _KNOWN if token in template and token in tokens]
    return {token: tokens[token] for token in dict.fromkeys([*known, *shown])}


@functools.lru_cache(maxsize=16)
def _behind_an_answer(template: str, special: str) -> str:
    """Return the text that a template shows behind an assistant's text; none if it takes no usual conversation."""
    system = {"role": "system", "content": "a"}
    for messages in (CONVERSATION, [system, *CONVERSATION], CONVERSATION[:2]):
        variables = {"messages": messages, "add_generation_prompt": False, **json.loads(special)}
        with contextlib.suppress(UserError):
            parts = render(template, variables).split(PLACE)
            if len(parts) > 2:
                return parts[2].lstrip()
    return ""


def folder_turn_ends(folder: Path) -> dict[str, int]:
    """Return the tokens that end a turn by the tokenizer in a model's folder, and their ids. A tokenizer that cannot be
    read has none: loading it will say why."""
    try:
        config = _read(folder / "tokenizer_config.json")
        template = _template(folder, config)
        if template is None:
            return {}
        special = {
            name: token["content"] if isinstance(token, dict) and "content" in token else token
            for keys in (_read(folder / "special_tokens_map.json"), config)
            for name, token in keys.data.items()
            if name.endswith("_token")
        }
        return turn_ends(template, _added_tokens(folder, config), special)
    except UserError:
        return {}


def _read(file: Path, most: int = JSON_BYTES) -> JsonObject:
    return JsonObject.read(file, most) if os.path.lexists(file) else JsonObject({}, str(file))


def _template(folder: Path, config: JsonObject) -> str | None:
    try:
        named = read_file(folder / "chat_template.jinja", JSON_BYTES).decode("utf-8-sig", errors="replace")
    except FileNotFoundError:
        named = config.data.get("chat_template")
    return None if named is None else default_template(named)


def _added_tokens(folder: Path, config: JsonObject) -> dict[str, int]:
    """Return the tokenizer's added tokens. The vocabulary, a large file, is read if no other file lists them."""
    listed = config.get("added_tokens_decoder", dict, {})
    tokens = [
        {**token, "id": int(id_)}
        for id_, token in listed.items()
        if id_.isdecimal() and len(id_) < 20 and isinstance(token, dict)
    ]
    if not tokens and (old := _read(folder / "added_tokens.json").data):
        tokens = [{"id": id_, "content": token} for token, id_ in old.items()]
    if not tokens:
        tokens = _read(folder / "tokenizer.json", VOCABULARY_BYTES).get("added_tokens", list, [])
    each = [JsonObject(token, config.where) for token in tokens if isinstance(token, dict)]
    return {token.get("content", str): token.get("id", int) for token in each}
