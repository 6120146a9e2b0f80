"""Text and chat messages as a model's tokens, through the tokenizer's chat template where it has one."""

from collections.abc import Mapping
from typing import Any, Literal

from kvjax.chat_template import PLACE, around, templated, token_ids
from kvjax.errors import UserError, check_unicode, shown


def encode(tokenizer: Any, prompt: Any, part: Literal["whole", "beginning", "end"] = "whole") -> list[int]:
    """The tokens of a text, which is a user's turn where there is a chat template, or of a chat's messages
    (`{"role": …, "content": …}`), of which the last is the user's.

    part: "whole" ends where the model answers. "beginning" leaves the last turn open, for texts to come, and "end" is
    such a text: it closes the turn.

    Raises UserError for what is neither, and for messages without a template or as an end.
    """
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if isinstance(prompt, str):
        check_unicode(prompt)
        messages = [{"role": "user", "content": prompt}]
        if not has_template:
            return token_ids(tokenizer, prompt, **{} if part == "end" else {"add_special_tokens": True})
        if part == "end":
            return token_ids(tokenizer, prompt + around(tokenizer)[1])
    else:
        messages = _messages(prompt)
        if not has_template:
            raise UserError(
                "chat messages need a tokenizer with a chat template, and this one has none: give text"
            )
        if part == "end":
            raise UserError(
                "a cache is continued by text or token ids, which end its last turn, not by chat messages"
            )
    if part == "beginning":
        last = messages[-1] | {"content": messages[-1]["content"] + PLACE}
        return token_ids(tokenizer, around(tokenizer, [*messages[:-1], last])[0])
    return token_ids(tokenizer, templated(tokenizer, messages))


def is_chat(prompt: Any) -> bool:
    """Whether it looks like a chat's messages."""
    return isinstance(prompt, list | tuple) and bool(prompt) and isinstance(prompt[0], Mapping)


def _messages(prompt: Any) -> list[dict[str, Any]]:
    def is_message(one: Any) -> bool:
        return isinstance(one, Mapping) and all(isinstance(one.get(key), str) for key in ("role", "content"))

    if not is_chat(prompt) or not all(map(is_message, prompt)):
        raise UserError(
            f"a prompt is a text or a chat, [{{'role': 'user', 'content': …}}], got {shown(prompt)}"
        )
    for one in prompt:
        check_unicode(one["content"])
    return [dict(one) for one in prompt]
