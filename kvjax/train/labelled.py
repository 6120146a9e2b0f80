"""Of recipes whose loss knows documents apart, and which tokens are learned: natural text, or passkeys hidden in it."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.models.decoder import Decoder
from kvjax.train.data import Data, Made, Wanted, open_builtin
from kvjax.train.packing import StreamEncoder
from kvjax.train.packs import Labelled, labelled, natural, open_packs
from kvjax.train.passkeys import ORDINALS, Passkeys, Text
from kvjax.train.recipe import Recipe, Rule

ASKED = 0.6, 0.1, 0.1, 0.0
"""Shares of the built-in tasks, of `kvjax.tasks.Mixture`, where answers are learned: plain text has none."""


@dataclasses.dataclass(frozen=True)
class LabelledRecipe(Recipe):
    """A recipe whose loss gets for its batch `tokens`, `document` and `labelled`, [b t] each
    (`kvjax.train.packs.Labelled`)."""

    data_kind: Literal["natural", "passkeys"] = "natural"
    """What is learned: documents, packed and each by itself, all of their tokens (PruLong); or random words hidden in
    their text and asked for behind it (DuoAttention). Of the built-in tasks: all tokens, or the answers to questions
    about what is hidden."""
    also: tuple[str, ...] = ()
    """Sources beside --data, each named as that is: a sequence's documents are of one of them."""
    mix: tuple[float, ...] = ()
    """With --also: the share of tokens of --data and of each other source, relative to the others."""
    passkeys: int = 10
    """Of --data-kind passkeys: how many a sequence."""
    words: int = 32
    """Of --data-kind passkeys: words of each."""

    def rules(self) -> Iterator[Rule]:
        yield from super().rules()
        shown, count, one = ", ".join(self.sources), len(self.sources), not self.also
        yield len(set(self.sources)) == count, "--data and --also", "sources that are named once", shown
        yield one or "builtin" not in self.sources, "--data and --also", "files or hub data sets", shown
        told = "left out without --also" if one else f"{count} weights, one for each of {shown}"
        yield len(self.mix) == (0 if one else count), "--mix", told, list(self.mix)
        yield all(weight > 0 for weight in self.mix), "--mix", "weights above 0", list(self.mix)
        yield 1 <= self.passkeys <= len(ORDINALS), "--passkeys", f"from 1 to {len(ORDINALS)}", self.passkeys
        yield self.words >= 1, "--words", "at least 1", self.words
        told = "left out where none are hidden in documents (--data-kind passkeys, --data not builtin)"
        read = self.data_kind == "passkeys" and self.data != "builtin"
        for name in ("passkeys", "words"):
            value = getattr(self, name)
            yield read or value == getattr(LabelledRecipe, name), f"--{name}", told, value

    @property
    def sources(self) -> tuple[str, ...]:
        """All that the run's documents come from."""
        return self.data, *self.also

    def row(self, model: Decoder, length: int) -> dict[str, jax.ShapeDtypeStruct]:
        kinds = {"tokens": jnp.int32, "document": jnp.int32, "labelled": jnp.bool_}
        return {name: jax.ShapeDtypeStruct((length,), dtype) for name, dtype in kinds.items()}

    def open_data(self, wanted: Wanted) -> Data:
        if wanted.source == "builtin":
            return open_builtin(wanted, functools.partial(_builtin, self.data_kind == "passkeys"))
        encode, finish = StreamEncoder(wanted.tokenizer), natural
        if self.data_kind == "passkeys":
            encode = Text(wanted.tokenizer)
            finish = Passkeys(wanted.tokenizer, wanted.seed, self.passkeys, self.words)
            finish.check(min(wanted.lengths))
        return open_packs(wanted, self.sources, self.mix or (1.0,), encode, finish)


def _builtin(passkeys: bool, split: Literal["train", "evaluate"]) -> Made:
    """Sequences of the built-in tasks, a document each: with text, of which all is learned, or (`passkeys`) those that
    ask for what they hide, of which the answers are."""
    from kvjax.tasks import Mixture, builtin_text, builtin_vocabulary

    mixture = Mixture(builtin_vocabulary(), builtin_text(split), ASKED if passkeys else Mixture.shares)

    def make(seed: int, index: int, length: int) -> Labelled:
        tokens, weights = mixture(seed, index, length)
        document = np.zeros(length, np.int32)
        return labelled(tokens, document, weights > 0) if passkeys else natural(index, tokens, document)

    return make
