"""The base class of recipes that need document borders and labelled tokens: natural text, or hidden passkeys."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.models.decoder import Decoder
from kvjax.train.data import Data, DataRequest, MakeSequence, open_builtin
from kvjax.train.packing import StreamEncoder
from kvjax.train.packs import Labelled, labelled, natural, open_packs
from kvjax.train.passkeys import ORDINALS, Passkeys, Text
from kvjax.train.recipe import Recipe, Rule

ANSWER_SHARES = 0.6, 0.1, 0.1, 0.0
"""The shares of `kvjax.tasks.Mixture` if only answers are learned. Plain text has none, so its share is 0."""


@dataclasses.dataclass(frozen=True)
class LabelledRecipe(Recipe):
    """A recipe whose batches have `tokens`, `document` and `labelled`, [b t] each (`kvjax.train.packs.Labelled`)."""

    data_kind: Literal["natural", "passkeys"] = "natural"
    """The tokens that are learned. natural: all tokens of packed documents, which do not see each other (PruLong).
    passkeys: random words that are hidden in the documents' text and asked for at its end (DuoAttention). With the
    built-in tasks: all tokens, or the answers to questions about what is hidden."""
    also: tuple[str, ...] = ()
    """The sources in addition to --data, named in the same way. All documents of a sequence come from one source."""
    mix: tuple[float, ...] = ()
    """The relative shares of tokens of --data and of each source of --also."""
    passkeys: int = 10
    """The number of passkeys of a sequence, for --data-kind passkeys."""
    words: int = 32
    """The number of words of a passkey, for --data-kind passkeys."""

    def rules(self) -> Iterator[Rule]:
        yield from super().rules()
        listed, count, single = ", ".join(self.sources), len(self.sources), not self.also
        yield len(set(self.sources)) == count, "--data and --also", "sources that are named once", listed
        yield single or "builtin" not in self.sources, "--data and --also", "files or hub datasets", listed
        expected = "left out without --also" if single else f"{count} weights, one for each of {listed}"
        yield len(self.mix) == (0 if single else count), "--mix", expected, list(self.mix)
        yield all(weight > 0 for weight in self.mix), "--mix", "weights above 0", list(self.mix)
        yield 1 <= self.passkeys <= len(ORDINALS), "--passkeys", f"from 1 to {len(ORDINALS)}", self.passkeys
        yield self.words >= 1, "--words", "at least 1", self.words
        expected = "left out where none are hidden in documents (--data-kind passkeys, --data not builtin)"
        uses_passkeys = self.data_kind == "passkeys" and self.data != "builtin"
        for name in ("passkeys", "words"):
            value = getattr(self, name)
            yield uses_passkeys or value == getattr(LabelledRecipe, name), f"--{name}", expected, value

    @property
    def sources(self) -> tuple[str, ...]:
        """All sources of the run's documents."""
        return self.data, *self.also

    def row(self, model: Decoder, length: int) -> dict[str, jax.ShapeDtypeStruct]:
        dtypes = {"tokens": jnp.int32, "document": jnp.int32, "labelled": jnp.bool_}
        return {name: jax.ShapeDtypeStruct((length,), dtype) for name, dtype in dtypes.items()}

    def open_data(self, request: DataRequest) -> Data:
        if request.source == "builtin":
            return open_builtin(request, functools.partial(_make_builtin, self.data_kind == "passkeys"))
        encode, finish = StreamEncoder(request.tokenizer), natural
        if self.data_kind == "passkeys":
            encode = Text(request.tokenizer)
            finish = Passkeys(request.tokenizer, request.seed, self.passkeys, self.words)
            finish.check(min(request.lengths))
        return open_packs(request, self.sources, self.mix or (1.0,), encode, finish)


def _make_builtin(passkeys: bool, split: Literal["train", "evaluate"]) -> MakeSequence:
    """Return the function that makes sequences of the built-in tasks, each of which is one document. With `passkeys`
    every task asks for something hidden, and the answers are learned. Otherwise there is plain text, too, and all
    tokens are learned."""
    from kvjax.tasks import Mixture, builtin_text, builtin_vocabulary

    mixture = Mixture(
        builtin_vocabulary(), builtin_text(split), ANSWER_SHARES if passkeys else Mixture.shares
    )

    def make(seed: int, index: int, length: int) -> Labelled:
        tokens, weights = mixture(seed, index, length)
        document = np.zeros(length, np.int32)
        return labelled(tokens, document, weights > 0) if passkeys else natural(index, tokens, document)

    return make
