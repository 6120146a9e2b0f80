"""Conversations as documents: records whose `messages` are a chat, such as Nemotron-Math-v2's."""

import json
from collections.abc import Mapping
from typing import Any

from kvjax.chat_template import templated, token_ids
from kvjax.errors import UserError, shown

COLUMNS = "text", "messages"
"""Of a record: a text, or a chat."""
THINKING = "<think>\n{}\n</think>\n\n{}"
"""Where a template has no place for an answer's reasoning."""


class Conversation(str):
    """A document that is a chat: the JSON of its messages."""

    @classmethod
    def of(cls, messages: Any) -> "Conversation":
        """Of a record's `messages`: each a `role`, a `content`, which may be None, and perhaps a `reasoning_content`.

        Raises ValueError for what is none.
        """
        listed = messages if isinstance(messages, list | tuple) else ()
        if not listed or not all(isinstance(x, Mapping) and isinstance(x.get("role"), str) for x in listed):
            raise ValueError(f"messages must be a chat, [{{'role': …, 'content': …}}], got {shown(messages)}")
        kept = [{key: value for key, value in message.items() if value is not None} for message in listed]
        return cls(json.dumps(kept, ensure_ascii=False))

    def tokens(self, tokenizer: Any) -> list[int]:
        """The whole chat as the tokenizer's template writes it, reasoning included. Raises UserError without a
        template."""
        template = getattr(tokenizer, "chat_template", None)
        if not template:
            raise UserError(
                "--data: has chats, for which the model's tokenizer has no chat template: give texts"
            )
        messages = [dict(content="") | message for message in json.loads(self)]
        if "reasoning_content" not in str(template):
            messages = [_thinking(message) for message in messages]
        return token_ids(tokenizer, templated(tokenizer, messages, add_generation_prompt=False))


def document(record: Mapping[str, Any]) -> str:
    """A record's `text`, or the chat of its `messages`. Raises ValueError if it has neither."""
    if isinstance(text := record.get("text"), str):
        return text
    return Conversation.of(record.get("messages"))


def _thinking(message: dict[str, Any]) -> dict[str, Any]:
    reasoning = message.pop("reasoning_content", None)
    return message if not reasoning else message | {"content": THINKING.format(reasoning, message["content"])}
