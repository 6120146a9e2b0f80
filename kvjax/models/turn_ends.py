"""The tokens with which a chat template ends the model's turn. A model's files do not always name them as eos
tokens."""

import contextlib
import functools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvjax.chat_template import CONVERSATION, PLACEHOLDER, default_template, render
from kvjax.errors import UserError
from kvjax.models.json_file import JSON_BYTES, VOCABULARY_BYTES, JsonObject, read_file

_KNOWN_ENDS = (
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
"""Tokens that end only turns or messages. `<|end|>` is missing, since in some models it also ends parts of a turn."""


def turn_ends(template: str, tokens: Mapping[str, int], special: Mapping[str, Any]) -> dict[str, int]:
    """Return the tokens that end a turn in a chat template, with their ids. These are the known ones that the template
    contains, and the one that it puts after an assistant's text.

    Args:
        tokens: the tokens that may end a turn, with their ids.
        special: the texts of `bos_token`, `eos_token` and so on, which templates use.
    """
    after = _text_after_answer(template, json.dumps(special, sort_keys=True))
    rendered = sorted((token for token in tokens if token and after.startswith(token)), key=len)[-1:]
    known = [token for token in _KNOWN_ENDS if token in template and token in tokens]
    return {token: tokens[token] for token in dict.fromkeys([*known, *rendered])}


@functools.lru_cache(maxsize=16)
def _text_after_answer(template: str, special: str) -> str:
    """Return the text that a template puts after an assistant's text; empty if it accepts no usual conversation."""
    system = {"role": "system", "content": "a"}
    for messages in (CONVERSATION, [system, *CONVERSATION], CONVERSATION[:2]):
        variables = {"messages": messages, "add_generation_prompt": False, **json.loads(special)}
        with contextlib.suppress(UserError):
            parts = render(template, variables).split(PLACEHOLDER)
            if len(parts) > 2:
                return parts[2].lstrip()
    return ""


def folder_turn_ends(folder: Path) -> dict[str, int]:
    """Return the tokens that end a turn in the chat template of a model's folder, with their ids. It is empty if the
    tokenizer cannot be read: loading it will say why."""
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
        template = read_file(folder / "chat_template.jinja", JSON_BYTES).decode("utf-8-sig", errors="replace")
    except FileNotFoundError:
        template = config.data.get("chat_template")
    return None if template is None else default_template(template)


def _added_tokens(folder: Path, config: JsonObject) -> dict[str, int]:
    """Return the tokenizer's added tokens with their ids. The large tokenizer.json is read only if no other file lists
    them."""
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
    objects = [JsonObject(token, config.where) for token in tokens if isinstance(token, dict)]
    return {token.get("content", str): token.get("id", int) for token in objects}
