"""What a method may define. Every method is a few of these functions; most define one or two.

A method's numbers are NumPy arrays: a number or a vector counts for all layers, a table is by layer and kv head (or
1 × 1, alike for all). `Policy.compile` puts them on a model's mesh, and these functions then see those of one layer, on
one device's share of the batch and of the kv heads, as plain local code: a method writes no sharding.

A method is a `struct` that a person writes, `SnapKV(observed=32)`: `__post_init__` checks its numbers and makes arrays
of those that are traced (`kvjax.policies.numbers`).

Roles: `Admission` decides what leaves the ring for the global region, `Eviction` scores what is stored there when it
is compacted, `Selection` filters pages when they are read, `Trainable` is what training asks of a gate, a scorer or a
mask. An eviction defines `score`. What few evictions need comes with the classes below it: `Observer`,
`TokenMetadata`, `LateMetadata`, `Reconstruction`, `Guided`, `ValueWeighted`.
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
from kvjax.policies.views import Passage, Readout, Shape, Step, Stored
from kvjax.struct import bare, struct

Number = Any
"""A method's own array: NumPy's until it is placed, then JAX's."""
State = Any
"""A method's own memory: a pytree, of a layer `[b …]` (sums, counts, an mLSTM's…), kept in the cache."""
Trail = Any
"""What is remembered of tokens, each apart: a pytree of arrays in the model's dtype."""
Numbers = dict[str, Shaped[Array, "b k t"]]
"""Of a call's tokens, by plane."""
Planes = dict[str, Shaped[Array, "p page"]]
BIAS = "bias"
"""The plane that is added to the logits of entries in the global region (`TokenMetadata.bias`)."""


class Method:
    """What all methods have in common."""

    name: ClassVar[str] = ""
    """How it is called, in `make_policy` and in reports."""
    made_for: MadeFor | None = None
    """The model of the files that it was read from, if they say."""
    trained: ClassVar[str] = "gates"
    """Its argument that takes what training left, if it has one; `make_policy` and commands take `gates` for it."""

    @property
    def label(self) -> str:
        """Its name, or that of its class."""
        return self.name or type(self).__name__

    @property
    def traced(self) -> Any:
        """What compiled programs see of it: nothing that only the host reads."""
        return bare(self)

    def check(self, model: Any) -> None:
        """Raises UserError if it is not for a model of this configuration (`num_layers`, `num_kv_heads`,
        `head_dim`)."""
        return None


class Eviction(Method, abc.ABC):
    """Decides, once there are too many entries, which are worth least."""

    @abc.abstractmethod
    def score(self, state: State, stored: Stored) -> Float[Array, "b k s"]:
        """What each entry is worth; a higher score stays. `state`: the memory of an `Observer`, else ()."""
        ...

    @property
    def needs(self) -> Needs:
        """What always stays whatever its scores, and how far it looks back."""
        return Needs()

    @property
    def shares(self) -> Shares:
        """How layers and heads share its budget."""
        return Shares()

    @property
    def usual_trigger(self) -> Trigger:
        """When it compacts where nothing else is said."""
        return Trigger()

    def refuses(self, schedule: Schedule, stores_all: bool) -> str:
        """Why it does not go with a schedule, or with an admission that does not store every token; empty: it does."""
        return ""

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuse a function of one of the classes below it that nobody would call."""
        super().__init_subclass__(**options)
        for kind in MIXINS:
            own = {x for x in vars(kind) if x in vars(cls) and x[0] != "_" and not hasattr(Eviction, x)}
            if own and not issubclass(cls, kind):
                raise TypeError(f"{cls.__name__} defines {min(own)} and must derive from {kind.__name__}")


class EntryMetadata:
    """Numbers of a method's own beside every entry of the global region. They are moved and freed with their entries,
    and counted in bytes. `Stored.planes` shows them to `score`. The plane "position" (int32), for whoever names it, is
    written by the cache: where in its sequence an entry's token stood, from 0."""

    @property
    def planes(self) -> Mapping[str, str]:
        """Their names and dtypes."""
        return {}


class TokenMetadata(EntryMetadata):
    """Entry metadata that is written as tokens come. `state`: the memory of an admission or an `Observer`, else ()."""

    def bias(self, state: State, step: Step) -> Float[Array, "b k t"]:
        """What a plane called "bias" says of a call's own tokens: it is added to their logits once they have left the
        ring, in float32, whoever reads them. −inf hides a token. Known before the call's attention, `numbers` after."""
        return jnp.zeros(step.k.shape[:3], jnp.float32)

    def numbers(self, state: State, step: Step, readout: Readout) -> Numbers:
        """The planes' numbers of a call's own tokens, whichever are stored then or later."""
        return {}

    def update(self, state: State, planes: Planes, step: Step, readout: Readout) -> Planes:
        """The planes once a call's queries have read the entries that were stored before it."""
        return planes

    @property
    def updates(self) -> bool:
        """Whether it has such an `update`."""
        return type(self).update is not TokenMetadata.update


class Observer:
    """An eviction that looks at tokens as they come. It keeps sums over all tokens (`init`, `observe`), or a record of
    each of the last ones (`trail`, `trace`), which `Stored.trail` shows to `score`."""

    def init(self, shape: Shape) -> State:
        """The memory of one layer before the first token, of the sequences and kv heads of one device.

        Arrays [b …]; an axis whose size grows with `shape.kv_heads` is split with them.
        """
        return ()

    def observe(self, state: State, step: Step, seen: Int[Array, " b"], valid: Int[Array, " b"]) -> State:
        """Look at a call's tokens: the first `valid` of each sequence, which had `seen` tokens before."""
        return state

    def trail(self, shape: Shape) -> Trail:
        """Room for what it remembers of each of the last w tokens of a layer (`trace`): zeros [b w d] or [b w n d], of
        kv heads or query heads, with which they are split, in `shape.dtype`."""
        return ()

    def trace(self, step: Step) -> Trail:
        """What of a call's tokens goes there: arrays [b t d] or [b n t d], which are rounded to that dtype."""
        return ()


class LateMetadata(TokenMetadata, Observer, abc.ABC):
    """Entry metadata of which the newest tokens' may be known only when a compaction asks for it, from their
    `trail`."""

    @property
    @abc.abstractmethod
    def pending(self) -> int:
        """How many of the newest tokens may wait."""
        ...

    @abc.abstractmethod
    def late(self, trail: Trail) -> Numbers:
        """The planes' numbers of the last `pending` tokens, the newest last, of the trail [b n w d], oldest token
        first; anything for those before the first."""
        ...

    @property
    @abc.abstractmethod
    def of_prompts(self) -> Eviction:
        """Its form where nothing is compacted while decoding, and no token has to wait."""
        ...


class Pass(NamedTuple):
    """Tokens that are read once more behind a prompt to look at a part of it, and leave nothing but numbers in
    planes."""

    tokens: Int[np.ndarray, " t"]
    """Their ids."""
    start: int
    """The first token of the part."""
    stop: int
    """The one behind its last."""
    first: int = 0
    """How many of the prompt's first tokens are looked at beside it, at most `start` and `Needs.longest_prefix`."""


class Reconstruction(EntryMetadata, abc.ABC):
    """Entry metadata that is written by passes of more tokens behind a prompt. A prompt must then be stored whole, and
    is compacted once, at its end."""

    @abc.abstractmethod
    def passes(self, row: Int[np.ndarray, " _"]) -> Sequence[Pass]:
        """What is read behind a prompt of these token ids before it is compacted, in order; on the host. Their parts
        do not overlap."""
        ...

    @abc.abstractmethod
    def reread(self, step: Step, passage: Passage) -> Numbers:
        """The planes' numbers of the entries in a passage, once a pass's tokens (`step`) have looked at them."""
        ...

    def refuses(self, schedule: Schedule, stores_all: bool) -> str:
        when = schedule.trigger.when
        if when != "prompt":
            return f"has the whole prompt read again before it scores it: when must be 'prompt', got {when!r}"
        return (
            ""
            if stores_all
            else "has the whole prompt read again, of which an admission does not store every token"
        )


class Guided(abc.ABC):
    """An eviction that scores by the last tokens' queries, which may be those of a text that is read behind a prompt
    and dropped again (guidance)."""

    guidance: ClassVar[str] = ""
    """The text where none is given, one of `kvjax.policies.guidance.TEXTS`; empty: there is none."""

    @abc.abstractmethod
    def guided(self, tokens: int) -> Eviction:
        """Its form that looks by so many tokens of guidance."""
        ...


class ValueWeighted(abc.ABC):
    """An eviction whose score weighs by values, which a wrapper may do in its place."""

    @property
    @abc.abstractmethod
    def without_values(self) -> Eviction:
        """Its form without values in the score."""
        ...


MIXINS = EntryMetadata, TokenMetadata, Observer, LateMetadata, Reconstruction, Guided, ValueWeighted


@struct
class Keep:
    """Which of the tokens that leave the ring stay."""

    threshold: Number
    """The least priority that stays: one number, or one of each kv head."""
    max_entries: Number | None = None
    """How many a kv head keeps at most: those of highest priority among all that have left the ring so far, of equal
    ones the earlier. What is out stays out. None: as many as there are. A row that has more, of a policy that went
    before, keeps as many."""

    def wanted(self, priority: Float[Array, "b k t"]) -> Bool[Array, "b k t"]:
        """Which priorities reach the threshold. NaN does not."""
        return priority >= jnp.asarray(self.threshold)[..., None]


class Admission(Method, TokenMetadata, abc.ABC):
    """Decides, before a token is written for good, whether anybody will need it once it has left the ring."""

    window: int | None = None
    """The window of policies that name none; None: they must."""
    owns_window: ClassVar[bool] = False
    """Whether a policy can have no other: what the admission keeps depends on it."""

    @property
    def revisits(self) -> int | None:
        """How far before each of a call's tokens the one stands whose key and value it is to see again
        (`Step.earlier`), from 1 and less than the window; None: it wants none."""
        return None

    def init(self, shape: Shape) -> State:
        """The memory before the first token, as `Observer.init`."""
        return ()

    @abc.abstractmethod
    def score(
        self, state: State, step: Step, seen: Int[Array, " b"], valid: Int[Array, " b"]
    ) -> tuple[State, Float[Array, "b k t"], int]:
        """Look at a call's tokens: the first `valid` of each sequence, which had `seen` tokens before.

        Returns:
            the memory after these tokens; the priorities that they make known, where `priority[…, i]` belongs to the
            token `delay` before token `i` of the call (NaN: not known yet, but it must be before that token leaves the
            ring); and `delay`, less than the window.
        """
        ...

    @abc.abstractmethod
    def keep(self) -> Keep:
        """The rule on leaving the ring: data, not code. Whether it has `max_entries` must not depend on numbers."""
        ...

    def admitted(self, tokens: int) -> Float[np.ndarray, "#l #k"]:
        """How many of `tokens` tokens that have left the ring are expected in the global region, by layer and kv head;
        by default all, up to `max_entries`. Sizes the default pool; called on the whole policy (with its layer axis),
        outside jit."""
        return np.full((1, 1), tokens, np.float64)


class Selection(Method, abc.ABC):
    """Decides, when a query reads, which pages can matter to it."""

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
        """The pages of the global region that one token reads.

        Args:
            bounds: of each page's keys k the smallest components of k and of −k (`kvjax.cache.Pages`); unspecified
                for a page without entries.
            length: entries in the global region.
            local: how many of the last tokens it reads anyway, itself included. seen: tokens so far, itself included.
        """
        ...


class Mask(NamedTuple):
    """What a query sees in training: `weight` times attention with `end` and `log_gate` (as `vertical_slash` has them).
    None: weight 1, plain causal attention, no gate."""

    weight: Float[Array, " k"] | None = None
    """By kv head."""
    end: Int[Array, "b k t"] | None = None
    """The index from which on no query sees the key."""
    log_gate: Float[Array, "b k t"] | None = None
    """Added to the logits of keys beyond the window."""


@runtime_checkable
class Trainable(Protocol):
    """What training asks of a method's parameters, of one layer. Random masks are drawn before, by the recipe's loss,
    which has the step's key."""

    def masks(self, step: Step) -> tuple[Any, Sequence[Mask]]:
        """What `figures` is given, and one or more masks, whose attention is added."""
        ...

    def figures(
        self,
        state: Any,
        step: Step,
        outputs: Sequence[tuple[Float[Array, "b n t h"], Float[Array, "b n t"]]],
    ) -> dict[str, Float[Array, "b k"]]:
        """Numbers of this layer's sequences and kv heads for the loss and the log (sparsity, score losses). `outputs`:
        of each mask the output before its weight and the log-sum-exp."""
        ...
