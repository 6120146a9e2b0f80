"""The admission: a cache of constant size, in which a token that leaves the window replaces the entry of lowest score
if its own score is higher."""

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

DEFAULTS = {"max_entries": 512, "sink": 4, "window": 64, "delayed": True, "decay": True, "age": 1}
"""The values of arguments that neither the caller nor the folder gives: the paper's (App. A)."""


@struct
class KVPOP(Admission):
    """A cache of at most `max_entries` entries per kv head: the first `sink` tokens, the local window, and the tokens
    of best score between them (KVPOP, Sec. 3; App. C).

    A token's score is computed from what its query reads from the memory. The memory holds all tokens up to the last
    one before the token leaves the window (`delayed`), or up to the token itself. With `decay`, the score falls with
    each later position by the head's log γ. The order of two tokens is the same for every query, so a dropped token is
    never needed again. `scorers` is a `Scorer` or a folder that training exported. Arguments that are not given come
    from the folder, or else from `DEFAULTS`.
    """

    scorers: Any = dataclasses.field(repr=False)
    """The scorers, or the folder that holds them."""
    max_entries: int | None = host(default=None)
    """The largest number of entries of a kv head, with sinks and local window."""
    sink: Any = None
    """The number of first tokens that always stay."""
    window: int | None = static(default=None)
    """The number of last tokens that are always visible, a query's own included."""
    delayed: bool | None = static(default=None)
    """True if a token is scored as late as possible before it leaves the window; False: as soon as it is read."""
    decay: bool | None = static(default=None)
    """True if a token's score falls with each later position."""
    age: int | None = static(default=None)
    """The number of positions in a unit of age: for a query at q, the age of a token at u is ⌊q/age⌋ − ⌊u/age⌋. With
    the paper's ⌊(q − u)/age⌋ the order of two tokens would change, and dropped tokens would have to come back."""
    max_retained: Any = dataclasses.field(default=None, init=False, repr=False)
    """The largest number of entries of a kv head that have left the window, sinks included: `max_entries` −
    `window`."""
    made_for: MadeFor | None = remembered()
    """The model that the folder's scorers were made for; None: it does not say."""
    name = "kvpop"
    owns_window = True
    trained = "scorers"

    def __post_init__(self):
        scorers, description = self.scorers, {}
        if isinstance(scorers, str | Path):
            scorers, description = load_scorers(scorers)
        if not isinstance(scorers, Scorer):
            raise UserError(f"kvpop: scorers must be a folder of scorers or a Scorer, got {shown(scorers)}")
        values = {name: description.get(name, default) for name, default in DEFAULTS.items()}
        values |= {name: x for name in DEFAULTS if (x := getattr(self, name)) is not None}
        for name in ("delayed", "decay"):
            if not isinstance(values[name], bool):
                raise UserError(f"kvpop: {name} must be True or False, got {shown(values[name])}")
        window, age = (whole_number(self.name, name, values[name]) for name in ("window", "age"))
        values |= {
            "scorers": scorers,
            "window": window,
            "age": age,
            "made_for": MadeFor.described(description),
        }
        if not is_placed(self.sink):
            sink = whole_number(self.name, "sink", values["sink"], 0)
            max_entries = whole_number(self.name, "max_entries", values["max_entries"])
            if max_entries < sink + window + 1:
                raise UserError(
                    f"kvpop: max_entries={max_entries} leaves no entry besides sinks and window: it must be at least "
                    f"{sink} + {window} + 1 = {sink + window + 1}"
                )
            values |= {"sink": np.array(sink, np.int32), "max_entries": max_entries}
            values["max_retained"] = np.array(max_entries - window, np.int32)
        assign(self, **values)

    def check(self, model: Any) -> None:
        check_made_for(self.scorers.sizes, model)

    @property
    def delay(self) -> int:
        """The number of later tokens after which a token's score is known."""
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
        streams = self.scorers.streams(step.k, step.v).without_padding(real)
        queries = streams.q if step.earlier is None else self.scorers.queries(*step.earlier)
        score, state = self.scorers.score(queries, streams, state)
        position = step.position - self.delay
        return state, self.priority(score, position), self.delay

    def priority(self, score: Float[Array, "b k t"], position: Int[Array, "b t"]) -> Float[Array, "b k t"]:
        """Return the priorities of tokens at these positions: their scores as seen from position 0, which do not depend
        on the query. Sinks have the highest priority."""
        return jnp.where(position[:, None] < self.sink, jnp.inf, self.decayed(score, position))

    def decayed(self, score: Float[Array, "b k t"], position: Int[Array, "b t"]) -> Float[Array, "b k t"]:
        """Return the scores of tokens at these positions as seen from position 0. With `decay` scores fall with age.
        The order of two tokens is the same for every query."""
        if not self.decay:
            return score
        assert self.age is not None
        age = (position[:, None] // self.age).astype(jnp.float32)
        return score - self.scorers.log_gamma()[:, None] * age

    def keep(self) -> Keep:
        return Keep(-np.inf, self.max_retained)
