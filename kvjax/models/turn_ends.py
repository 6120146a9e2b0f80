"""The tokens with which a chat template ends the model's turn, which a model's files do not always name as its end."""

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
    """Return the tokens that end a turn in a chat template, and their ids.

    They are the known ones that it contains. If it contains none, it is the token that it shows behind an assistant's
    text. A template that fails has none.

    tokens: those that may end a turn. special: the texts of `bos_token`, `eos_token` and so on, which templates use.
    """
    ends = [token for token in _KNOWN if token in template and token in tokens]
    if not ends:
        try:
            shown = render(template, {"messages": CONVERSATION, "add_generation_prompt": False, **special})
        except UserError:
            return {}
        parts = shown.split(PLACE)
        behind = parts[2].lstrip() if len(parts) == len(CONVERSATION) + 1 else ""
        ends = sorted((token for token in tokens if token and behind.startswith(token)), key=len)[-1:]
    return {token: tokens[token] for token in ends}


def folder_turn_ends(folder: Path) -> dict[str, int]:
    """The same of the tokenizer in a model's folder. One that cannot be read has none: its loading will say why."""
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
    return JsonObject.read(file, most) if file.exists() else JsonObject({}, str(file))


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
        {"id": int(id_), **token}
        for id_, token in listed.items()
        if id_.isdecimal() and len(id_) < 20 and isinstance(token, dict)
    ]
    if not tokens and (old := _read(folder / "added_tokens.json").data):
        tokens = [{"id": id_, "content": token} for token, id_ in old.items()]
    if not tokens:
        tokens = _read(folder / "tokenizer.json", VOCABULARY_BYTES).get("added_tokens", list, [])
    each = [JsonObject(token, config.where) for token in tokens if isinstance(token, dict)]
    return {token.get("content", str): token.get("id", int) for token in each}
