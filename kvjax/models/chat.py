"""Prompts as tokens. Token ids stay as they are. Texts and chat messages are rendered with the tokenizer's chat
template if it has one."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from jaxtyping import Int

from kvjax.chat_template import PLACEHOLDER, templated, text_around_placeholder, token_ids
from kvjax.errors import UserError, check_unicode, shown

Prompts = Iterable[Any]
"""Token ids, one sequence per prompt; with a tokenizer also texts and chats."""
Part = Literal["whole", "beginning", "end"]
"""The part of a user's turn that a text makes up. "whole" is a turn that the model answers; "beginning" leaves the turn
open for later texts; "end" is such a later text, and closes the turn."""


def prompt_list(prompts: Prompts) -> list[Any]:
    """Return prompts as a list. Raises UserError if they are not an iterable of prompts."""
    if isinstance(prompts, Mapping):
        description = f"a {type(prompts).__name__} of {', '.join(map(str, prompts))}"
        raise UserError(
            f"prompts must be a list of lists of token ids, got {description}: give its 'input_ids', unpadded"
        )
    if isinstance(prompts, str):
        raise UserError(f"prompts must be a list of prompts, got one text: [{shown(prompts)}]")
    try:
        return list(prompts)
    except TypeError:
        raise UserError(f"prompts must be a list of lists of token ids, got {shown(prompts)}") from None


def token_rows(
    prompts: Prompts, vocabulary: int, tokenizer: Any = None, part: Part = "whole", /, **options: Any
) -> list[Int[np.ndarray, " _"]]:
    """Return prompts as arrays of token ids.

    Args:
        vocabulary: the size of the model's vocabulary.
        tokenizer: needed for texts and chats.
        part: the part of a turn that texts make up, if the tokenizer has a chat template.
        options: variables of the chat template, such as `enable_thinking`.

    Raises UserError for texts without a tokenizer, and for prompts that are empty or have token ids outside the
    vocabulary.
    """
    prompts = prompt_list(prompts)
    if any(isinstance(prompt, Mapping) for prompt in prompts):
        raise UserError("prompts must be a list of prompts, got the messages of one chat: [[{'role': …}, …]]")
    if tokenizer is None and any(isinstance(prompt, str) or is_chat(prompt) for prompt in prompts):
        raise UserError(f"prompts must be token ids, got text, {shown(prompts)}: text needs tokenizer=")
    if tokenizer is not None and not (callable(tokenizer) and hasattr(tokenizer, "decode")):
        raise UserError(f"tokenizer must come from kvjax.load_tokenizer, got {shown(tokenizer)}")
    if not prompts:
        raise UserError("no prompt was given")
    rows = []
    for index, prompt in enumerate(prompts):
        if isinstance(prompt, str) or is_chat(prompt):
            prompt = encode(tokenizer, prompt, part, **options)
        try:
            rows.append(row := np.asarray(prompt))
        except ValueError:
            raise UserError(
                f"prompt {index} must be a list of whole token ids, got {shown(prompt)}"
            ) from None
        if row.size == 0:
            raise UserError(f"prompt {index} is empty: it needs at least one token")
        if row.ndim != 1 or not np.issubdtype(row.dtype, np.integer):
            raise UserError(
                f"prompt {index} must be a list of whole token ids, got shape {row.shape} of {row.dtype}; "
                f"prompts are a list of such lists"
            )
        if row.min() < 0 or row.max() >= vocabulary:
            raise UserError(
                f"prompt {index} has token id {row.max() if row.min() >= 0 else row.min()}, "
                f"the model's vocabulary is 0 … {vocabulary - 1}"
            )
    return rows


def encode(tokenizer: Any, prompt: Any, part: Part = "whole", /, **options: Any) -> list[int]:
    """Return the tokens of a text or of a chat's messages (`{"role": …, "content": …}`). If there is a chat template, a
    text is a user's turn. The options are variables of the template.

    Raises UserError if the prompt is neither, and for messages without a template or with `part="end"`.
    """
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if isinstance(prompt, str):
        check_unicode(prompt)
        messages = [{"role": "user", "content": prompt}]
        if not has_template:
            return token_ids(tokenizer, prompt, **{} if part == "end" else {"add_special_tokens": True})
        if part == "end":
            return token_ids(tokenizer, prompt + text_around_placeholder(tokenizer, **options)[1])
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
        last = messages[-1] | {"content": messages[-1]["content"] + PLACEHOLDER}
        return token_ids(tokenizer, text_around_placeholder(tokenizer, [*messages[:-1], last], **options)[0])
    return token_ids(tokenizer, templated(tokenizer, messages, **options))


def content_span(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    tokens: Sequence[int],
    index: int,
    /,
    **options: Any,
) -> tuple[int, int]:
    """Return the span (start, end) of the tokens that show a message's content. `tokens` are the tokens of all messages
    in the chat template. A token with text of both the template and the content counts as content.

    Raises UserError if the template does not show the content exactly once.
    """
    other = [dict(message) for message in messages]
    other[index]["content"] = PLACEHOLDER
    text = PLACEHOLDER.join(text_around_placeholder(tokenizer, other, **options))
    return differing_span(tokens, token_ids(tokenizer, text))


def differing_span(tokens: Sequence[int], other: Sequence[int]) -> tuple[int, int]:
    """Return the span of `tokens` between the longest prefix and the longest suffix that they share with `other`."""
    start = common_prefix(tokens, other)
    return start, len(tokens) - common_prefix(tokens[start:][::-1], other[start:][::-1])


def common_prefix(tokens: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the longest common prefix of two rows of tokens."""
    return next(
        (i for i, (a, b) in enumerate(zip(tokens, other, strict=False)) if a != b),
        min(len(tokens), len(other)),
    )


def stable_prefix_length(tokenizer: Any, prompt: Any, /, **options: Any) -> int:
    """Return the number of first tokens of `encode` that do not depend on the generation prompt (the text that a
    template adds after the last turn when the model is to answer)."""
    with_prompt = encode(tokenizer, prompt, "whole", **options, add_generation_prompt=True)
    without = encode(tokenizer, prompt, "whole", **options, add_generation_prompt=False)
    return common_prefix(with_prompt, without)


def is_chat(prompt: Any) -> bool:
    """Return True if a prompt looks like the messages of a chat."""
    return isinstance(prompt, list | tuple) and bool(prompt) and isinstance(prompt[0], Mapping)


def is_token_ids(prompt: Any) -> bool:
    """Return True for a sequence of whole numbers."""
    return (
        not isinstance(prompt, str | Mapping)
        and hasattr(prompt, "__len__")
        and len(prompt) > 0
        and all(isinstance(token, int | np.integer) and not isinstance(token, bool) for token in prompt)
    )


def _messages(prompt: Any) -> list[dict[str, Any]]:
    def is_message(value: Any) -> bool:
        return isinstance(value, Mapping) and all(
            isinstance(value.get(key), str) for key in ("role", "content")
        )

    if not is_chat(prompt) or not all(map(is_message, prompt)):
        raise UserError(
            f"a prompt is a text or a chat, [{{'role': 'user', 'content': …}}], got {shown(prompt)}"
        )
    for message in prompt:
        check_unicode(message["content"])
    return [dict(message) for message in prompt]
