"""A conversation whose cache lives on from turn to turn: only what is new is read."""

import copy
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np

from kvjax import cache as caches
from kvjax.cache import Cache, Stats
from kvjax.chat_template import templated, token_ids
from kvjax.errors import UserError, check_unicode, named_arguments, shown, warn
from kvjax.inference.checks import check_arguments
from kvjax.inference.sampling import stream
from kvjax.inference.saving import read_cache, write_cache
from kvjax.inference.stop import decoded
from kvjax.models.decoder import Decoder
from kvjax.policies import make_policy
from kvjax.policies.policy import Policy

TURNS = "turns"
"""Of a saved cache's description: who said what."""


class Session:
    """A conversation with a model.

        session = kvjax.Session(model, policy, tokenizer)
        print(session.say("Who wrote Emma?"))
        other = session.fork()

    Each turn reads what the chat template adds to the turns before, behind what the cache holds, and the policy goes on
    as in one long text. Without a template a conversation is one text.

    Args:
        policy: from `make_policy`; None is the full cache. One that compacts at a prompt's end compacts the first turn
            alone, which is said: `when="every"` or `when="overflow"` go on.
        tokenizer: from `kvjax.load`.
        system: what the template's system turn says.

    Raises:
        UserError: no tokenizer, or a system turn that the template does not take or has no place for.
    """

    @named_arguments()
    def __init__(self, model: Decoder, policy: Policy | None = None, tokenizer: Any = None, system: str = ""):
        if tokenizer is None or not callable(tokenizer):
            raise UserError(f"Session: tokenizer must come from kvjax.load, got {shown(tokenizer)}")
        check_arguments("Session", model, policy)
        if not isinstance(system, str):
            raise UserError(f"Session: system must be a text, got {shown(system)}")
        check_unicode(system)
        self.model, self.tokenizer = model, cast(Any, tokenizer)
        self.policy = make_policy("full") if policy is None else policy
        if self.policy.when is not None and not self.policy.when.while_decoding:
            warn(
                f"Session: policy {self.policy.name} compacts the first turn alone, and all later ones stay: "
                'when="every" or when="overflow" goes on',
                stacklevel=2,
            )
        self.cache: Cache | None = None
        """What the model remembers of it; None before the first turn."""
        self.messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
        """Who said what so far."""
        if system and not self._templated:
            raise UserError("Session: system= needs a tokenizer with a chat template, and this one has none")
        self.tokens: list[int] = []
        """All tokens so far, of which the cache has read all but perhaps the last."""
        self._parts: list[str] = []
        """The text so far: in turn what the template says, and an answer."""

    @property
    def _templated(self) -> bool:
        return bool(getattr(self.tokenizer, "chat_template", None))

    @property
    def stats(self) -> Stats:
        """Sizes of its cache. Raises UserError before the first turn."""
        return caches.stats(self._begun("stats"), 1)

    def _begun(self, what: str) -> Cache:
        if self.cache is None:
            raise UserError(f"Session.{what}: nothing was said yet")
        return self.cache

    @named_arguments()
    def say(
        self,
        text: str,
        *,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        key: jax.Array | None = None,
    ) -> str:
        """The model's answer to a turn. The other arguments are as in `kvjax.sample`.

        Raises:
            UserError: no text, or a chat template that shows earlier turns otherwise once there is a later one; the
                conversation is then as it was.
        """
        if not isinstance(text, str) or not text:
            raise UserError(f"Session.say: expected a text, got {shown(text)}")
        check_unicode(text)
        new = self._next(text)
        ids = token_ids(self.tokenizer, new, add_special_tokens=not (self._templated or self._parts))
        read = 0 if self.cache is None else int(np.asarray(self.cache.seen)[0])
        tokens, answer, cache = self.tokens + ids, [], self.cache
        for parts, held in stream(
            self.model, [np.asarray(tokens[read:])], policy=self.policy, cache=cache, max_new_tokens=max_new_tokens,
            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, key=key,
        ):  # fmt: skip
            answer += parts[0].tolist()
            cache = held
        if answer and answer[-1] in self.model.config.eos_ids:
            answer.pop()
        said = decoded(self.tokenizer, answer)
        self.cache, self.tokens = cache, tokens + answer
        self._parts += [new, said]
        self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": said}]
        return said

    def _next(self, text: str) -> str:
        """What a user's turn adds to the text so far."""
        if not self._templated:
            return text
        whole = templated(self.tokenizer, [*self.messages, {"role": "user", "content": text}])
        if not self._parts:
            return whole
        # an answer may be shown without the white space around it
        place = 0
        for index, part in enumerate(self._parts):
            forms = (part, part.strip()) if index % 2 else (part,)
            form = next((x for x in forms if whole.startswith(x, place)), None)
            if form is None:
                raise UserError(
                    "Session.say: the tokenizer's chat template shows earlier turns otherwise once there is a later "
                    f"one, from {shown(whole[place : place + 40])} on, and the cache has read them as they were"
                )
            place += len(form)
        return whole[place:]

    def fork(self) -> "Session":
        """Another conversation that begins as this one did so far. They share what the model remembers of it, and
        neither changes the other."""
        other = copy.copy(self)
        other.messages, other.tokens, other._parts = self.messages[:], self.tokens[:], self._parts[:]
        return other

    @named_arguments(where="Session.save")
    def save(self, path: str | Path) -> int:
        """Write it into a folder, for `load`: as `kvjax.save_cache`, which says what is returned and raised."""
        turns = {"messages": self.messages, "tokens": self.tokens, "parts": self._parts}
        return write_cache(path, self._begun("save"), self.model, self.policy, {TURNS: turns})

    @classmethod
    @named_arguments(where="Session.load")
    def load(
        cls, path: str | Path, model: Decoder, policy: Policy | None = None, tokenizer: Any = None
    ) -> "Session":
        """The conversation that `save` wrote.

        Args:
            model, policy: as of `kvjax.load_cache`.
            tokenizer: the one that it was held with, from `kvjax.load`: what is said next is read behind what its chat
                template made of the turns before.

        Raises:
            UserError: no tokenizer, a saved cache that is no conversation, or one that `kvjax.load_cache` refuses.
        """
        session = cls(model, policy, tokenizer)
        cache, found = read_cache(path, model, policy)
        turns = found.get(TURNS)
        if turns is None:
            raise UserError(f"{path}: a cache that is no conversation: kvjax.load_cache reads it")
        if not _whole(turns, int(np.asarray(cache.seen)[0]), model.config.vocab_size):
            raise UserError(f"{path}: damaged (turns is {shown(turns)})")
        session.cache, session.messages, session.tokens = cache, turns["messages"], turns["tokens"]
        session._parts = turns["parts"]
        return session


def _whole(turns: Any, seen: int, vocabulary: int) -> bool:
    """Whether saved turns are those of a conversation of which `seen` tokens were read."""
    try:
        texts = [x for message in turns["messages"] for x in (message["role"], message["content"])]
        tokens = turns["tokens"]
        whole = all(type(x) is int and 0 <= x < vocabulary for x in tokens) and len(tokens) >= seen
        return whole and all(isinstance(x, str) for x in [*texts, *turns["parts"]])
    except (TypeError, KeyError):
        return False
