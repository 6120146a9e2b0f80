"""A policy: the window and the methods that decide what is stored, as one pytree."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvjax.errors import UserError, shown, whole_number
from kvjax.mesh import put
from kvjax.policies.interfaces import BIAS, Admission, Eviction, Numbers, Planes, Selection, State
from kvjax.policies.plan import Plan
from kvjax.step import Attended, Step
from kvjax.struct import static, struct


@struct
class States:
    """The memories of a policy's methods."""

    admission: State
    eviction: State


@struct
class Policy:
    """What a model keeps of its context: the last `window` tokens, and what `admission` lets into the global region
    until `eviction` has it go, when and to what size `plan` says.

    A query at position i sees exactly the tokens j ≤ i with i − j < window or j admitted and not evicted; in decoding
    only those of them in the pages that `selection` chooses for it. Once it is `placed`, every array in it has a
    leading layer axis.
    """

    admission: Admission
    name: str = static()
    window: int = static()
    eviction: Eviction | None = None
    plan: Plan | None = static(default=None)
    selection: Selection | None = None

    def __post_init__(self):
        if self.admission.keep().capacity is None:
            return
        for what, other in (("an eviction", self.eviction), ("a selection of pages", self.selection)):
            if other is not None:
                raise UserError(
                    f"{self.name}: an admission with a capacity keeps its entries in no order, and {what} needs them "
                    "in order of position"
                )
        if type(self.admission).update is not Admission.update:
            raise UserError(
                f"{self.name}: an admission with a capacity cannot update its numbers, whose entries change places"
            )

    def placed(self, layers: int, kv_heads: int) -> "Policy":
        """For a model of so many layers and kv heads, on the current mesh: what the methods left as NumPy arrays gets
        a layer axis, tables are split with the heads.

        Raises UserError for a table that is another model's.
        """

        def place(x: Any) -> jax.Array:
            if isinstance(x, jax.Array):
                return x
            if x.ndim < 2:
                return put(np.broadcast_to(x, (layers, *x.shape)))
            if x.shape[:2] not in ((1, 1), (layers, kv_heads)):
                made_for = f"{x.shape[0]} layers × {x.shape[1]} kv heads"
                raise UserError(
                    f"policy {self.name} is made for {made_for}, the model has {layers} × {kv_heads}"
                )
            return put(np.broadcast_to(x, (layers, kv_heads, *x.shape[2:])), None, "tensor")

        return jax.tree.map(place, self)

    @property
    def traced(self) -> "Policy":
        """What compiled programs see: no budget and no name, so that one program serves all that run alike."""
        return dataclasses.replace(self, name="", plan=None)

    @property
    def continuing(self) -> "Policy":
        """What goes on once the prompt was read: where nothing will be compacted any more, no method that looks at
        tokens for it."""
        if self.plan is not None and self.plan.schedule.while_decoding:
            return self
        return dataclasses.replace(self, eviction=None, plan=None)

    @property
    def reading(self) -> "Policy":
        """What compiled programs see of it that read a prompt: selection is for decoding, however a prompt is cut, and
        an eviction that looks at no tokens has no part in it."""
        eviction = self.eviction if self.eviction is not None and self.eviction.looks else None
        return dataclasses.replace(self.traced, selection=None, eviction=eviction)

    def init(self, batch: int, heads: int) -> States:
        """The methods' memories of one layer before the first token, on one device."""
        evicting = () if self.eviction is None else self.eviction.init(batch, heads)
        return States(self.admission.init(batch, heads), evicting)

    @property
    def planes(self) -> dict[str, str]:
        """The methods' numbers beside entries: names and dtypes."""
        return dict(self.admission.planes) | dict({} if self.eviction is None else self.eviction.planes)

    @property
    def most_stored(self) -> int | None:
        """The most entries of a row's global region; None: there is no capacity. Outside jit."""
        capacity = self.admission.keep().capacity
        return None if capacity is None else int(np.asarray(capacity).max())

    def bias(self, states: States, step: Step) -> Float[Array, "b k t"]:
        """What is added to the logits of a call's tokens once they have left the ring."""
        for method, state in ((self.admission, states.admission), (self.eviction, states.eviction)):
            if method is not None and BIAS in method.planes:
                return method.bias(state, step)
        return jnp.zeros(step.k.shape[:3], jnp.float32)

    def numbers(self, states: States, step: Step, attended: Attended) -> Numbers:
        """The planes' numbers of a call's own tokens."""
        found = self.admission.numbers(states.admission, step, attended)
        return (
            found if self.eviction is None else found | self.eviction.numbers(states.eviction, step, attended)
        )

    def update(self, states: States, planes: Planes, step: Step, attended: Attended) -> Planes:
        """The planes once a call's queries have read the entries that were stored before it."""
        planes = self.admission.update(states.admission, planes, step, attended)
        return (
            planes if self.eviction is None else self.eviction.update(states.eviction, planes, step, attended)
        )

    def expected_entries(self, tokens: int, entry_bytes: int) -> Float[np.ndarray, "#l #k"]:
        """The most entries expected at one time while `tokens` tokens are read, ring included, by layer and kv head.
        `entry_bytes`: one token's key and value in all layers and heads."""
        ring = min(tokens, self.window - 1)
        stored = np.minimum(self.admission.admitted(tokens - ring), tokens - ring)
        stored = stored if self.most_stored is None else np.minimum(stored, self.most_stored)
        return ring + (
            stored if self.plan is None else np.minimum(stored, self.plan.most(tokens, entry_bytes))
        )


NO_TABLE: np.ndarray = np.zeros(0)


def head_table(
    policy: str, name: str, value: Any, layers: int | None, kv_heads: int | None, *, shares: bool = True
) -> Float[np.ndarray, "l k"]:
    """The table of heads that `value` is: of finite numbers, from 0 to 1 if they are `shares`, and of this model."""
    try:
        given = np.asarray(value)
        table = given.astype(np.float64) if given.dtype.kind not in "SU" else NO_TABLE
    except (TypeError, ValueError):
        table = NO_TABLE
    outside = ~np.isfinite(table) | (shares & ((table < 0) | (table > 1)))
    if table.ndim != 2 or table.size == 0 or outside.any():
        numbers = "numbers from 0 to 1" if shares else "finite numbers"
        raise UserError(f"{policy}: {name} must be {numbers}, layers × kv heads of them, got {shown(value)}")
    wanted = zip(("layers", "kv_heads"), (layers, kv_heads), table.shape, strict=True)
    shape = tuple(size if own is None else whole_number(policy, what, own) for what, own, size in wanted)
    if table.shape != shape:
        made_for = f"made for {table.shape[0]} layers × {table.shape[1]} kv heads"
        raise UserError(f"{policy}: {name} {made_for}, the model has {shape[0]} × {shape[1]}")
    return table
