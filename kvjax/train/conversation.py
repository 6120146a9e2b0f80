"""Conversations as documents: records whose `messages` are a chat, such as Nemotron-Math-v2's."""

import json
from collections.abc import Mapping
from typing import Any

from kvjax.chat_template import templated
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
        if not listed or not all(map(_is_message, listed)):
            raise ValueError(f"messages must be a chat, [{{'role': …, 'content': …}}], got {shown(messages)}")
        kept = [{key: value for key, value in message.items() if value is not None} for message in listed]
        try:
            return cls(json.dumps(kept, ensure_ascii=False))
        except (TypeError, RecursionError):
            raise ValueError(f"messages must hold strings, got {shown(messages)}") from None

    def tokens(self, tokenizer: Any) -> list[int]:
        """Return the tokens of the whole chat as the tokenizer's template writes it, reasoning included.

        Raises UserError without a template, or for a chat that it does not take.
        """
        return list(self._templated(tokenizer, return_dict=False))

    def check(self, tokenizer: Any) -> None:
        """Raise what `tokens` would, at less cost."""
        self._templated(tokenizer, tokenize=False)

    def _templated(self, tokenizer: Any, **options: Any) -> Any:
        template = getattr(tokenizer, "chat_template", None)
        if not template:
            raise UserError(
                "--data: has chats, for which the model's tokenizer has no chat template: give texts"
            )
        messages = [dict(content="") | message for message in json.loads(self)]
        if "reasoning_content" not in str(template):
            messages = [_thinking(message) for message in messages]
        return templated(tokenizer, messages, add_generation_prompt=False, **options)


def document(record: Mapping[str, Any]) -> str:
    """Return a record's `text`, or the chat of its `messages`; "" where both are null.

    Raises ValueError if it has neither, or half of a surrogate pair in it, which no tokenizer takes.
    """
    if not set(COLUMNS) & set(record):
        raise ValueError(f"neither `text` nor `messages`, but {shown(', '.join(map(str, record)))}")
    text, messages = record.get("text"), record.get("messages")
    if not isinstance(text, str):
        if text is None and messages is None:
            return ""
        if messages is None:
            raise ValueError(f"text must be a string, got {shown(text)}")
        text = Conversation.of(messages)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"half of a surrogate pair at character {error.start}") from None
    return text


def check_chat(text: str, tokenizer: Any) -> None:
    """Refuse a chat that the tokenizer's template does not take. Raises UserError."""
    if isinstance(text, Conversation):
        text.check(tokenizer)


def _is_message(message: Any) -> bool:
    return (
        isinstance(message, Mapping)
        and isinstance(message.get("role"), str)
        and all(isinstance(message.get(key), str | None) for key in ("content", "reasoning_content"))
    )


def _thinking(message: dict[str, Any]) -> dict[str, Any]:
    reasoning = message.pop("reasoning_content", None)
    return message if not reasoning else message | {"content": THINKING.format(reasoning, message["content"])}
