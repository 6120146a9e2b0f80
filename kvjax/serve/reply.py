"""Answers as OpenAI's JSON objects, whole or in pieces."""

import itertools
import json
import secrets
import time
from typing import Any

from kvjax.engine import Request
from kvjax.inference.answers import AnswerLogprobs, decoded
from kvjax.serve.answer_parser import AnswerParser, Delta
from kvjax.serve.token_texts import TokenTexts
from kvjax.serve.worker import Answer, Update

Scored = tuple[int, float | None, dict[int, float] | None]
"""A token, its log-probability, and the most likely tokens with theirs."""


class Reply:
    """The reply to one request: an object with a choice for each answer.

    kind: `chat.completion` or `text_completion`.
    """

    def __init__(self, kind: str, model: str):
        self._kind = kind
        prefix = "chatcmpl" if kind == "chat.completion" else "cmpl"
        self._head = {"id": f"{prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        """Return the reply as one object."""
        return {**self._head, "object": self._kind, "choices": choices, "usage": usage}

    def event(self, choices: list[dict[str, Any]], **more: dict[str, Any] | None) -> str:
        """Return a piece of the reply, as an event of a stream. more: further fields."""
        kind = self._kind + (".chunk" if self._kind == "chat.completion" else "")
        return event({**self._head, "object": kind, "choices": choices, **more})


def event(data: Any) -> str:
    """Return a server-sent event."""
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


def usage(requests: list[Request], n: int, *, answered: bool = True) -> dict[str, Any]:
    """Return how many tokens requests took. The n answers of a prompt, which follow one another, count it once."""
    first = requests[::n]
    prompt, answer = sum(x.prompt.size for x in first), sum(len(x.tokens) for x in requests if answered)
    return {
        "prompt_tokens": int(prompt),
        "completion_tokens": answer,
        "total_tokens": int(prompt) + answer,
        "prompt_tokens_details": {"cached_tokens": int(sum(x.cached for x in first))},
    }


class Choice:
    """An answer of a completion, as it is sent."""

    def __init__(
        self, index: int, answer: Answer, tokenizer: Any, *, echo: bool = False, most: int | None = None
    ):
        self.index, self.answer, self._tokenizer = index, answer, tokenizer
        self._texts = TokenTexts(tokenizer)
        self._echo, self._echoed, self._most = echo, False, most
        self._tokens, self._place = 0, 0
        # the token before the next one whose text is shown
        self._before: int | None = None if echo else int(answer.request.prompt[-1])
        self._held: list[Scored] = []

    def pieces(self, update: Update) -> list[dict[str, Any]]:
        """Return what is sent of an update, as choices of a piece."""
        request, text, scored = self.answer.request, update.text, self._scored(update)
        if self._most == 0:
            text, scored = "", []
        if self._echo and not self._echoed:
            self._echoed = True
            text = decoded(self._tokenizer, request.prompt) + text
            scored = [*_of_prompt(request), *scored]
        logprobs = None if request.sampling.logprobs is None else self._entries(scored)
        return [{"index": self.index, "text": text, "logprobs": logprobs, **_finish(update.finish_reason)}]

    def whole(self, pieces: list[dict[str, Any]]) -> dict[str, Any]:
        """Return all pieces as the choice of one object."""
        logprobs = [piece["logprobs"] for piece in pieces if piece["logprobs"] is not None]
        joined = (
            {key: [x for part in logprobs for x in part[key]] for key in logprobs[0]} if logprobs else None
        )
        return pieces[-1] | {"text": "".join(piece["text"] for piece in pieces), "logprobs": joined}

    def _scored(self, update: Update) -> list[Scored]:
        """Return the new tokens that are part of the answer."""
        found, request = self._held + _zipped(update.tokens, update.logprobs), self.answer.request
        if update.finish_reason is not None:
            found = found[: max(0, self._length() - self._tokens)]
        elif request.sampling.stop:
            # those of a stop text are no part of it
            self._held, found = found, []
        self._tokens += len(found)
        return found

    def _length(self) -> int:
        """Return the number of tokens whose log-probabilities are shown: here also the one that ended the answer, as
        lm-evaluation-harness counts on."""
        return len(self.answer.request.tokens)

    def _entries(self, scored: list[Scored]) -> dict[str, Any]:
        entries: dict[str, Any] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for token, value, likely in scored:
            text = self._texts.text(token, self._before)
            top = (
                None if likely is None else {self._texts.text(x, self._before): p for x, p in likely.items()}
            )
            entries["tokens"].append(text)
            entries["token_logprobs"].append(value)
            entries["top_logprobs"].append(top)
            entries["text_offset"].append(self._place)
            self._place += 0 if token in self._texts.special else len(text)
            self._before = token
        return entries


class ChatChoice(Choice):
    """An answer of a chat, as it is sent."""

    def __init__(
        self, index: int, answer: Answer, tokenizer: Any, parser: AnswerParser, most_calls: int | None = None
    ):
        super().__init__(index, answer, tokenizer)
        self._parser, self._calls, self._most_calls = parser, 0, most_calls

    def pieces(self, update: Update) -> list[dict[str, Any]]:
        found = self._parser.more(update.text)
        deltas = [self._delta(found)]
        if update.finish_reason is not None:
            deltas.append(self._delta(self._parser.end()))
        deltas = [delta for delta in deltas if delta]
        pieces = [
            {"index": self.index, "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas
        ]
        last = {
            "index": self.index,
            "delta": {},
            "logprobs": None,
            **_finish(update.finish_reason, self._calls),
        }
        if update.finish_reason is not None:
            pieces.append(last)
        if self.answer.request.sampling.logprobs is not None and (content := self._content(update)):
            pieces = pieces or [last]
            pieces[0]["logprobs"] = {"content": content}
        return pieces

    def whole(self, pieces: list[dict[str, Any]]) -> dict[str, Any]:
        deltas = [piece["delta"] for piece in pieces]
        content, reasoning = (
            "".join(x.get(key, "") for x in deltas) for key in ("content", "reasoning_content")
        )
        calls = [
            {k: v for k, v in call.items() if k != "index"}
            for x in deltas
            for call in x.get("tool_calls", [])
        ]
        message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        scored = [entry for piece in pieces if piece["logprobs"] for entry in piece["logprobs"]["content"]]
        logprobs = None if self.answer.request.sampling.logprobs is None else {"content": scored}
        rest = {key: value for key, value in pieces[-1].items() if key != "delta"}
        return rest | {"message": message, "logprobs": logprobs}

    def _length(self) -> int:
        return len(self.answer.request.answer())

    def _delta(self, found: Delta) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if found.reasoning:
            delta["reasoning_content"] = found.reasoning
        if found.content:
            delta["content"] = found.content
        for call in found.tool_calls:
            if self._calls == self._most_calls:
                break
            function = {"name": call.name, "arguments": call.arguments}
            one = {
                "index": self._calls,
                "id": f"call_{secrets.token_hex(12)}",
                "type": "function",
                "function": function,
            }
            delta.setdefault("tool_calls", []).append(one)
            self._calls += 1
        return delta

    def _content(self, update: Update) -> list[dict[str, Any]]:
        def entry(token: int, value: float | None) -> dict[str, Any]:
            text = self._texts.text(token, self._before)
            return {"token": text, "logprob": value, "bytes": self._texts.bytes(token, text)}

        entries = []
        for token, value, likely in self._scored(update):
            top = [entry(*one) for one in (likely or {}).items()]
            entries.append(entry(token, value) | {"top_logprobs": top})
            self._before = token
        return entries


def _finish(reason: str | None, calls: int = 0) -> dict[str, Any]:
    """Return why an answer ended, in OpenAI's words. One for which the pool had no page is one that is too long, and
    `stop_reason` says so."""
    if reason == "capacity":
        return {"finish_reason": "length", "stop_reason": "capacity"}
    return {"finish_reason": "tool_calls" if calls and reason == "stop" else reason}


def _of_prompt(request: Request) -> list[Scored]:
    """Return a prompt's tokens with their log-probabilities, of which the first has none."""
    first: Scored = int(request.prompt[0]), None, None
    return [first, *_zipped(request.prompt[1:].tolist(), request.prompt_logprobs)]


def _zipped(tokens: list[int], parts: list[AnswerLogprobs]) -> list[Scored]:
    """Return tokens with their log-probabilities, as far as there are any."""
    chosen = itertools.chain.from_iterable(part.chosen.tolist() for part in parts)
    likely = itertools.chain.from_iterable(part.alternatives for part in parts)
    return list(zip(tokens, chosen, likely, strict=False))
