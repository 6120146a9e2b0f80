"""`Session`: a conversation that keeps its cache from turn to turn, so that each turn reads only new text."""

import copy
from pathlib import Path
from typing import Any

import numpy as np

from kvjax import cache as caches
from kvjax.cache import Cache, Stats
from kvjax.chat_template import PLACEHOLDER, keeps_turns, templated, text_around_placeholder, token_ids
from kvjax.errors import UserError, check_unicode, named_arguments, shown, warn, whole_number
from kvjax.inference.answers import stop_tokens_of, whole_answers
from kvjax.inference.forward import drop_observation_state
from kvjax.inference.generate import GREEDY, stream
from kvjax.inference.prefill import extend, prefill
from kvjax.inference.saving import read_cache, write_cache
from kvjax.llm import LLM
from kvjax.mesh import on_host, use_mesh
from kvjax.models.chat import content_span, differing_span, stable_prefix_length
from kvjax.sampling_params import SamplingParams

TURNS = "turns"
"""The key of the conversation in a saved cache's description."""
CHANGED = "Session.drop: messages were changed since they were read: call say first"


class Session:
    """A conversation with a model.

        session = kvjax.Session(llm)
        print(session.say("Who wrote Emma?"))
        other = session.fork()

    Each turn reads only the text that the chat template adds to earlier turns, and the policy continues as in one long
    text. Without a template a conversation is one text.

    Templates of thinking models remove the thoughts from earlier answers. With such a template the cache ends at the
    user's last turn, and the next turn reads the answer as the template then renders it. If a template changes other
    text that was read, the conversation is read again from its beginning.

    Args:
        llm: model, tokenizer and policy. A policy that compacts at a prompt's end compacts only the first turn, with a
            warning; `when=every` and `when=overflow` also compact later turns.
        system: the text of the system turn.

    Raises:
        UserError: `llm` is not an LLM, or the template does not accept a system turn.
    """

    @named_arguments(where="Session")
    def __init__(self, llm: LLM, system: str = ""):
        if not isinstance(llm, LLM):
            raise UserError(f"Session: llm must be a kvjax.LLM, got {shown(llm)}")
        if not isinstance(system, str):
            raise UserError(f"Session: system must be a text, got {shown(system)}")
        check_unicode(system)
        self.llm = llm
        if llm.policy.schedule is not None and not llm.policy.compacts_answers:
            warn(
                f"Session: policy {llm.policy.name} compacts the first turn alone, and all later ones stay: "
                "when=every or when=overflow goes on",
                stacklevel=2,
            )
        self.cache: Cache | None = None
        """The cache that the next turn continues; None before the first turn."""
        self.messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
        """The messages so far, with their roles."""
        if system and not self._templated:
            raise UserError("Session: system= needs a tokenizer with a chat template, and this one has none")
        self.tokens: list[int] = []
        """The tokens that the next turn continues. The cache has read all of them, except perhaps the last."""
        self._parts: list[str] = []
        """The text of the tokens, alternately text of the template and an answer; empty if the tokens lack the last
        answer."""
        self._ends: list[int] = []
        """The number of tokens up to the end of each part. It is incomplete if an older kvjax saved the
        conversation."""
        self._dropped: dict[int, dict[str, str]] = {}
        """Copies of the messages that were dropped from the cache, by index."""
        self._keeps_turns = keeps_turns(llm.tokenizer, **llm.chat_template_kwargs)

    @property
    def _templated(self) -> bool:
        return bool(getattr(self.llm.tokenizer, "chat_template", None))

    @property
    def dropped(self) -> list[int]:
        """The indices of messages that were dropped from the cache and have not been changed since."""
        return [
            index for index, message in self._dropped.items() if self.messages[index : index + 1] == [message]
        ]

    @property
    def stats(self) -> Stats:
        """The sizes of the cache. Raises UserError before the first turn."""
        return caches.stats(self._require_cache("stats"), 1)

    def _require_cache(self, method: str) -> Cache:
        if self.cache is None:
            raise UserError(f"Session.{method}: nothing was said yet")
        return self.cache

    @named_arguments(where="Session.say")
    def say(self, text: str, sampling: SamplingParams = GREEDY) -> str:
        """Return the model's answer to a turn.

        Raises:
            UserError: there is no text, several answers are asked for, a stop text is not a token, or the chat template
                does not accept the turn. The conversation is then unchanged.
        """
        if not isinstance(text, str) or not text:
            raise UserError(f"Session.say: expected a text, got {shown(text)}")
        check_unicode(text)
        if not isinstance(sampling, SamplingParams) or sampling.n != 1:
            raise UserError(
                f"Session.say: sampling must be one SamplingParams with n=1, got {shown(sampling)}"
            )
        if stop := stop_tokens_of(sampling.stop, self.llm.tokenizer)[0]:
            raise UserError(
                f"Session.say: stop must be tokens of the tokenizer, got {shown(list(stop))}: a longer text is found "
                "when the cache has read more"
            )
        llm, blocks = self.llm, []
        messages = [*self.messages, {"role": "user", "content": text}]
        rendered = "".join(self._parts) + text
        if self._templated:
            rendered = templated(llm.tokenizer, messages, **llm.chat_template_kwargs)
        dropped = {index: self._dropped[index] for index in self.dropped}
        # a dropped message was changed, so the cache lacks text that must be visible now; without a template the
        # rendered text does not depend on messages
        must_reread = self._templated and dropped != self._dropped
        length = self._length_in(rendered) if self._keeps_turns and not must_reread else 0
        if self._parts and not length:
            self._keeps_turns = False
        is_beginning = not (self._templated or length)
        new = token_ids(llm.tokenizer, rendered[length:], add_special_tokens=is_beginning)
        tokens = self.tokens + new if length else new
        end = len(tokens) - 1  # generation must read at least one token
        if not self._keeps_turns:
            end = min(end, stable_prefix_length(llm.tokenizer, messages, **llm.chat_template_kwargs))
        cache, read = self.cache, 0 if self.cache is None else int(on_host(self.cache.seen)[0])
        if must_reread or read > end or tokens[:read] != self.tokens[:read]:
            cache, read = None, 0
        if cache is None and dropped:
            cache, read, dropped_again = self._reread(messages, tokens, list(dropped))
            dropped = {index: dropped[index] for index in dropped_again}
        if read < end and not self._keeps_turns:
            cache, read = self._read(cache, tokens[read:end]), end
        options = {"policy": llm.policy, "tokenizer": llm.tokenizer, "chunk": llm.chunk, "cache": cache}
        if cache is None:
            options |= {"capacity": llm.capacity, "page_size": llm.page_size}
        for block in stream(llm.model, [np.asarray(tokens[read:])], sampling, **options):
            blocks.append(block)
        after = blocks[-1].cache
        eos, sizes = llm.model.config.eos_ids, caches.stats(after, 1)
        generation = whole_answers(blocks, [sampling], [0], sizes, eos, llm.tokenizer)
        assert generation.texts is not None
        answer, reply = generation.tokens[0].tolist(), generation.texts[0]
        if self._keeps_turns or cache is None:
            self.cache, self.tokens = after, tokens + answer
            before, ends = (self._parts, self._ends) if length else ([], [])
            self._parts = [*before, rendered[length:], reply]
            self._ends = [*ends, len(tokens), len(self.tokens)] if len(ends) == len(before) else []
        else:
            self.cache, self.tokens, self._parts, self._ends = cache, tokens[:read], [], []
        self.messages, self._dropped = [*messages, {"role": "assistant", "content": reply}], dropped
        return reply

    def _length_in(self, rendered: str) -> int:
        """Return the length of the text so far at the beginning of a rendered text; 0 if it does not begin so. Answers
        may have lost the white space around them."""
        length = 0
        for index, part in enumerate(self._parts):
            variants = (part, part.strip()) if index % 2 else (part,)
            match = next((x for x in variants if rendered.startswith(x, length)), None)
            if match is None:
                return 0
            length += len(match)
        return length

    def _read(self, cache: Cache | None, new: list[int]) -> Cache:
        """Return a copy of the cache, or a new cache, after reading new tokens."""
        llm, rows = self.llm, [np.asarray(new)]
        if cache is None:
            options = {"capacity": llm.capacity, "page_size": llm.page_size, "chunk": llm.chunk}
            cache = prefill(llm.model, rows, policy=llm.policy, **options)
            with use_mesh(llm.model):
                return drop_observation_state(cache, llm.policy.compile(llm.model).decode)
        with use_mesh(llm.model):
            compiled = llm.policy.compile(llm.model)
            cache, _ = extend(llm.model, compiled, cache, rows, 0, llm.chunk)
            caches.check(cache, llm.policy.name)
        return cache

    def _reread(
        self, messages: list[dict[str, str]], tokens: list[int], dropped: list[int]
    ) -> tuple[Cache | None, int, list[int]]:
        """Read a chat's tokens again up to the end of the last dropped message, and drop these messages again. Return
        the cache (None if nothing was read), the number of tokens read, and the messages that could be dropped."""
        spans: dict[int, tuple[int, int]] = {}

        def warn_kept(index: int, error: UserError) -> None:
            warn(f"Session.say: message {index} was read again and not dropped: {error}", stacklevel=5)

        for index in dropped:
            try:
                spans[index] = content_span(
                    self.llm.tokenizer, messages, tokens, index, **self.llm.chat_template_kwargs
                )
            except UserError as error:
                warn_kept(index, error)
        read = min(max((end for _, end in spans.values()), default=0), len(tokens) - 1)
        if not read:
            return None, 0, list(spans)
        cache = self._read(None, tokens[:read])
        for index, (start, end) in list(spans.items()):
            try:
                cache = _without(cache, start, min(end, read))
            except UserError as error:
                warn_kept(index, error)
                del spans[index]
        return cache, read, list(spans)

    def fork(self) -> "Session":
        """Return another conversation that continues this one. They share the cache of the turns so far, and neither
        changes the other."""
        other = copy.copy(self)
        for name in ("messages", "tokens", "_dropped", "_parts", "_ends"):
            setattr(other, name, copy.copy(getattr(self, name)))
        return other

    @named_arguments(where="Session.drop")
    def drop(self, turn: int) -> None:
        """Drop a turn from the cache, such as a tool's output that is no longer needed. Later turns do not see it. Text
        that was read after it stays as it is. Its pages become free, except those that a fork holds. The template still
        renders a dropped turn.

        Args:
            turn: the index of the turn's message in `messages`.

        Raises:
            UserError: there is no such turn, it has not been read yet, messages were changed since they were read, or
                `Cache.without` refuses it.
        """
        cache = self._require_cache("drop")
        turn = whole_number("Session.drop", "turn", turn, 0, len(self.messages) - 1)
        if turn in self.dropped:
            return
        start, end = self._span(turn)
        # the last token of an answer is read with the next turn
        end = min(end, int(on_host(cache.seen)[0]))
        self.cache = _without(cache, start, end)
        self._dropped[turn] = dict(self.messages[turn])

    def _span(self, turn: int) -> tuple[int, int]:
        """Return the span (start, end) of the tokens of a turn's text."""
        tokenizer, options = self.llm.tokenizer, self.llm.chat_template_kwargs
        if not self._parts:
            if turn == len(self.messages) - 1:
                raise UserError(
                    "Session.drop: the last answer is read with the next turn, as the template then shows it"
                )
            messages = self.messages[:-1]
            tokens = token_ids(tokenizer, templated(tokenizer, messages, **options))
            if tokens[: len(self.tokens)] != self.tokens:
                raise UserError(CHANGED)
            return content_span(tokenizer, messages, tokens, turn, **options)
        if len(self._ends) != len(self._parts):
            raise UserError(
                "Session.drop: an older kvjax saved the conversation, and not where its turns are"
            )
        following = {"role": "user", "content": PLACEHOLDER}
        if self._templated and not self._length_in(
            templated(tokenizer, [*self.messages, following], **options)
        ):
            raise UserError(CHANGED)
        # the user's first turn since the conversation was last read from its beginning
        first = len(self.messages) - len(self._parts)
        index = 2 * max(0, (turn - first) // 2)
        user = first + index
        begin, end = self._ends[index - 1] if index else 0, self._ends[index]
        if turn > user:
            return end, self._ends[index + 1]
        part = self._parts[index]
        if not self._templated:
            return end - len(token_ids(tokenizer, part)), end
        rendered = templated(tokenizer, self.messages[: user + 1], **options)
        other = [dict(message) for message in self.messages[: user + 1]]
        other[turn]["content"] = PLACEHOLDER
        text = PLACEHOLDER.join(text_around_placeholder(tokenizer, other, **options))
        text = text[len(rendered) - len(part) :]
        start, stop = differing_span(self.tokens[begin:end], token_ids(tokenizer, text))
        return begin + start, begin + stop

    @named_arguments(where="Session.save")
    def save(self, path: str | Path) -> int:
        """Write the conversation into a folder, for `load`. Returns and raises the same as `kvjax.save_cache`."""
        turns = {"messages": self.messages, "tokens": self.tokens, "parts": self._parts, "ends": self._ends}
        turns |= {"dropped": self.dropped}
        cache = self._require_cache("save")
        return write_cache(path, cache, self.llm.model, self.llm.policy, {TURNS: turns})

    @classmethod
    @named_arguments(where="Session.load")
    def load(cls, path: str | Path, llm: LLM) -> "Session":
        """Return the conversation that `save` wrote.

        Args:
            llm: the model and tokenizer of the conversation, and a policy that `kvjax.load_cache` accepts.

        Raises:
            UserError: `llm` is not an LLM, the saved cache has no conversation, or `kvjax.load_cache` refuses it.
        """
        session = cls(llm)
        cache, description = read_cache(path, llm.model, llm.policy)
        turns = description.get(TURNS)
        if turns is None:
            raise UserError(f"{path}: the saved cache has no conversation: kvjax.load_cache reads it")
        if not _is_valid(turns, int(on_host(cache.seen)[0]), llm.model.config.vocab_size):
            raise UserError(f"{path}: damaged (turns is {shown(turns)})")
        session.cache, session.messages, session.tokens = cache, turns["messages"], turns["tokens"]
        session._parts, session._ends = turns["parts"], turns.get("ends", [])
        session._dropped = {index: dict(session.messages[index]) for index in turns.get("dropped", [])}
        return session


def _without(cache: Cache, start: int, end: int) -> Cache:
    """Return a copy of a cache of one sequence without a span of tokens. The span may be empty."""
    return cache.without(0, start, end) if start < end else cache


def _is_valid(turns: Any, seen: int, vocabulary: int) -> bool:
    """Return True if saved turns are consistent with a conversation of which `seen` tokens were read."""
    try:
        messages, tokens, parts = turns["messages"], turns["tokens"], turns["parts"]
        # older files lack both
        ends, dropped = turns.get("ends", []), turns.get("dropped", [])
        valid = all(isinstance(x, list) for x in (messages, tokens, parts, ends, dropped))
        texts = [x for message in messages for x in (message["role"], message["content"])]
        valid &= all(type(x) is int and 0 <= x < vocabulary for x in tokens) and len(tokens) >= seen
        valid &= all(type(x) is int and 0 <= x <= len(tokens) for x in ends) and ends == sorted(ends)
        valid &= all(type(x) is int and 0 <= x < len(messages) for x in dropped)
        return valid and all(isinstance(x, str) for x in [*texts, *parts])
    except (TypeError, KeyError):
        return False
