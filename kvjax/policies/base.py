"""The base classes of policy methods. A method implements a few of these functions, most methods one or two.

A method's numbers are NumPy arrays. A number or a vector counts for all layers; a table has a number for each layer and
kv head, or is 1 × 1 for all. `Policy.compile` puts them on a model's mesh. These functions then see the numbers of one
layer, on one device's share of the batch and of the kv heads, as plain local code: a method writes no sharding.

A method is a `struct` such as `SnapKV(observed=32)`. Its `__post_init__` checks its numbers and makes arrays of those
that are traced (`kvjax.policies.numbers`).

`Admission` decides which tokens are retained when they leave the local window. `Eviction` scores stored entries for a
compaction. `Selection` chooses the pages that a decoded token reads. `Trainable` is the training form of a gate, a
scorer or a mask. An eviction defines `score`. Functions that few evictions need come with the classes below it:
`Observer`, `TokenMetadata`, `LateMetadata`, `Reconstruction`, `Guided`, `ValueWeighted`, `StoredScore`.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from kvjax.checkpoints.fingerprint import MadeFor
from kvjax.policies.budget import Shares
from kvjax.policies.schedule import Needs, Schedule
from kvjax.policies.trigger import Trigger
from kvjax.policies.views import PassEntries, Readout, Shape, Step, Stored
from kvjax.struct import struct, without_host_fields

Number = Any
"""A method's own array: a NumPy array until it is placed on a mesh, then a JAX array."""
State = Any
"""A method's memory, which the cache keeps: a pytree of arrays `[b …]` for each layer, such as sums, counts or an
mLSTM's state."""
Observations = Any
"""An observation buffer, with a record of each of the last tokens: a pytree of arrays in the model's dtype."""
Numbers = dict[str, Shaped[Array, "b k t"]]
"""Entry metadata of a call's tokens, by name."""
Metadata = dict[str, Shaped[Array, "p page"]]
"""Entry metadata of the pool's pages, by name."""
BIAS = "bias"
"""The name of the entry metadata that is added to the logits of retained entries (`TokenMetadata.bias`)."""


class Method:
    """The base of all methods."""

    name: ClassVar[str] = ""
    """The method's name in `make_policy` and in reports."""
    made_for: MadeFor | None = None
    """The model that the method's files were made for; None: there are none, or they do not say."""
    trained: ClassVar[str] = "gates"
    """The argument that takes what training produced, if the method has one; `make_policy` and commands fill it from
    `gates`."""

    @property
    def label(self) -> str:
        """The method's name, or the name of its class."""
        return self.name or type(self).__name__

    @property
    def traced(self) -> Any:
        """The method as compiled programs see it, without the fields that only the host reads."""
        return without_host_fields(self)

    def check(self, model: Any) -> None:
        """Raise UserError if the method is not for a model of this configuration (`num_full_layers`, `num_kv_heads`,
        `head_dim`)."""
        return None


class Eviction(Method, abc.ABC):
    """A method that scores stored entries. A compaction drops the entries with the lowest scores."""

    @abc.abstractmethod
    def score(self, state: State, stored: Stored) -> Float[Array, "b k s"]:
        """Return the score of each entry; a higher score stays. `state` is the memory of an `Observer`, else ()."""
        ...

    def over_layers(self, scores: Float[Array, "l b k s"]) -> Float[Array, "l b k s"]:
        """Return the final scores, given the scores of all layers, aligned with each head cache's newest entry. By
        default they do not change."""
        return scores

    @property
    def needs(self) -> Needs:
        """The numbers of entries that stay whatever their scores, and of last tokens whose queries score the
        entries."""
        return Needs()

    @property
    def shares(self) -> Shares:
        """The way in which layers and heads share the budget."""
        return Shares()

    @property
    def usual_trigger(self) -> Trigger:
        """The trigger of policies that name none."""
        return Trigger()

    def refusal(self, schedule: Schedule, stores_all: bool) -> str:
        """Return the reason why the eviction cannot be used with a schedule, or with an admission that does not store
        every token. An empty string means that it can."""
        return ""

    def __init_subclass__(cls, **options: Any) -> None:
        """Raise TypeError if a subclass defines a function of one of `MIXINS` without deriving from it: the function
        would never be called."""
        super().__init_subclass__(**options)
        for kind in MIXINS:
            names = {x for x in vars(kind) if x in vars(cls) and x[0] != "_" and not hasattr(Eviction, x)}
            if names and not issubclass(cls, kind):
                raise TypeError(f"{cls.__name__} defines {min(names)} and must derive from {kind.__name__}")


class EntryMetadata:
    """A method's own numbers for every retained entry. They are moved and freed with their entries, and count towards
    the cache's size. `Stored.metadata` shows them to `score`. If a method names "position" (int32), the cache itself
    writes it: the position of an entry's token in its sequence, from 0."""

    @property
    def metadata(self) -> Mapping[str, str]:
        """The names and dtypes of the entry metadata."""
        return {}


class TokenMetadata(EntryMetadata):
    """Entry metadata that is written as tokens come. `state` is the memory of an admission or an `Observer`, else
    ()."""

    def bias(self, state: State, step: Step) -> Float[Array, "b k t"]:
        """Return the "bias" of a call's own tokens, if the method names such metadata. It is added to their logits, in
        float32 and for every query, once they have left the local window. −inf hides a token. `bias` is called before
        the call's attention, and `numbers` after it."""
        return jnp.zeros(step.k.shape[:3], jnp.float32)

    def numbers(self, state: State, step: Step, readout: Readout) -> Numbers:
        """Return the entry metadata of all of a call's own tokens, whether they are stored now, later or never."""
        return {}

    def update(self, state: State, metadata: Metadata, step: Step, readout: Readout) -> Metadata:
        """Return the entry metadata after a call's queries have read the entries that were stored before the call."""
        return metadata

    @property
    def updates(self) -> bool:
        """True if the method has an `update` of its own."""
        return type(self).update is not TokenMetadata.update


class Observer:
    """An eviction that looks at tokens as they come. It keeps a memory of all tokens (`init`, `observe`), or an
    observation buffer with a record of each of the last ones (`observations`, `record`), which
    `Stored.observations` shows to `score`."""

    def init(self, shape: Shape) -> State:
        """Return the memory of one layer before the first token, for the sequences and kv heads of one device.

        Arrays are [b …]; an axis whose size grows with `shape.kv_heads` is sharded with the heads.
        """
        return ()

    def observe(self, state: State, step: Step, seen: Int[Array, " b"], valid: Int[Array, " b"]) -> State:
        """Return the memory after a call's tokens. The first `valid` tokens of each sequence are real; it had `seen`
        tokens before."""
        return state

    def observations(self, shape: Shape) -> Observations:
        """Return the empty observation buffer of one layer, for the records of the last w tokens (`record`): zeros of
        shape [b w d] or [b w n d] in `shape.dtype`. The axis n, of kv heads or query heads, is sharded with them."""
        return ()

    def record(self, step: Step) -> Observations:
        """Return the records of a call's tokens: arrays [b t d] or [b n t d], which are rounded to the buffer's
        dtype."""
        return ()


class LateMetadata(TokenMetadata, Observer, abc.ABC):
    """Entry metadata that is computed for the newest tokens only when a compaction asks for it, from the observation
    buffer."""

    @property
    @abc.abstractmethod
    def pending(self) -> int:
        """The number of newest tokens that may wait for their metadata."""
        ...

    @abc.abstractmethod
    def late(self, observations: Observations) -> Numbers:
        """Return the metadata of the last `pending` tokens, the newest last, from the buffer [b w d] or [b n w d],
        oldest token first. If there were fewer tokens, the first numbers may be anything."""
        ...

    @property
    @abc.abstractmethod
    def for_prompts(self) -> Eviction:
        """The method's form for policies that compact nothing while decoding, so that no token has to wait."""
        ...


class Pass(NamedTuple):
    """A reconstruction pass: tokens that are read after a prompt to look at a part of it. They leave only entry
    metadata."""

    tokens: Int[np.ndarray, " t"]
    """The token ids."""
    start: int
    """The index of the part's first token."""
    stop: int
    """The index after its last token."""
    first: int = 0
    """The number of the prompt's first tokens that are looked at in addition to the part. At most `start`, and at most
    the larger of `Needs.longest_prefix` and `Needs.first`."""


class Reconstruction(EntryMetadata, abc.ABC):
    """Entry metadata that is written by reconstruction passes, which read more tokens after a prompt. The prompt must
    be stored whole, and it is compacted once, at its end."""

    @abc.abstractmethod
    def passes(self, row: Int[np.ndarray, " _"]) -> Sequence[Pass]:
        """Return the passes after a prompt of these token ids, in order. They run before the prompt is compacted, and
        their parts do not overlap. Called on the host."""
        ...

    @abc.abstractmethod
    def reconstruct(self, step: Step, entries: PassEntries) -> Numbers:
        """Return the metadata of the entries that a pass looks at, computed from the pass's tokens (`step`)."""
        ...

    def refusal(self, schedule: Schedule, stores_all: bool) -> str:
        when = schedule.trigger.when
        if when != "prompt":
            return f"scores a prompt by passes over all of it: when must be 'prompt', got {when!r}"
        return (
            ""
            if stores_all
            else "scores a prompt by passes over all of it, which an admission does not store"
        )


class Guided(abc.ABC):
    """An eviction that scores by the queries of the last tokens. These may be the tokens of a text that is read after a
    prompt and removed again (guidance)."""

    guidance: ClassVar[str] = ""
    """The default text, one of `kvjax.policies.guidance.TEXTS`; empty: there is none."""

    @abc.abstractmethod
    def guided(self, tokens: int) -> Eviction:
        """Return the eviction's form for this number of guidance tokens."""
        ...


class ValueWeighted(abc.ABC):
    """An eviction whose score weighs entries by their values. A wrapper may do this in its place."""

    @property
    @abc.abstractmethod
    def without_values(self) -> Eviction:
        """The eviction's form without values in the score."""
        ...


MIXINS = EntryMetadata, TokenMetadata, Observer, LateMetadata, Reconstruction, Guided, ValueWeighted


class StoredScore(EntryMetadata, Eviction):
    """An eviction whose score is computed once for each token and stored with its entries ("score"). All layers and
    heads share the budget."""

    @property
    def shares(self) -> Shares:
        return Shares(over="model")

    @property
    def metadata(self) -> Mapping[str, str]:
        return {"score": "float32"}

    def score(self, state: State, stored: Stored) -> Float[Array, "b k s"]:
        return stored.metadata["score"]


@struct
class Keep:
    """The rule by which tokens that leave the local window are retained."""

    threshold: Number
    """The least priority that is retained: one number, or one for each kv head."""
    max_entries: Number | None = None
    """The largest number of entries that a kv head retains: those of highest priority among all tokens that have left
    the local window so far. Of equal priorities, the earlier token stays. A dropped token does not come back. None:
    there is no limit. A head cache that an earlier policy left with more entries keeps that number."""

    def wanted(self, priority: Float[Array, "b k t"]) -> Bool[Array, "b k t"]:
        """Return the mask of the priorities that reach the threshold. NaN does not."""
        return priority >= jnp.asarray(self.threshold)[..., None]


class Admission(Method, TokenMetadata, abc.ABC):
    """A method that decides, before a token is stored for good, whether it is retained when it leaves the local
    window."""

    window: int | None = None
    """The window of policies that name none; None: a policy must name one."""
    owns_window: ClassVar[bool] = False
    """True if a policy must have this window, because the admission's decisions depend on it."""

    @property
    def revisits(self) -> int | None:
        """The distance from each of a call's tokens back to the one whose key and value the admission sees again
        (`Step.earlier`), from 1 and less than the window; None: it needs none."""
        return None

    def init(self, shape: Shape) -> State:
        """Return the memory before the first token, as `Observer.init` does."""
        return ()

    @abc.abstractmethod
    def score(
        self, state: State, step: Step, seen: Int[Array, " b"], valid: Int[Array, " b"]
    ) -> tuple[State, Float[Array, "b k t"], int]:
        """Return the memory and the priorities after a call's tokens. The first `valid` tokens of each sequence are
        real; it had `seen` tokens before.

        Returns:
            the memory after these tokens; the priorities, where `priority[…, i]` belongs to the token `delay` positions
            before token `i` of the call (NaN: not known yet; it must be known before that token leaves the local
            window); and `delay`, which is less than the window.
        """
        ...

    @abc.abstractmethod
    def keep(self) -> Keep:
        """Return the rule for tokens that leave the local window. Whether it has `max_entries` must not depend on
        traced numbers."""
        ...

    def admitted(self, tokens: int) -> Float[np.ndarray, "#l #k"]:
        """Return how many of `tokens` tokens that have left the local window are expected to be retained, by layer and
        kv head. By default all are; `max_entries` is applied afterwards. The result sizes the default pool. Called on
        the whole policy (with its layer axis), outside jit."""
        return np.full((1, 1), tokens, np.float64)


class Selection(Method, abc.ABC):
    """A method that chooses the pages that can matter to a decoded token's query."""

    @abc.abstractmethod
    def select(
        self,
        q: Float[Array, "b n 1 h"],
        bounds: Float[Array, "b k p 2*h"],
        length: Int[Array, "b k"],
        *,
        layer: Int[Array, ""],
        local: Int[Array, " b"],
        seen: Int[Array, " b"],
        page_size: int,
    ) -> Bool[Array, "b k p"]:
        """Return the mask of the pages of retained entries that one token reads.

        Args:
            bounds: the smallest components of k and of −k over each page's keys k (`kvjax.cache.Pages`); unspecified
                for a page without entries.
            length: the number of retained entries.
            local: the number of last tokens that the token always reads, itself included.
            seen: the number of tokens so far, the token included.
        """
        ...


class Mask(NamedTuple):
    """One term of attention in training: `weight` times attention with `end` and `log_gate`, as in `vertical_slash`.
    Fields that are None mean weight 1, plain causal attention and no gate."""

    weight: Float[Array, " k"] | None = None
    """The weight by kv head."""
    end: Int[Array, "b k t"] | None = None
    """The index of the first query that no longer sees the key."""
    log_gate: Float[Array, "b k t"] | None = None
    """The number that is added to the logits of keys beyond the window."""


@runtime_checkable
class Trainable(Protocol):
    """The training form of a method's parameters, of one layer. Random masks are sampled beforehand, by the recipe's
    loss, which has the step's key."""

    def masks(self, step: Step) -> tuple[Any, Sequence[Mask]]:
        """Return the state that `figures` gets, and one or more masks, whose attention is added."""
        ...

    def figures(
        self,
        state: Any,
        step: Step,
        outputs: Sequence[tuple[Float[Array, "b n t h"], Float[Array, "b n t"]]],
    ) -> dict[str, Float[Array, "b k"]]:
        """Return numbers of this layer's sequences and kv heads for the loss and the log (sparsity, score losses).
        `outputs` holds, for each mask, the output before its weight and the log-sum-exp."""
        ...
