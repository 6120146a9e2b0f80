"""Prompts of requests as tokens."""

from typing import Any

from kvjax.chat_template import keeps_turns, templated, text_around_placeholder, token_ids
from kvjax.errors import UserError, check_unicode
from kvjax.models.chat import content_span, encode, stable_prefix_length
from kvjax.serve.body import CompletionRequest


def chat_prompt(tokenizer: Any, completion: CompletionRequest) -> tuple[list[int], bool, dict[str, Any]]:
    """Return the tokens of a chat's prompt, True if it ends in an open `<think>` block, and further options of
    `Engine.submit`."""
    if completion.context is not None:
        message, *others = completion.messages
        if others or message["role"] != "user" or completion.tools is not None or completion.dropped:
            raise UserError("with a context, messages must be one user message, without tools and drop")
        tokens = encode(tokenizer, message["content"], "end", **completion.template_options)
        has_template = getattr(tokenizer, "chat_template", None)
        after = text_around_placeholder(tokenizer, **completion.template_options)[1] if has_template else ""
        return tokens, _ends_in_thinking(after), {}
    if not getattr(tokenizer, "chat_template", None):
        raise UserError("the model has no chat template: use /v1/completions")
    tools = None if completion.tools is None else completion.tools.definitions
    template_options = {"tools": tools, **completion.template_options}
    text = templated(tokenizer, completion.messages, **template_options)
    tokens, options = token_ids(tokenizer, text), {}
    if not keeps_turns(tokenizer, **template_options):
        options["kept"] = stable_prefix_length(tokenizer, completion.messages, **template_options)
    if completion.dropped:
        options |= _dropped_spans(tokenizer, completion, tokens, template_options)
    return tokens, _ends_in_thinking(text), options


def text_prompt(tokenizer: Any, prompt: str | list[int], completion: CompletionRequest) -> list[int]:
    """Return the tokens of one prompt of a completion."""
    if not isinstance(prompt, str):
        return prompt
    check_unicode(prompt)
    if completion.context is not None:
        return encode(tokenizer, prompt, "end")
    return token_ids(tokenizer, prompt, add_special_tokens=True)


def _dropped_spans(
    tokenizer: Any, completion: CompletionRequest, tokens: list[int], template_options: dict[str, Any]
) -> dict[str, Any]:
    """Return the options `dropped` and `dropped_at` of `Engine.submit` for the messages that are dropped.

    Messages are dropped after the chat's last answer, so that the answer has seen them.
    """

    def span(index: int) -> tuple[int, int]:
        return content_span(tokenizer, completion.messages, tokens, index, **template_options)

    spans = tuple((start, end) for start, end in map(span, completion.dropped) if start < end)
    roles = [message["role"] for message in completion.messages]
    # index of the message after the last answer
    after = len(roles) - roles[::-1].index("assistant") if "assistant" in roles else len(roles)
    begin = span(after)[0] if after < len(roles) else 0
    return {"dropped": spans, "dropped_at": max([begin, *(end for _, end in spans)])}


def _ends_in_thinking(text: str) -> bool:
    """Return True if a prompt ends in an open `<think>` block."""
    return text.rstrip().endswith("<think>")
