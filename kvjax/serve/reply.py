"""Formatting of answers as OpenAI's JSON objects, whole or in pieces."""

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
"""A token, its log-probability, and the log-probabilities of the most likely tokens."""


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
        """Return a piece of the reply as an event of a stream. more: further fields."""
        kind = self._kind + (".chunk" if self._kind == "chat.completion" else "")
        return event({**self._head, "object": kind, "choices": choices, **more})


def event(data: Any) -> str:
    """Return a server-sent event."""
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


def usage(requests: list[Request], n: int, *, answered: bool = True) -> dict[str, Any]:
    """Return the token counts of requests. A prompt counts once for its n answers, which follow one another.

    answered: False if the answers' tokens do not count.
    """
    prompts = requests[::n]
    prompt, answer = sum(x.prompt.size for x in prompts), sum(len(x.tokens) for x in requests if answered)
    return {
        "prompt_tokens": int(prompt),
        "completion_tokens": answer,
        "total_tokens": int(prompt) + answer,
        "prompt_tokens_details": {"cached_tokens": int(sum(x.cached for x in prompts))},
    }


class Choice:
    """Formats one answer of a completion."""

    def __init__(
        self, index: int, answer: Answer, tokenizer: Any, *, echo: bool = False, max_tokens: int | None = None
    ):
        self.index, self.answer, self._tokenizer = index, answer, tokenizer
        self._texts = TokenTexts(tokenizer)
        self._echo, self._echoed, self._max_tokens = echo, False, max_tokens
        self._began = False
        self._sent_tokens, self._offset = 0, 0
        # the token before the next one that is formatted
        self._last_token: int | None = None if echo else int(answer.request.prompt[-1])
        self._held: list[Scored] = []

    def pieces(self, update: Update) -> list[dict[str, Any]]:
        """Return the choices that an update adds to a stream."""
        request, text, scored = self.answer.request, update.text, self._scored(update)
        if self._max_tokens == 0:
            text, scored = "", []
        if text and not self._began:
            self._began, text = True, self._space() + text
        if self._echo and not self._echoed:
            self._echoed = True
            text = decoded(self._tokenizer, request.prompt) + text
            scored = [*_scored_prompt(request), *scored]
        logprobs = None if request.sampling.logprobs is None else self._entries(scored)
        return [{"index": self.index, "text": text, "logprobs": logprobs, **_finish(update.finish_reason)}]

    def _space(self) -> str:
        """Return the space between prompt and answer, which decoders of SentencePiece tokenizers drop, if there is
        one."""
        first, before = self.answer.request.tokens[0], int(self.answer.request.prompt[-1])
        spaced = " " + decoded(self._tokenizer, [first])
        return " " if self._texts.text(first, before) == spaced else ""

    def whole(self, pieces: list[dict[str, Any]]) -> dict[str, Any]:
        """Join all pieces into one choice."""
        logprobs = [piece["logprobs"] for piece in pieces if piece["logprobs"] is not None]
        joined = (
            {key: [x for part in logprobs for x in part[key]] for key in logprobs[0]} if logprobs else None
        )
        return pieces[-1] | {"text": "".join(piece["text"] for piece in pieces), "logprobs": joined}

    def _scored(self, update: Update) -> list[Scored]:
        """Return the new tokens that belong to the answer."""
        scored, request = self._held + _zipped(update.tokens, update.logprobs), self.answer.request
        if update.finish_reason is not None:
            scored = scored[: max(0, self._length() - self._sent_tokens)]
        elif request.sampling.stop:
            # They may belong to a stop text, which is not part of the answer.
            self._held, scored = scored, []
        self._sent_tokens += len(scored)
        return scored

    def _length(self) -> int:
        """Return the number of tokens whose log-probabilities are shown.

        This includes the token that ended the answer, which lm-evaluation-harness relies on.
        """
        return len(self.answer.request.tokens)

    def _entries(self, scored: list[Scored]) -> dict[str, Any]:
        entries: dict[str, Any] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for token, logprob, likely in scored:
            text = self._texts.text(token, self._last_token)
            top = (
                None
                if likely is None
                else {self._texts.text(x, self._last_token): p for x, p in likely.items()}
            )
            entries["tokens"].append(text)
            entries["token_logprobs"].append(logprob)
            entries["top_logprobs"].append(top)
            entries["text_offset"].append(self._offset)
            self._offset += 0 if token in self._texts.special else len(text)
            self._last_token = token
        return entries


class ChatChoice(Choice):
    """Formats one answer of a chat."""

    def __init__(
        self, index: int, answer: Answer, tokenizer: Any, parser: AnswerParser, max_calls: int | None = None
    ):
        super().__init__(index, answer, tokenizer)
        self._parser, self._call_count, self._max_calls = parser, 0, max_calls

    def pieces(self, update: Update) -> list[dict[str, Any]]:
        deltas = [self._delta(self._parser.more(update.text))]
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
            **_finish(update.finish_reason, self._call_count),
        }
        if update.finish_reason is not None:
            pieces.append(last)
        if self.answer.request.sampling.logprobs is not None and (content := self._logprobs_content(update)):
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

    def _delta(self, parsed: Delta) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if parsed.reasoning:
            delta["reasoning_content"] = parsed.reasoning
        if parsed.content:
            delta["content"] = parsed.content
        for call in parsed.tool_calls:
            if self._call_count == self._max_calls:
                break
            function = {"name": call.name, "arguments": call.arguments}
            tool_call = {
                "index": self._call_count,
                "id": f"call_{secrets.token_hex(12)}",
                "type": "function",
                "function": function,
            }
            delta.setdefault("tool_calls", []).append(tool_call)
            self._call_count += 1
        return delta

    def _logprobs_content(self, update: Update) -> list[dict[str, Any]]:
        def entry(token: int, logprob: float | None) -> dict[str, Any]:
            text = self._texts.text(token, self._last_token)
            return {"token": text, "logprob": logprob, "bytes": self._texts.bytes(token, text)}

        entries = []
        for token, logprob, likely in self._scored(update):
            top = [entry(*pair) for pair in (likely or {}).items()]
            entries.append(entry(token, logprob) | {"top_logprobs": top})
            self._last_token = token
        return entries


def _finish(reason: str | None, calls: int = 0) -> dict[str, Any]:
    """Return why an answer ended, in OpenAI's words. An answer that ended because the pool was full counts as too long,
    and has the `stop_reason` "capacity"."""
    if reason == "capacity":
        return {"finish_reason": "length", "stop_reason": "capacity"}
    return {"finish_reason": "tool_calls" if calls and reason == "stop" else reason}


def _scored_prompt(request: Request) -> list[Scored]:
    """Return a prompt's tokens with their log-probabilities. The first token has none."""
    first: Scored = int(request.prompt[0]), None, None
    return [first, *_zipped(request.prompt[1:].tolist(), request.prompt_logprobs)]


def _zipped(tokens: list[int], parts: list[AnswerLogprobs]) -> list[Scored]:
    """Return tokens with their log-probabilities. Tokens without log-probabilities are left out."""
    chosen = itertools.chain.from_iterable(part.chosen.tolist() for part in parts)
    likely = itertools.chain.from_iterable(part.alternatives for part in parts)
    return list(zip(tokens, chosen, likely, strict=False))
