"""KVzip (Kim et al., 2025, arXiv:2505.23416): the model needs the entries that it looks at while it repeats the
context. KVzip+ (Jégou and Jeblick, 2026, arXiv:2601.07891) weighs attention by its effect on the residual stream."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jaxtyping import Array, Bool, Float, Int

from kvjax.chat_template import opening, text_around_placeholder
from kvjax.errors import UserError, one_of, whole_number
from kvjax.policies.base import Numbers, Pass, Reconstruction, StoredScore
from kvjax.policies.eviction.texts import check_tokenizer, token_ids
from kvjax.policies.numbers import EXACT
from kvjax.policies.schedule import Needs
from kvjax.policies.views import PassEntries, Step
from kvjax.struct import assign, host, static, struct
from pallas_kernels.attention_mass import attention_mass

INSTRUCTION = "\n\nRepeat the previous context exactly."
RESUMPTION = "\n\nRepeat the part of the previous context exactly, starting with "
LEAD = 8
"""The number of last tokens of the part before, which follow `RESUMPTION`."""
TEXTS = "instruction", "resumption", "tail", "opening"
"""The fields of token ids."""


@struct
class KVzip(Reconstruction, StoredScore):
    """The largest attention that any query pays to an entry while the model repeats the context, over queries and a
    group's query heads (eq. 2 and 3). After the prompt, each part of `repeated` tokens is read once more, after a
    request to repeat it. A query's attention is over the prompt's prefix, this part's entries and the pass's own tokens
    alone. All layers and heads share the budget, unless a wrapper's `over` says otherwise.

    The prefix (the chat template's own tokens, a system prompt) always stays, in addition to the budget, as in the
    authors' code: a ratio is a share of the context's entries.
    """

    tokenizer: Any = host(default=None, repr=False)
    """The model's tokenizer, which turns the texts into token ids. It is not kept."""
    instruction: tuple[int, ...] = host(default=(), repr=False)
    """Token ids that ask for the first part. By default, here and below, those of the published text."""
    resumption: tuple[int, ...] = host(default=(), repr=False)
    """Token ids that ask for a later part. The last 8 tokens of the part before it follow them, to say where it
    begins."""
    tail: tuple[int, ...] = host(default=(), repr=False)
    """Token ids between the request and the repeated part, where the user's turn ends and the answer begins."""
    opening: tuple[int, ...] = host(default=(), repr=False)
    """Token ids that come before a user's text. A prompt's prefix is the beginning that it has in common with them."""
    prefix: int | None = host(default=None)
    """The number of tokens in every prompt's prefix; None: those in common with `opening`."""
    repeated: int = host(default=2000)
    """The number of tokens in a part."""
    sink: int | None = host(default=None)
    """The number of first entries that always stay and are looked at with each part, as in kvpress. They count in the
    budget, and the rest of the prefix is dropped first. None: the whole prefix stays."""
    plus: bool = static(default=False)
    """True for KVzip+: an attention a_ij counts as a_ij · ‖W_O v_j‖ / ‖h_i‖, with the layer's normed input h and the
    part of W_O that belongs to a query head (kvpress/presses/kvzip_press.py)."""
    name = "kvzip"

    def __post_init__(self):
        for name, least in (("prefix", 0), ("repeated", 1), ("sink", 0)):
            if (number := getattr(self, name)) is not None or name == "repeated":
                assign(self, **{name: whole_number(self.name, name, number, least)})
        one_of(self.name, "plus", self.plus, (True, False))
        defaults: dict[str, tuple[int, ...]] = {}
        if self.tokenizer is not None:
            check_tokenizer(self.name, self.tokenizer)
            defaults = _default_ids(self.tokenizer)
        for name in TEXTS:
            assign(self, **{name: token_ids(self.name, name, getattr(self, name)) or defaults.get(name, ())})
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
        return self._prefix_needs if self.sink is None else Needs(first=self.sink)

    @property
    def _prefix_needs(self) -> Needs:
        """The requirements that keep a prompt's prefix, which the model is not asked to repeat."""
        return Needs(opening=self.opening) if self.prefix is None else Needs(prefix=self.prefix)

    def passes(self, row: Int[np.ndarray, " _"]) -> Sequence[Pass]:
        passes, prefix = [], min(self._prefix_needs.prefix_of(row), row.size)
        for start in range(prefix, row.size, self.repeated):
            part, lead = row[start : start + self.repeated], row[start - min(LEAD, self.repeated) : start]
            asks = self.instruction if start == prefix else (*self.resumption, *lead)
            tokens = np.array([*asks, *self.tail, *part], np.int32)
            first = prefix if self.sink is None else min(self.sink, start)
            passes.append(Pass(tokens, start, start + part.size, first))
        return passes

    def reconstruct(self, step: Step, entries: PassEntries) -> Numbers:
        count, tokens = entries.k.shape[2], step.q.shape[2]
        real = jnp.arange(tokens) < entries.valid[:, None]
        # Padding must not raise a maximum, so the first query takes its place. At a later index it sees the same keys
        # and more, so it pays none of them more than before.
        q = jnp.where(real[:, None, :, None], step.q, step.q[:, :, :1]).astype(entries.k.dtype)
        k = jnp.concatenate([entries.k, step.k.astype(entries.k.dtype)], 2)
        exists = jnp.concatenate([entries.exists, real], 1)[:, None]
        valid = jnp.broadcast_to(exists, k.shape[:3])
        query_factor, key_factor = _factors(step, entries, real) if self.plus else (None, None)
        score = attention_mass(
            q, k, over="max", group="max", valid=valid, query_factor=query_factor, key_factor=key_factor
        )[..., :count]
        return {"score": jnp.where(jnp.arange(count) < entries.first, jnp.inf, score)}


def _factors(
    step: Step, entries: PassEntries, real: Bool[Array, "b t"]
) -> tuple[Float[Array, "b n t"], Float[Array, "b n s"]]:
    """Return the factors of KVzip+: 1/‖h_i‖ of the queries, and ‖W_O v_j‖ of the entries. The factor of the pass's own
    keys is 1, because their scores are not used."""
    batch, heads, tokens = step.q.shape[:3]
    norm = jnp.linalg.norm(step.hidden.astype(jnp.float32), axis=-1)
    norm = jnp.where(real, norm, norm[:, :1])
    kv_heads = entries.v.shape[1]
    weight = rearrange(entries.output.astype(jnp.float32), "(k g) h d -> k g h d", k=kv_heads)
    # ‖W v‖² = v · (W Wᵀ) v is far less work than W v, because a head is narrow and the model is wide
    square = jnp.einsum("kghd,kgid->kghi", weight, weight, **EXACT)
    v = jnp.where(entries.exists[:, None, :, None], entries.v, 0).astype(jnp.float32)
    added = jnp.einsum("bkgsi,bksi->bkgs", jnp.einsum("bksh,kghi->bkgsi", v, square, **EXACT), v, **EXACT)
    added = jnp.sqrt(jnp.maximum(added, 0)).reshape(batch, heads, -1)
    query_factor = jnp.broadcast_to(1 / norm[:, None], (batch, heads, tokens))
    return query_factor, jnp.concatenate([added, jnp.ones((batch, heads, tokens))], 2)


def _default_ids(tokenizer: Any) -> dict[str, tuple[int, ...]]:
    """Return the token ids of the published texts and of the chat template's. Without a template a line break ends the
    request, as in kvpress."""
    has_template = getattr(tokenizer, "chat_template", None)
    after = text_around_placeholder(tokenizer, enable_thinking=False)[1] if has_template else "\n"
    texts = {"instruction": INSTRUCTION, "resumption": RESUMPTION, "tail": after}
    options = {"add_special_tokens": False, "verbose": False}
    ids = {name: tuple(tokenizer(text, **options)["input_ids"]) for name, text in texts.items()}
    return ids | {"opening": opening(tokenizer)}
