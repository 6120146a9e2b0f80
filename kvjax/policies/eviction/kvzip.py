"""KVzip (Kim et al., 2025, arXiv:2505.23416): what the model looks at while it repeats the context is what it needs."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.chat_template import around, opening
from kvjax.errors import UserError, whole_number
from kvjax.policies.base import Eviction, Numbers, Pass, Reconstruction, State
from kvjax.policies.budget import Shares
from kvjax.policies.eviction.texts import check_tokenizer, token_ids
from kvjax.policies.schedule import Needs
from kvjax.policies.views import Passage, Step, Stored
from kvjax.struct import assign, host, struct
from pallas_kernels.attention_mass import attention_mass

INSTRUCTION = "\n\nRepeat the previous context exactly."
RESUMPTION = "\n\nRepeat the part of the previous context exactly, starting with "
LEAD = 8
"""The last tokens of the part before, behind `RESUMPTION`."""
TEXTS = "instruction", "resumption", "tail", "opening"
"""Fields of token ids."""


@struct
class KVzip(Reconstruction, Eviction):
    """The most that any query pays an entry while the model repeats the context, over queries and a group's query heads
    (eq. 2 and 3): once the prompt was read, each part of `repeated` tokens is asked for and read once more behind it. A
    query's attention is over the prompt's prefix, this part's entries and the input's own tokens alone. All layers and
    heads share the budget unless told otherwise (`over`).

    The prefix (the chat template's own tokens, a system prompt) always stays, beside the budget, as in the authors'
    code: a ratio is of the context's entries.
    """

    tokenizer: Any = host(default=None, repr=False)
    """The model's, which the texts are written with. It is not kept: their token ids are."""
    instruction: tuple[int, ...] = host(default=(), repr=False)
    """Token ids of what asks for the first part; none, here and below: the published text by the tokenizer."""
    resumption: tuple[int, ...] = host(default=(), repr=False)
    """Token ids of what asks for a later part, whose beginning is told by the last 8 tokens of the part before."""
    tail: tuple[int, ...] = host(default=(), repr=False)
    """Token ids between what asks and what is repeated: where the user's turn ends and the answer begins."""
    opening: tuple[int, ...] = host(default=(), repr=False)
    """Token ids that come before a user's text. What a prompt has in common with their beginning is its prefix."""
    prefix: int | None = host(default=None)
    """Tokens of every prompt's prefix; None: those in common with `opening`."""
    repeated: int = host(default=2000)
    """Tokens of a part."""
    sink: int | None = host(default=None)
    """As kvpress has it, only so many first entries always stay and are looked at beside a part. They take places of
    the budget, and the rest of the prefix goes first. None: the prefix stays."""
    name = "kvzip"

    def __post_init__(self):
        for name, least in (("prefix", 0), ("repeated", 1), ("sink", 0)):
            if (number := getattr(self, name)) is not None or name == "repeated":
                assign(self, **{name: whole_number(self.name, name, number, least)})
        written: dict[str, tuple[int, ...]] = {}
        if self.tokenizer is not None:
            check_tokenizer(self.name, self.tokenizer)
            written = _texts(self.tokenizer)
        for name in TEXTS:
            assign(self, **{name: token_ids(self.name, name, getattr(self, name)) or written.get(name, ())})
        assign(self, tokenizer=None)
        if not (self.instruction and self.resumption):
            raise UserError(
                f"{self.name} needs tokenizer=: it asks the model in text to repeat the context (or give the token "
                "ids of instruction, resumption and tail)"
            )

    def check(self, model: Any) -> None:
        largest = max(max(getattr(self, name), default=0) for name in TEXTS)
        if largest >= model.vocab_size:
            raise UserError(
                f"{self.name} asks with token id {largest}, the model's vocabulary is 0 … {model.vocab_size - 1}: the "
                "tokenizer must be the model's"
            )

    @property
    def needs(self) -> Needs:
        return self._beginning if self.sink is None else Needs(first=self.sink)

    @property
    def _beginning(self) -> Needs:
        """A prompt's first tokens that are not asked for, as its prefix."""
        return Needs(opening=self.opening) if self.prefix is None else Needs(prefix=self.prefix)

    @property
    def shares(self) -> Shares:
        return Shares(over="model")

    @property
    def planes(self) -> Mapping[str, str]:
        return {"score": "float32"}

    def passes(self, row: Int[np.ndarray, " _"]) -> Sequence[Pass]:
        found, begin = [], min(self._beginning.prefix_of(row), row.size)
        for start in range(begin, row.size, self.repeated):
            part, lead = row[start : start + self.repeated], row[start - min(LEAD, self.repeated) : start]
            asks = self.instruction if start == begin else (*self.resumption, *lead)
            tokens = np.array([*asks, *self.tail, *part], np.int32)
            first = begin if self.sink is None else min(self.sink, start)
            found.append(Pass(tokens, start, start + part.size, first))
        return found

    def reread(self, step: Step, passage: Passage) -> Numbers:
        entries, tokens = passage.k.shape[2], step.q.shape[2]
        real = jnp.arange(tokens) < passage.valid[:, None]
        # Padding must not raise a maximum. In its place the first query stands once more: at a later index it has all
        # the keys that it had before and more, so that what it pays each of them is no more than before.
        q = jnp.where(real[:, None, :, None], step.q, step.q[:, :, :1]).astype(passage.k.dtype)
        k = jnp.concatenate([passage.k, step.k.astype(passage.k.dtype)], 2)
        known = jnp.concatenate([passage.exists, real], 1)[:, None]
        valid = jnp.broadcast_to(known, k.shape[:3])
        score = attention_mass(q, k, over="max", group="max", valid=valid)[..., :entries]
        return {"score": jnp.where(jnp.arange(entries) < passage.first, jnp.inf, score)}

    def score(self, state: State, stored: Stored) -> Float[Array, "b k s"]:
        return stored.planes["score"]


def _texts(tokenizer: Any) -> dict[str, tuple[int, ...]]:
    """The published texts, and the chat template's, as token ids. Without a template a line break ends what asks, as in
    kvpress."""
    after = around(tokenizer, enable_thinking=False)[1] if getattr(tokenizer, "chat_template", None) else "\n"
    texts = {"instruction": INSTRUCTION, "resumption": RESUMPTION, "tail": after}
    bare = {"add_special_tokens": False, "verbose": False}
    ids = {name: tuple(tokenizer(text, **bare)["input_ids"]) for name, text in texts.items()}
    return ids | {"opening": opening(tokenizer)}
