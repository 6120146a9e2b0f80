"""Passkeys: random words that are hidden in real text and asked for after it, in any tokenizer's tokens.

They follow DuoAttention (arXiv:2410.10819, Sec. 2.2): 10 passkeys of 32 words, asked for in their order, at depths
drawn from 1,000 values between 5% and 95% of the text. Here the text fills the space that passkeys and questions leave.
Only the answers are labelled, as in the paper; the authors' code labels the questions, too.
"""

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int

from kvjax.errors import UserError
from kvjax.train.conversation import Conversation
from kvjax.train.data import plain_tokens
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
"""The names of passkeys. There can be only as many passkeys as names."""
DEPTHS = np.linspace(0.05, 0.95, 1000)
"""The possible depths of a passkey: the share of the text before it."""
HEAD, TAIL = "Here is a long book. <book>\n\n", "\n\n</book>"
KEY = "\n\nRemember these words in their order. They are the {} passkey to the vault:"
QUESTION = "\n\nAccording to the book, what is the {} passkey to the vault?\nPasskey:"


@dataclass(frozen=True)
class Text:
    """A function that encodes a document of the text in which passkeys are hidden."""

    tokenizer: Any
    """The model's tokenizer."""

    def __call__(self, text: str) -> Int[np.ndarray, " t"]:
        if isinstance(text, Conversation):
            return text.tokens(self.tokenizer)
        return plain_tokens(self.tokenizer, f"{text}\n\n")


@dataclass(frozen=True)
class Passkeys:
    """A function that makes a sequence from a pack of text: the first tokens of the text with passkeys in between,
    followed by the questions with their answers. The sequence is one document. Words and depths depend on seed and
    index alone."""

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
        passkeys = [" ".join(rng.choice(WORDS, self.words)) for _ in range(self.count)]
        depths = np.sort(rng.choice(DEPTHS, self.count, replace=False))
        keys = [self._fill(KEY, i, words, "\n\n")[0] for i, words in enumerate(passkeys)]
        questions = [self._fill(QUESTION, i, words) for i, words in enumerate(passkeys)]
        text_length = len(tokens) - self._size(keys, [question for question, _ in questions])
        if text_length < 0:
            raise self._too_short(len(tokens), len(tokens) - text_length)
        text_parts = np.split(tokens[:text_length], (depths * text_length).astype(int))
        head, tail = self._frame
        pieces = [head, text_parts[0]]
        for key, text in zip(keys, text_parts[1:], strict=True):
            pieces += [key, text]
        pieces += [tail, *(question for question, _ in questions)]
        learned = [np.zeros(sum(map(len, pieces[: -self.count])), bool)]
        learned += [np.arange(len(question)) >= answer for question, answer in questions]
        result = np.concatenate(pieces)
        return labelled(result, np.zeros(len(result), np.int32), np.concatenate(learned))

    def check(self, length: int) -> None:
        """Raise UserError if passkeys may not fit sequences of `length` tokens. The message has the minimum length."""
        longest = max(WORDS, key=lambda word: len(plain_tokens(self.tokenizer, f" {word} {word}")))
        passkey = " ".join([longest] * self.words)
        keys = [self._fill(KEY, i, passkey, "\n\n")[0] for i in range(self.count)]
        questions = [self._fill(QUESTION, i, passkey)[0] for i in range(self.count)]
        if length < (minimum := self._size(keys, questions)):
            raise self._too_short(length, minimum)

    def _fill(
        self, template: str, index: int, words: str, suffix: str = ""
    ) -> tuple[Int[np.ndarray, " t"], int]:
        """Fill a template. Return its tokens with the words, and the number of tokens before the words."""
        before = template.format(ORDINALS[index])
        tokens, prefix = (
            plain_tokens(self.tokenizer, text) for text in (f"{before} {words}{suffix}", before)
        )
        agreeing = tokens[: len(prefix)] == prefix[: len(tokens)]
        return tokens, len(agreeing) if agreeing.all() else int(np.argmin(agreeing))

    def _size(self, keys: list[Any], questions: list[Any]) -> int:
        """Return the number of tokens of everything except the text."""
        return sum(map(len, (*self._frame, *keys, *questions)))

    def _too_short(self, length: int, minimum: int) -> UserError:
        return UserError(
            f"--lengths {length}: {self.count} passkeys of {self.words} words and their questions take {minimum} "
            f"tokens: name lengths of at least {minimum}, or fewer --passkeys or --words"
        )

    @functools.cached_property
    def _frame(self) -> tuple[Int[np.ndarray, " _"], Int[np.ndarray, " _"]]:
        """The tokens before the text, with the tokenizer's begin token if it has one, and the tokens after the text."""
        beginning = self.tokenizer("", verbose=False)["input_ids"][:1]
        beginning = beginning if beginning == [self.tokenizer.bos_token_id] else []
        head, tail = (plain_tokens(self.tokenizer, text) for text in (HEAD, TAIL))
        return np.concatenate([np.asarray(beginning, np.int32), head]), tail
