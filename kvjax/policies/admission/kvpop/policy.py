"""The admission: a cache of constant size, in which a token that leaves the window replaces the lowest score."""

import dataclasses
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.checkpoints.fingerprint import MadeFor
from kvjax.errors import UserError, shown, whole_number
from kvjax.policies.admission.kvpop.files import check_made_for, load_scorers
from kvjax.policies.admission.kvpop.scorer import Scorer
from kvjax.policies.base import Admission, Keep
from kvjax.policies.numbers import is_placed
from kvjax.policies.views import Shape, Step
from kvjax.struct import assign, host, remembered, static, struct
from pallas_kernels.mlstm import Memory, empty_memory

USUAL = {"max_entries": 512, "sink": 4, "window": 64, "delayed": True, "decay": True, "age": 1}
"""What is taken where neither the caller nor the folder says anything: the paper's (App. A)."""


@struct
class KVPOP(Admission):
    """A kv head holds the first `sink` tokens, the last of the window, and of those between the best by their scores,
    `max_entries` in all, whatever comes (KVPOP, Sec. 3; App. C).

    A token's score is what its query reads of the memory of all tokens up to the last before it leaves the window
    (`delayed`), or up to its own; it falls with each position by the head's log γ (`decay`), as seen from any later
    query alike, so that the order of two tokens never changes and what is out stays out. `scorers`: the scorers
    themselves, or a folder that training exported. What else is not given is the folder's, else `USUAL`.
    """

    scorers: Any = dataclasses.field(repr=False)
    """The scorers, or where they are."""
    max_entries: int | None = host(default=None)
    """Most entries of a kv head: sinks, window and the others."""
    sink: Any = None
    """First tokens that always stay."""
    window: int | None = static(default=None)
    """The last tokens, a query's own included."""
    delayed: bool | None = static(default=None)
    """Whether a token is scored as late as can be."""
    decay: bool | None = static(default=None)
    """Whether scores fall with positions."""
    age: int | None = static(default=None)
    """Positions that count as one: of a token at u and a query at q, ⌊q/age⌋ − ⌊u/age⌋. The paper's ⌊(q − u)/age⌋ would
    have the order of two tokens change, so that what is out would have to come back."""
    max_retained: Any = dataclasses.field(default=None, init=False, repr=False)
    """Most entries of a kv head that have left the window, sinks among them: `max_entries` − `window`."""
    made_for: MadeFor | None = remembered()
    """What the folder says."""
    name = "kvpop"
    owns_window = True
    trained = "scorers"

    def __post_init__(self):
        scorers, said = self.scorers, {}
        if isinstance(scorers, str | Path):
            scorers, said = load_scorers(scorers)
        if not isinstance(scorers, Scorer):
            raise UserError(f"kvpop: scorers must be a folder of scorers or a Scorer, got {shown(scorers)}")
        told = {name: said.get(name, usual) for name, usual in USUAL.items()}
        told |= {name: x for name in USUAL if (x := getattr(self, name)) is not None}
        for name in ("delayed", "decay"):
            if not isinstance(told[name], bool):
                raise UserError(f"kvpop: {name} must be True or False, got {shown(told[name])}")
        window, age = (whole_number(self.name, name, told[name]) for name in ("window", "age"))
        told |= {"scorers": scorers, "window": window, "age": age, "made_for": MadeFor.described(said)}
        if not is_placed(self.sink):
            sink = whole_number(self.name, "sink", told["sink"], 0)
            max_entries = whole_number(self.name, "max_entries", told["max_entries"])
            if max_entries < sink + window + 1:
                raise UserError(
                    f"kvpop: max_entries={max_entries} is all sinks and window: it must be at least {sink} + "
                    f"{window} + 1 = {sink + window + 1}"
                )
            told |= {"sink": np.array(sink, np.int32), "max_entries": max_entries}
            told["max_retained"] = np.array(max_entries - window, np.int32)
        assign(self, **told)

    def check(self, model: Any) -> None:
        check_made_for(self.scorers.sizes, model)

    @property
    def delay(self) -> int:
        """How many tokens after its own a token's score is known."""
        assert self.window is not None
        return self.window - 1 if self.delayed else 0

    @property
    def revisits(self) -> int | None:
        return self.delay or None

    def init(self, shape: Shape) -> Memory:
        return empty_memory(shape.batch, shape.kv_heads, *self.scorers.widths)

    def score(
        self, state: Memory, step: Step, seen: Int[Array, " b"], valid: Int[Array, " b"]
    ) -> tuple[Memory, Float[Array, "b k t"], int]:
        real = jnp.arange(step.k.shape[2]) < valid[:, None]
        streams = self.scorers.streams(step.k, step.v).of_tokens(real)
        queries = streams.q if step.earlier is None else self.scorers.queries(*step.earlier)
        score, state = self.scorers.score(queries, streams, state)
        position = step.position - self.delay
        return state, self.priority(score, position), self.delay

    def priority(self, score: Float[Array, "b k t"], position: Int[Array, "b t"]) -> Float[Array, "b k t"]:
        """By which tokens at these positions are ranked: the score as if it fell from position 0 on, whatever query
        looks; above all others for sinks."""
        return jnp.where(position[:, None] < self.sink, jnp.inf, self.fallen(score, position))

    def fallen(self, score: Float[Array, "b k t"], position: Int[Array, "b t"]) -> Float[Array, "b k t"]:
        """Scores of tokens at these positions, which fall with age, in an order that no query changes."""
        if not self.decay:
            return score
        assert self.age is not None
        age = (position[:, None] // self.age).astype(jnp.float32)
        return score - self.scorers.log_gamma()[:, None] * age

    def keep(self) -> Keep:
        return Keep(-np.inf, self.max_retained)
