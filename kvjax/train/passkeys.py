"""Passkeys: random words hidden in real text and asked for after it, in any tokenizer's tokens.

They follow DuoAttention (arXiv:2410.10819, Sec. 2.2): 10 passkeys of 32 words, at depths drawn from 1,000 between 5%
and 95% of the text, asked for in their order. Here the text is as long as the sequence has space for it. Only the
answers are labelled, as in the paper; the authors' code labels the questions, too.
"""

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int

from kvjax.errors import UserError
from kvjax.train.conversation import Conversation
from kvjax.train.packs import Labelled, labelled

WORDS = (
    *("alpha", "bravo", "charlie", "delta", "echo", "foxtrot", "golf", "hotel", "india", "juliett", "kilo"),
    *("lima", "mike", "november", "oscar", "papa", "quebec", "romeo", "sierra", "tango", "uniform", "victor"),
    *("whiskey", "xray", "yankee", "zulu"),
)
"""The words of passkeys: the radio alphabet, as published."""
ORDINALS = (
    *(
        "first",
        "second",
        "third",
        "fourth",
        "fifth",
        "sixth",
        "seventh",
        "eighth",
        "ninth",
        "tenth",
        "eleventh",
    ),
    *("twelfth", "thirteenth", "fourteenth", "fifteenth", "sixteenth", "seventeenth", "eighteenth"),
    *("nineteenth", "twentieth"),
)
"""The names of passkeys, which limit their number."""
DEPTHS = np.linspace(0.05, 0.95, 1000)
"""The possible depths of a passkey: shares of the text before it."""
HEAD, TAIL = "Here is a long book. <book>\n\n", "\n\n</book>"
KEY = "\n\nRemember these words in their order. They are the {} passkey to the vault:"
QUESTION = "\n\nAccording to the book, what is the {} passkey to the vault?\nPasskey:"


@dataclass(frozen=True)
class Text:
    """The encoding of a document of the text that passkeys are hidden in."""

    tokenizer: Any
    """The model's tokenizer."""

    def __call__(self, text: str) -> Int[np.ndarray, " t"]:
        if isinstance(text, Conversation):
            return np.asarray(text.tokens(self.tokenizer), np.int32)
        return _bare(self.tokenizer, f"{text}\n\n")


@dataclass(frozen=True)
class Passkeys:
    """A function that makes a sequence from a pack of text: the first tokens of the text with passkeys in between,
    followed by the questions with their answers. All of it is one document. Words and depths depend on seed and index
    alone."""

    tokenizer: Any
    """The model's tokenizer."""
    seed: int
    """The seed of words and depths."""
    count: int = 10
    """The number of passkeys of a sequence."""
    words: int = 32
    """The number of words of a passkey."""

    def __call__(
        self, index: int, tokens: Int[np.ndarray, " t"], document: Int[np.ndarray, " t"]
    ) -> Labelled:
        """Return sequence `index`, as long as the pack. Raises UserError if passkeys and questions do not fit."""
        rng = np.random.default_rng((self.seed, 45, index))
        drawn = [" ".join(rng.choice(WORDS, self.words)) for _ in range(self.count)]
        depths = np.sort(rng.choice(DEPTHS, self.count, replace=False))
        keys = [self._said(KEY, i, words, "\n\n")[0] for i, words in enumerate(drawn)]
        asked = [self._said(QUESTION, i, words) for i, words in enumerate(drawn)]
        room = len(tokens) - self._size(keys, [question for question, _ in asked])
        if room < 0:
            raise self._too_short(len(tokens), len(tokens) - room)
        between = np.split(tokens[:room], (depths * room).astype(int))
        head, tail = self._around
        pieces = [head, between[0]]
        for key, text in zip(keys, between[1:], strict=True):
            pieces += [key, text]
        pieces += [tail, *(question for question, _ in asked)]
        learned = [np.zeros(sum(map(len, pieces[: -self.count])), bool)]
        learned += [np.arange(len(question)) >= answer for question, answer in asked]
        whole = np.concatenate(pieces)
        return labelled(whole, np.zeros(len(whole), np.int32), np.concatenate(learned))

    def check(self, length: int) -> None:
        """Raise UserError, with the least length that fits, if passkeys may not fit sequences of `length` tokens."""
        longest = max(WORDS, key=lambda word: len(_bare(self.tokenizer, f" {word} {word}")))
        words = " ".join([longest] * self.words)
        keys = [self._said(KEY, i, words, "\n\n")[0] for i in range(self.count)]
        asked = [self._said(QUESTION, i, words)[0] for i in range(self.count)]
        if length < (least := self._size(keys, asked)):
            raise self._too_short(length, least)

    def _said(self, form: str, index: int, words: str, after: str = "") -> tuple[Int[np.ndarray, " t"], int]:
        """Return the tokens of a passkey or a question with its words, and the number of tokens before the words."""
        before = form.format(ORDINALS[index])
        whole, own = (_bare(self.tokenizer, text) for text in (f"{before} {words}{after}", before))
        same = whole[: len(own)] == own[: len(whole)]
        return whole, len(same) if same.all() else int(np.argmin(same))

    def _size(self, keys: list[Any], asked: list[Any]) -> int:
        """Return the number of tokens of all but the text."""
        return sum(map(len, (*self._around, *keys, *asked)))

    def _too_short(self, length: int, least: int) -> UserError:
        return UserError(
            f"--lengths {length}: {self.count} passkeys of {self.words} words and their questions take {least} tokens: "
            f"name lengths of at least {least}, or fewer --passkeys or --words"
        )

    @functools.cached_property
    def _around(self) -> tuple[Int[np.ndarray, " _"], Int[np.ndarray, " _"]]:
        """The tokens before the text, the tokenizer's beginning of a text included, and the tokens after it."""
        begin = self.tokenizer("", verbose=False)["input_ids"][:1]
        begin = begin if begin == [self.tokenizer.bos_token_id] else []
        head, tail = (_bare(self.tokenizer, text) for text in (HEAD, TAIL))
        return np.concatenate([np.asarray(begin, np.int32), head]), tail


def _bare(tokenizer: Any, text: str) -> Int[np.ndarray, " t"]:
    """Return a text's tokens without the tokenizer's special tokens."""
    return np.asarray(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], np.int32)
