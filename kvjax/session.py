"""A conversation whose cache lives on from turn to turn: only what is new is read."""

import copy
from pathlib import Path
from typing import Any

import numpy as np

from kvjax import cache as caches
from kvjax.cache import Cache, Stats
from kvjax.chat_template import PLACE, around, keeps_turns, templated, token_ids
from kvjax.errors import UserError, check_unicode, named_arguments, shown, warn, whole_number
from kvjax.inference.answers import stop_tokens_of, whole_answers
from kvjax.inference.forward import drop_observation_state
from kvjax.inference.generate import GREEDY, stream
from kvjax.inference.prefill import extend, prefill
from kvjax.inference.saving import read_cache, write_cache
from kvjax.llm import LLM
from kvjax.mesh import on_host, use_mesh
from kvjax.models.chat import content_span, difference, stable_prefix_length
from kvjax.sampling_params import SamplingParams

TURNS = "turns"
"""Name of the conversation in a saved cache's description."""


class Session:
    """A conversation with a model.

        session = kvjax.Session(llm)
        print(session.say("Who wrote Emma?"))
        other = session.fork()

    Each turn reads only the text that the chat template adds to the turns before, and the policy continues as in one
    long text. Without a template a conversation is one text.

    Templates of thinking models cut the thoughts out of earlier answers. With such a template the cache ends with the
    user's last turn, and the next turn reads the answer as the template then shows it. If a template changes anything
    else that was read, the conversation is read again from its beginning.

    Args:
        llm: model, tokenizer and policy. A policy that compacts at a prompt's end compacts the first turn alone, with a
            warning: `when=every` and `when=overflow` compact later turns, too.
        system: the text of the template's system turn.

    Raises:
        UserError: no LLM, or a system turn that the template does not take or has no place for.
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
        """The tokens that the next turn continues. The cache has read all of them but perhaps the last."""
        self._parts: list[str] = []
        """The text of the tokens, if these include the last answer: by turns the template's text and an answer."""
        self._ends: list[int] = []
        """The number of tokens up to the end of each part. There are fewer if an older kvjax saved the conversation."""
        self._dropped: dict[int, dict[str, str]] = {}
        """Copies of the messages that were dropped from the cache, by index."""
        self._keeps_turns = keeps_turns(llm.tokenizer, **llm.chat_template_kwargs)

    @property
    def _templated(self) -> bool:
        return bool(getattr(self.llm.tokenizer, "chat_template", None))

    @property
    def dropped(self) -> list[int]:
        """The indices of the messages that were dropped from the cache and have not been changed since."""
        return [index for index, one in self._dropped.items() if self.messages[index : index + 1] == [one]]

    @property
    def stats(self) -> Stats:
        """Sizes of its cache. Raises UserError before the first turn."""
        return caches.stats(self._begun("stats"), 1)

    def _begun(self, what: str) -> Cache:
        if self.cache is None:
            raise UserError(f"Session.{what}: nothing was said yet")
        return self.cache

    @named_arguments(where="Session.say")
    def say(self, text: str, sampling: SamplingParams = GREEDY) -> str:
        """Return the model's answer to a turn.

        Raises:
            UserError: no text, several answers, a stop text that is no token, or a chat template that does not take the
                turn; the conversation is then as it was.
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
        whole = "".join(self._parts) + text
        if self._templated:
            whole = templated(llm.tokenizer, messages, **llm.chat_template_kwargs)
        dropped = {index: self._dropped[index] for index in self.dropped}
        # the cache lacks a text that is to be seen now; without a template the messages do not make the text
        lacks = self._templated and dropped != self._dropped
        shown_before = self._shown_before(whole) if self._keeps_turns and not lacks else 0
        if self._parts and not shown_before:
            self._keeps_turns = False
        begins = not (self._templated or shown_before)
        new = token_ids(llm.tokenizer, whole[shown_before:], add_special_tokens=begins)
        tokens = self.tokens + new if shown_before else new
        end = len(tokens) - 1  # at least one token has to be read for an answer
        if not self._keeps_turns:
            end = min(end, stable_prefix_length(llm.tokenizer, messages, **llm.chat_template_kwargs))
        cache, read = self.cache, 0 if self.cache is None else int(on_host(self.cache.seen)[0])
        if lacks or read > end or tokens[:read] != self.tokens[:read]:
            cache, read = None, 0
        if cache is None and dropped:
            cache, read, kept = self._read_again(messages, tokens, list(dropped))
            dropped = {index: dropped[index] for index in kept}
        if read < end and not self._keeps_turns:
            cache, read = self._read(cache, tokens[read:end]), end
        options = {"policy": llm.policy, "tokenizer": llm.tokenizer, "chunk": llm.chunk, "cache": cache}
        if cache is None:
            options |= {"capacity": llm.capacity, "page_size": llm.page_size}
        for block in stream(llm.model, [np.asarray(tokens[read:])], sampling, **options):
            blocks.append(block)
        after = blocks[-1].cache
        eos, sizes = llm.model.config.eos_ids, caches.stats(after, 1)
        found = whole_answers(blocks, [sampling], [0], sizes, eos, llm.tokenizer)
        assert found.texts is not None
        answer, said = found.tokens[0].tolist(), found.texts[0]
        if self._keeps_turns or cache is None:
            self.cache, self.tokens = after, tokens + answer
            before, ends = (self._parts, self._ends) if shown_before else ([], [])
            self._parts = [*before, whole[shown_before:], said]
            self._ends = [*ends, len(tokens), len(self.tokens)] if len(ends) == len(before) else []
        else:
            self.cache, self.tokens, self._parts, self._ends = cache, tokens[:read], [], []
        self.messages, self._dropped = [*messages, {"role": "assistant", "content": said}], dropped
        return said

    def _shown_before(self, whole: str) -> int:
        """Return how many characters of the text to be answered are the text so far, where answers may have lost the
        white space around them; 0 if they are not."""
        place = 0
        for index, part in enumerate(self._parts):
            forms = (part, part.strip()) if index % 2 else (part,)
            form = next((x for x in forms if whole.startswith(x, place)), None)
            if form is None:
                return 0
            place += len(form)
        return place

    def _read(self, cache: Cache | None, new: list[int]) -> Cache:
        """Return a copy of the cache that has read new tokens, or a new cache that has."""
        llm, rows = self.llm, [np.asarray(new)]
        if cache is None:
            own = {"capacity": llm.capacity, "page_size": llm.page_size, "chunk": llm.chunk}
            cache = prefill(llm.model, rows, policy=llm.policy, **own)
            with use_mesh(llm.model):
                return drop_observation_state(cache, llm.policy.compile(llm.model).decode)
        with use_mesh(llm.model):
            compiled = llm.policy.compile(llm.model)
            cache, _ = extend(llm.model, compiled, cache, rows, 0, llm.chunk, None)
            caches.check(cache, llm.policy.name)
        return cache

    def _read_again(
        self, messages: list[dict[str, str]], tokens: list[int], dropped: list[int]
    ) -> tuple[Cache | None, int, list[int]]:
        """Return a new cache, None if it is empty, that has read a chat's tokens up to the end of the last dropped
        message, the number of these tokens, and the messages that could be dropped again."""
        spans: dict[int, tuple[int, int]] = {}

        def kept(index: int, error: UserError) -> None:
            warn(f"Session.say: message {index} was read again and not dropped: {error}", stacklevel=5)

        for index in dropped:
            try:
                spans[index] = content_span(
                    self.llm.tokenizer, messages, tokens, index, **self.llm.chat_template_kwargs
                )
            except UserError as error:
                kept(index, error)
        read = min(max((end for _, end in spans.values()), default=0), len(tokens) - 1)
        if not read:
            return None, 0, list(spans)
        cache = self._read(None, tokens[:read])
        for index, (start, end) in list(spans.items()):
            try:
                cache = _without(cache, start, min(end, read))
            except UserError as error:
                kept(index, error)
                del spans[index]
        return cache, read, list(spans)

    def fork(self) -> "Session":
        """Return another conversation that begins as this one did so far. They share the cache of what was read, and
        neither changes the other."""
        other = copy.copy(self)
        for name in ("messages", "tokens", "_dropped", "_parts", "_ends"):
            setattr(other, name, copy.copy(getattr(self, name)))
        return other

    @named_arguments(where="Session.drop")
    def drop(self, turn: int) -> None:
        """Drop a turn from the cache, such as a tool's output that is not needed any more. What was read after it stays
        as it is, and later turns do not see it. Its pages are free, but for what a fork still holds. A turn that was
        dropped before stays dropped, and the template goes on to show it.

        Args:
            turn: the index of its message in `messages`.

        Raises:
            UserError: no such turn, one that is not read yet, or one that `Cache.without` refuses.
        """
        cache = self._begun("drop")
        turn = whole_number("Session.drop", "turn", turn, 0, len(self.messages) - 1)
        if turn in self.dropped:
            return
        start, end = self._span(turn)
        # the last token of an answer is read with the next turn
        end = min(end, int(on_host(cache.seen)[0]))
        self.cache = _without(cache, start, end)
        self._dropped[turn] = dict(self.messages[turn])

    def _span(self, turn: int) -> tuple[int, int]:
        """Return the indices of the first token of a turn's text and of the one after the last."""
        tokenizer, options = self.llm.tokenizer, self.llm.chat_template_kwargs
        if not self._parts:
            if turn == len(self.messages) - 1:
                raise UserError(
                    "Session.drop: the last answer is read with the next turn, as the template then shows it"
                )
            read = self.messages[:-1]
            tokens = token_ids(tokenizer, templated(tokenizer, read, **options))
            return content_span(tokenizer, read, tokens, turn, **options)
        if len(self._ends) != len(self._parts):
            raise UserError(
                "Session.drop: an older kvjax saved the conversation, and not where its turns are"
            )
        # the user's first turn since the conversation was last read from its beginning
        first = len(self.messages) - len(self._parts)
        place = 2 * max(0, (turn - first) // 2)
        user = first + place
        begin, end = self._ends[place - 1] if place else 0, self._ends[place]
        if turn > user:
            return end, self._ends[place + 1]
        part = self._parts[place]
        if not self._templated:
            return end - len(token_ids(tokenizer, part)), end
        whole = templated(tokenizer, self.messages[: user + 1], **options)
        other = [dict(one) for one in self.messages[: user + 1]]
        other[turn]["content"] = PLACE
        text = PLACE.join(around(tokenizer, other, **options))[len(whole) - len(part) :]
        start, stop = difference(self.tokens[begin:end], token_ids(tokenizer, text))
        return begin + start, begin + stop

    @named_arguments(where="Session.save")
    def save(self, path: str | Path) -> int:
        """Write it into a folder, for `load`. It returns and raises what `kvjax.save_cache` does."""
        turns = {"messages": self.messages, "tokens": self.tokens, "parts": self._parts, "ends": self._ends}
        turns |= {"dropped": self.dropped}
        cache = self._begun("save")
        return write_cache(path, cache, self.llm.model, self.llm.policy, {TURNS: turns})

    @classmethod
    @named_arguments(where="Session.load")
    def load(cls, path: str | Path, llm: LLM) -> "Session":
        """Return the conversation that `save` wrote.

        Args:
            llm: the model and tokenizer of the conversation, since the next turn is read after the earlier turns as the
                chat template rendered them, and a policy as `kvjax.load_cache` takes it.

        Raises:
            UserError: no LLM, a saved cache that is no conversation, or one that `kvjax.load_cache` refuses.
        """
        session = cls(llm)
        cache, found = read_cache(path, llm.model, llm.policy)
        turns = found.get(TURNS)
        if turns is None:
            raise UserError(f"{path}: a cache that is no conversation: kvjax.load_cache reads it")
        if not _whole(turns, int(on_host(cache.seen)[0]), llm.model.config.vocab_size):
            raise UserError(f"{path}: damaged (turns is {shown(turns)})")
        session.cache, session.messages, session.tokens = cache, turns["messages"], turns["tokens"]
        session._parts, session._ends = turns["parts"], turns.get("ends", [])
        session._dropped = {index: dict(session.messages[index]) for index in turns.get("dropped", [])}
        return session


def _without(cache: Cache, start: int, end: int) -> Cache:
    """Return a copy of a cache of one sequence without a span, which may be empty."""
    return cache.without(0, start, end) if start < end else cache


def _whole(turns: Any, seen: int, vocabulary: int) -> bool:
    """Return True if saved turns are those of a conversation of which `seen` tokens were read."""
    try:
        messages, tokens, parts = turns["messages"], turns["tokens"], turns["parts"]
        # older files have neither
        ends, dropped = turns.get("ends", []), turns.get("dropped", [])
        whole = all(isinstance(x, list) for x in (messages, tokens, parts, ends, dropped))
        texts = [x for message in messages for x in (message["role"], message["content"])]
        whole &= all(type(x) is int and 0 <= x < vocabulary for x in tokens) and len(tokens) >= seen
        whole &= all(type(x) is int and 0 <= x <= len(tokens) for x in ends) and ends == sorted(ends)
        whole &= all(type(x) is int and 0 <= x < len(messages) for x in dropped)
        return whole and all(isinstance(x, str) for x in [*texts, *parts])
    except (TypeError, KeyError):
        return False
