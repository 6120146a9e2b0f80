"""Splits the text of a model's answer, as it grows, into reasoning, content and tool calls.

Reasoning stands between `<think>` and `</think>` at the beginning of the answer (Qwen3, DeepSeek-R1). Two forms of tool
calls are read:

* Qwen and Hermes: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number of them between texts.
* Llama 3.1 to 3.3: the whole content is `{"name": …, "parameters": {…}}`, or several of these, with `;` or white space
  between them or as a JSON list. `<|python_tag|>` may stand before each of them; tokenizers that skip special tokens
  drop it.

Both forms accept `arguments` and `parameters`. The Pythonic calls of Llama 3.2 and 4 (`[f(x=1)]`) and the XML calls of
Qwen3-Coder are not read; they are content. Text that looks like a call but does not parse as one stays
content, unchanged.
"""

import json
import re
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

THINK, THINK_END = "<think>", "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
TAGS = THINK, THINK_END, CALL, CALL_END, PYTHON_TAG

# Quotation marks, backslashes and a "<" that begins no tag are tokens of their own.
_TOKEN = re.compile("|".join(map(re.escape, TAGS)) + r'|\s+|[^\s<"\\]+|["\\<]')
_BETWEEN_CALLS = re.compile(rf"(?:[\s;]|{re.escape(PYTHON_TAG)})*")
_DECODER = json.JSONDecoder()


class ToolCall(NamedTuple):
    """A call of a function."""

    name: str
    arguments: str
    """JSON text of an object."""


class Delta(NamedTuple):
    """The new parts of an answer. `any(delta)` is False if there are none."""

    reasoning: str
    content: str
    tool_calls: list[ToolCall]


class AnswerParser:
    """Splits one answer. The pieces in which its text arrives do not change the result.

    A call is returned whole, once it has ended. White space around the reasoning is dropped, and so is white space at
    the beginning and at the end of the content if there is reasoning before it or a call.

    Args:
        tools: names of the offered tools. Without any, no tool calls are read. A call in Llama's form must name one of
            them; a call in Qwen's form may name any, because its tags already say that it is a call.
        thinking: True if the prompt ends with an opened `<think>` block, as with DeepSeek-R1 and Qwen3-Thinking-2507.
            Otherwise there is reasoning if the answer begins with `<think>`.
    """

    def __init__(self, tools: Collection[str] | None = None, *, thinking: bool = False):
        self._tools = frozenset(tools or ())
        self._thinking = thinking
        # The method that takes the next token is the state of the parser.
        self._read: Callable[[str], None] = self._read_start
        # The end of the text waits here if it may be the beginning of a tag.
        self._tail = ""
        # White space waits here until more of the reasoning or the content follows.
        self._spaces: list[str] = []
        # Tokens wait here while they may be a call.
        self._held: list[str] = []
        # In a call of Qwen's form: a JSON string is open, and the last token was a backslash that escapes the next.
        self._in_string = self._escaped = False
        self._has_reasoning = self._has_content = self._has_calls = False
        # The next delta returns these.
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[ToolCall] = []

    def more(self, text: str) -> Delta:
        """Take the next piece of text and return the parts of the answer that are now certain."""
        text = self._tail + text
        length = _length_of_whole_tags(text)
        self._tail = text[length:]
        for token in _TOKEN.findall(text[:length]):
            self._read(token)
        return self._new()

    def end(self) -> Delta:
        """End the answer and return the parts that were held back."""
        for token in _TOKEN.findall(self._tail):
            self._read(token)
        self._tail = ""
        if self._read == self._read_bare_calls:
            self._end_bare_calls()
        if self._held:
            self._end_call()
        if not self._has_calls and self._keeps_spaces():
            self._content += self._spaces
        self._spaces = []
        return self._new()

    def _new(self) -> Delta:
        delta = Delta("".join(self._reasoning), "".join(self._content), self._calls)
        self._reasoning, self._content, self._calls = [], [], []
        return delta

    def _read_start(self, token: str) -> None:
        if token.isspace():
            self._spaces.append(token)
        elif token == THINK:
            self._thinking, self._spaces, self._read = True, [], self._read_reasoning
        elif self._thinking:
            self._spaces, self._read = [], self._read_reasoning
            self._read(token)
        else:
            self._read = self._read_first_content
            self._read(token)

    def _read_reasoning(self, token: str) -> None:
        if token == THINK_END:
            self._spaces, self._read = [], self._read_first_content
        elif not token.isspace():
            self._reasoning += [*self._spaces, token]
            self._spaces, self._has_reasoning = [], True
        elif self._has_reasoning:
            self._spaces.append(token)

    def _read_first_content(self, token: str) -> None:
        if token.isspace():
            self._spaces.append(token)
            return
        may_call = self._tools and (token[0] in "{[" or token == PYTHON_TAG)
        self._read = self._read_bare_calls if may_call else self._read_content
        self._read(token)

    def _read_bare_calls(self, token: str) -> None:
        self._held.append(token)

    def _end_bare_calls(self) -> None:
        """Read the held tokens as calls in Llama's form or, if they are none, as content with calls in Qwen's form."""
        tokens, self._held, self._read = self._held, [], self._read_content
        try:
            self._add_calls(_bare_calls("".join(tokens), self._tools))
        except (ValueError, RecursionError):
            for token in tokens:
                self._read(token)

    def _read_content(self, token: str) -> None:
        if token == CALL and self._tools:
            self._held, self._read = [token], self._read_call_start
            self._in_string = self._escaped = False
        else:
            self._add_content(token)

    def _read_call_start(self, token: str) -> None:
        if token.isspace():
            self._held.append(token)
        elif token.startswith("{"):
            self._read = self._read_call
            self._read(token)
        else:
            self._release()
            self._read(token)

    def _read_call(self, token: str) -> None:
        if token in (CALL, CALL_END) and not self._in_string:
            if token == CALL_END:
                self._held.append(token)
            self._end_call()
            if token == CALL:
                # The model did not end the call before this one.
                self._read(token)
            return
        self._held.append(token)
        if token == '"' and not self._escaped:
            self._in_string = not self._in_string
        elif "\n" in token:
            # A JSON string has no line break, so this is not JSON. The next end tag ends it.
            self._in_string = False
        self._escaped = token == "\\" and not self._escaped

    def _end_call(self) -> None:
        text = "".join(self._held).removeprefix(CALL).removesuffix(CALL_END)
        try:
            call = _tool_call(json.loads(text))
        except (ValueError, RecursionError):
            self._release()
        else:
            self._held, self._read = [], self._read_content
            self._add_calls([call])

    def _release(self) -> None:
        """Turn the tokens that were held as a call into content."""
        for token in self._held:
            self._add_content(token)
        self._held, self._read = [], self._read_content

    def _add_content(self, token: str) -> None:
        if token.isspace():
            self._spaces.append(token)
            return
        if self._keeps_spaces():
            self._content += self._spaces
        self._content.append(token)
        self._spaces, self._has_content = [], True

    def _add_calls(self, calls: list[ToolCall]) -> None:
        self._calls += calls
        self._has_calls = True

    def _keeps_spaces(self) -> bool:
        """False for white space at the beginning of content that follows reasoning or a call."""
        return self._has_content or not (self._thinking or self._has_calls)


def _length_of_whole_tags(text: str) -> int:
    """Return the length of the text without an unfinished tag at its end."""
    start = text.rfind("<")
    if start < 0 or text[start:] in TAGS or not any(tag.startswith(text[start:]) for tag in TAGS):
        return len(text)
    return start


def _bare_calls(text: str, tools: Collection[str]) -> list[ToolCall]:
    """Return the calls in Llama's form. Raises ValueError if the text is anything else, and RecursionError if it is
    nested too deeply."""
    calls = []
    position = _after_separator(text, 0)
    while position < len(text):
        value, position = _DECODER.raw_decode(text, position)
        for item in value if isinstance(value, list) else [value]:
            call = _tool_call(item)
            if call.name not in tools or not item.keys() & {"arguments", "parameters"}:
                raise ValueError(f"not a call of an offered tool: {call.name!r}")
            calls.append(call)
        position = _after_separator(text, position)
    if not calls:
        raise ValueError("there are no calls")
    return calls


def _after_separator(text: str, position: int) -> int:
    separator = _BETWEEN_CALLS.match(text, position)
    return position if separator is None else separator.end()


def _tool_call(value: Any) -> ToolCall:
    """Return the call that a JSON value stands for. Raises ValueError if it is no call or not valid UTF-8."""
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        raise ValueError("a call must be an object with a name")
    arguments = value.get("arguments", value.get("parameters"))
    decoded = json.loads(arguments) if isinstance(arguments, str) else {} if arguments is None else arguments
    if not isinstance(decoded, dict):
        raise ValueError("arguments must be an object")
    # json reads NaN, infinity and lone surrogates. `dumps` and `encode` raise ValueError for them.
    text = json.dumps(decoded, ensure_ascii=False, allow_nan=False)
    if isinstance(arguments, str):
        text = arguments
    (name + text).encode()
    return ToolCall(name, text)
