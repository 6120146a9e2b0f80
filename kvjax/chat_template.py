"""A tokenizer's chat template: messages rendered by it, and what it puts around a text and before it."""

from typing import Any

import jinja2

from kvjax.errors import UserError

PLACE = "\N{OBJECT REPLACEMENT CHARACTER}"
"""Stands for the text in a rendered template."""


def templated(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> Any:
    """The messages through the chat template, which may raise whatever its author wanted; the model's turn is begun
    unless the options say otherwise."""
    try:
        return tokenizer.apply_chat_template(messages, **{"add_generation_prompt": True} | options)
    except jinja2.TemplateError as error:
        roles = ", ".join(one["role"] for one in messages)
        raise UserError(
            f"the tokenizer's chat template does not take these messages (of {roles}): {' '.join(str(error).split())}"
        ) from None


def around(tokenizer: Any, messages: list[dict[str, Any]] | None = None, **options: Any) -> tuple[str, str]:
    """What the template shows before and after `PLACE` in these messages, or as a user's only one.

    Raises UserError if it does not show it exactly once.
    """
    messages = [{"role": "user", "content": PLACE}] if messages is None else messages
    whole = templated(tokenizer, messages, tokenize=False, **options)
    if whole.count(PLACE) != 1:
        raise UserError("the tokenizer's chat template does not show the user's text exactly once")
    before, _, after = whole.partition(PLACE)
    return before, after


def between(tokenizer: Any, **options: Any) -> str:
    """What the template shows between an assistant's text and the user's next.

    Raises UserError if it does not show three turns, each exactly once.
    """
    roles = "user", "assistant", "user"
    whole = templated(
        tokenizer, [{"role": role, "content": PLACE} for role in roles], tokenize=False, **options
    )
    parts = whole.split(PLACE)
    if len(parts) != len(roles) + 1:
        raise UserError(
            "the tokenizer's chat template does not show the turns of a conversation exactly once"
        )
    return parts[2]


def opening(tokenizer: Any) -> tuple[int, ...]:
    """The token ids that come before a user's text: the template's own, or without one those that the tokenizer begins
    any text with."""
    if getattr(tokenizer, "chat_template", None):
        before, _ = around(tokenizer)
        return tuple(tokenizer(before, add_special_tokens=False, verbose=False)["input_ids"])
    whole, bare = (tokenizer("a", add_special_tokens=own)["input_ids"] for own in (True, False))
    return tuple(whole[: whole.index(bare[0])])
