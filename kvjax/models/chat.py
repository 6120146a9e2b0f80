"""Prompts as a model's tokens: token ids as they are, texts and chat messages through the tokenizer's chat template
where it has one."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from jaxtyping import Int

from kvjax.chat_template import PLACE, around, templated, token_ids
from kvjax.errors import UserError, check_unicode, shown

Prompts = Iterable[Any]
"""Token ids, one sequence per prompt; with a tokenizer also texts and chats."""
Part = Literal["whole", "beginning", "end"]
"""Part of a user's turn that a text is: "whole" ends where the model answers; "beginning" leaves the turn open, for
texts to come; "end" is such a text, and closes the turn."""


def listed(prompts: Prompts) -> list[Any]:
    """Return prompts as a list. Raises UserError for what is no list of them."""
    if isinstance(prompts, Mapping):
        what = f"a {type(prompts).__name__} of {', '.join(map(str, prompts))}"
        raise UserError(
            f"prompts must be a list of lists of token ids, got {what}: give its 'input_ids', unpadded"
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
        vocabulary: size of the model's vocabulary.
        tokenizer: for texts and chats.
        part: that of texts, where the tokenizer has a chat template.
        options: variables of the chat template, such as `enable_thinking`.

    Raises UserError for texts without a tokenizer, and for prompts that are empty or no token ids of the vocabulary.
    """
    prompts = listed(prompts)
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
    """Return the tokens of a text, which is a user's turn where there is a chat template, or of a chat's messages
    (`{"role": …, "content": …}`), of which the last is the user's. The options are variables of the template.

    Raises UserError for what is neither, and for messages without a template or as an end.
    """
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if isinstance(prompt, str):
        check_unicode(prompt)
        messages = [{"role": "user", "content": prompt}]
        if not has_template:
            return token_ids(tokenizer, prompt, **{} if part == "end" else {"add_special_tokens": True})
        if part == "end":
            return token_ids(tokenizer, prompt + around(tokenizer, **options)[1])
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
        return token_ids(tokenizer, around(tokenizer, [*messages[:-1], last], **options)[0])
    return token_ids(tokenizer, templated(tokenizer, messages, **options))


def content_span(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    tokens: Sequence[int],
    index: int,
    /,
    **options: Any,
) -> tuple[int, int]:
    """Return the indices of the first token that shows a message's content and of the one after the last. `tokens` are
    those that the chat template makes of all messages. A token with text of the template, too, counts as content.

    Raises UserError if the template does not show the content exactly once.
    """
    other = [dict(one) for one in messages]
    other[index]["content"] = PLACE
    placed = PLACE.join(around(tokenizer, other, **options))
    return difference(tokens, token_ids(tokenizer, placed))


def difference(one: Sequence[int], other: Sequence[int]) -> tuple[int, int]:
    """Return the span of one row of tokens that is not as in another, between the first and the last tokens that they
    have in common."""
    start = common(one, other)
    return start, len(one) - common(one[start:][::-1], other[start:][::-1])


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many first tokens two rows have in common."""
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def turns_end(tokenizer: Any, prompt: Any, /, **options: Any) -> int:
    """Return how many of the first tokens of `encode` do not depend on the generation prompt, which is what a template
    shows after the last turn where the model is to answer."""
    both = [encode(tokenizer, prompt, "whole", **options, add_generation_prompt=x) for x in (True, False)]
    return common(*both)


def is_chat(prompt: Any) -> bool:
    """Return True for what looks like a chat's messages."""
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
    def is_message(one: Any) -> bool:
        return isinstance(one, Mapping) and all(isinstance(one.get(key), str) for key in ("role", "content"))

    if not is_chat(prompt) or not all(map(is_message, prompt)):
        raise UserError(
            f"a prompt is a text or a chat, [{{'role': 'user', 'content': …}}], got {shown(prompt)}"
        )
    for one in prompt:
        check_unicode(one["content"])
    return [dict(one) for one in prompt]
