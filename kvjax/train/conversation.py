"""Conversations as documents: records whose `messages` are a chat, such as Nemotron-Math-v2's."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Int

from kvjax.chat_template import templated, token_ids
from kvjax.errors import UserError, shown

COLUMNS = "text", "messages"
"""The columns of a record's text and of its chat."""
THINKING = "<think>\n{}\n</think>\n\n{}"
"""The content of an answer with reasoning, for templates without `reasoning_content`."""


class Conversation(str):
    """A document that is a chat: the JSON of its messages."""

    @classmethod
    def of(cls, messages: Any) -> "Conversation":
        """Return the chat of a record's `messages`. Each has a `role`, a `content`, which may be None, and perhaps a
        `reasoning_content`.

        Raises ValueError if they are not a chat.
        """
        if not isinstance(messages, list | tuple) or not all(map(_is_message, messages)):
            raise ValueError(f"messages must be a chat, [{{'role': …, 'content': …}}], got {shown(messages)}")
        fields = [{key: value for key, value in message.items() if value is not None} for message in messages]
        try:
            return cls(json.dumps(fields, ensure_ascii=False))
        except (TypeError, RecursionError):  # dates, bytes and deep nesting of a Parquet file
            raise ValueError(f"messages must hold JSON values, got {shown(messages)}") from None

    def written(self, tokenizer: Any) -> str:
        """Return the whole chat as the tokenizer's template writes it, reasoning included.

        Raises UserError if there is no template, or if it does not accept the chat.
        """
        template = getattr(tokenizer, "chat_template", None)
        if not template:
            raise UserError("has chats, but the model's tokenizer has no chat template: give texts")
        messages = [dict(content="") | message for message in json.loads(self)]
        if "reasoning_content" not in str(template):
            messages = [_with_inline_reasoning(message) for message in messages]
        return templated(tokenizer, messages, add_generation_prompt=False)

    def tokens(self, tokenizer: Any) -> Int[np.ndarray, " t"]:
        """Return the tokens of the `written` chat."""
        return np.asarray(token_ids(tokenizer, self.written(tokenizer)), np.int32)


def chat_check(tokenizer: Any) -> Callable[[str], None]:
    """Return a function that raises UserError for a chat that the tokenizer's template does not accept. Of chats with
    the same roles and keys only the first is tried, since applying a template takes half a millisecond."""
    accepted = set[tuple[Any, ...]]()

    def check(text: str) -> None:
        if isinstance(text, Conversation):
            shape = tuple((message["role"], *message) for message in json.loads(text))
            if shape not in accepted:
                text.written(tokenizer)
                accepted.add(shape)

    return check


def document(record: Any) -> str:
    """Return a record's `text` or the chat of its `messages`, an empty text if these are null or empty.

    Raises ValueError if the record has neither.
    """
    fields = record if isinstance(record, Mapping) else {}
    if isinstance(text := fields.get("text"), str):
        return text
    if text is None and fields.get("messages"):
        return Conversation.of(fields["messages"])
    if text is None and fields.get("messages") in (None, []) and fields.keys() & set(COLUMNS):
        return ""
    raise ValueError(f'expected a record such as {{"text": "…"}}, got {shown(record)}')


def _is_message(message: Any) -> bool:
    texts = (
        [message.get(name) for name in ("content", "reasoning_content")]
        if isinstance(message, Mapping)
        else [0]
    )
    return all(isinstance(text, str | None) for text in texts) and isinstance(message.get("role"), str)


def _with_inline_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    reasoning = message.pop("reasoning_content", None)
    return message if not reasoning else message | {"content": THINKING.format(reasoning, message["content"])}
