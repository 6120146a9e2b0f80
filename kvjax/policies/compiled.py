"""A policy compiled for a model: what compiled programs see of it, and what the host reads."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import reshard
from jaxtyping import Array, Float, Int, Shaped

from kvjax.errors import UserError, shown
from kvjax.mesh import HEADS, P, adopt, put
from kvjax.policies.admission.full import Full
from kvjax.policies.base import (
    BIAS,
    Admission,
    Eviction,
    LateMetadata,
    Metadata,
    Numbers,
    Observations,
    Observer,
    Selection,
    State,
    TokenMetadata,
)
from kvjax.policies.eviction.wrapper import innermost, metadata_of, with_innermost
from kvjax.policies.numbers import is_placed
from kvjax.policies.views import Readout, Shape, Step
from kvjax.struct import static, struct

if TYPE_CHECKING:
    from kvjax.policies.policy import Policy


@struct
class States:
    """The memories of a policy's methods."""

    admission: State
    eviction: State
    """The eviction's memory; () if no eviction observes tokens, or no compaction follows."""


@struct
class View:
    """The methods of a policy as compiled programs see them while tokens run. Every array has a leading layer axis, and
    nothing in it is for the host alone, so that policies with different budgets share their programs."""

    admission: Admission
    eviction: Eviction | None
    """The eviction; None if no later compaction needs it to observe these tokens."""
    selection: Selection | None
    window: int = static()

    @property
    def stores_all(self) -> bool:
        """True if every token is stored for good as it comes (`stores_every_token`)."""
        return stores_every_token(self.admission, self.window)

    @property
    def observer(self) -> Observer | None:
        """The eviction that looks at tokens as they come."""
        method = innermost(self.eviction)
        return method if isinstance(method, Observer) else None

    @property
    def _writer(self) -> TokenMetadata | None:
        """The eviction that writes entry metadata as tokens come."""
        method = innermost(self.eviction)
        return method if isinstance(method, TokenMetadata) else None

    def init(self, shape: Shape) -> States:
        """Return the methods' memories of one layer before the first token, on one device."""
        eviction = () if self.observer is None else self.observer.init(shape)
        return States(self.admission.init(shape), eviction)

    def observations(self, shape: Shape) -> Observations:
        """Return one layer's observation buffer before the first token, on one device. Raises ValueError if it is not
        in the model's dtype."""
        if self.observer is None:
            return ()
        buffer = self.observer.observations(shape)
        for x in jax.tree.leaves(buffer):
            if x.dtype != shape.dtype:
                method = type(self.observer).__name__
                raise ValueError(
                    f"{method}.observations: must be in the model's dtype {shape.dtype}, is {x.dtype}"
                )
        return buffer

    def memories(self, shape: Shape, layers: int) -> tuple[States, Observations]:
        """Return the memories `[l b …]` and the observation buffer `[b w l …]` of all layers."""
        of_layer = jax.vmap(lambda view, _: (view.init(shape), view.observations(shape)), out_axes=(0, 2))
        return of_layer(self, jnp.arange(layers))

    def memory_shapes(self, shape: Shape, layers: int) -> tuple[States, Observations]:
        """Return the shapes of `memories` for as many KV heads as `shape` has."""

        def with_all_heads(x: jax.Array) -> jax.ShapeDtypeStruct:
            axes = itertools.zip_longest(x.shape, jax.typeof(x).sharding.spec)
            sizes = (shape.kv_heads if axis == HEADS else size for size, axis in axes)
            return jax.ShapeDtypeStruct(tuple(sizes), x.dtype)

        return jax.eval_shape(lambda view: view.memories(shape, layers), jax.tree.map(with_all_heads, self))

    @property
    def metadata(self) -> dict[str, str]:
        """Names and dtypes of the entry metadata."""
        return {**self.admission.metadata, **metadata_of(self.eviction)}

    def bias(self, states: States, step: Step) -> Float[Array, "b k t"]:
        """Return the bias of the logits of a call's tokens once they have left the local window."""
        for method, state in ((self.admission, states.admission), (self._writer, states.eviction)):
            if method is not None and BIAS in method.metadata:
                return method.bias(state, step)
        return jnp.zeros(step.k.shape[:3], jnp.float32)

    def numbers(self, states: States, step: Step, readout: Readout) -> Numbers:
        """Return the entry metadata of a call's own tokens."""
        numbers = self.admission.numbers(states.admission, step, readout)
        if self._writer is None:
            return numbers
        return numbers | self._writer.numbers(states.eviction, step, readout)

    def update(self, states: States, metadata: Metadata, step: Step, readout: Readout) -> Metadata:
        """Return the entry metadata once a call's queries have read the entries that were stored before it."""
        metadata = self.admission.update(states.admission, metadata, step, readout)
        if self._writer is None:
            return metadata
        return self._writer.update(states.eviction, metadata, step, readout)


@dataclass(frozen=True)
class CompiledPolicy:
    """A policy on a model's mesh, in the views that inference needs. `Policy.compile` makes it."""

    host: Policy
    """The numbers that only the host reads: the schedule, bounds and names."""
    read: View
    """Prefill: every token is stored or observed as the compaction at the prompt's end needs it."""
    extend: View
    """A question after a context. If no compaction follows, nothing observes the tokens."""
    decode: View
    """Single tokens, which read the pages that the selection chooses."""
    compact: Eviction | None
    """The method that scores entries; None if nothing is compacted."""


def compile_policy(
    policy: Policy, layers: int, kv_heads: int, head_order: tuple[tuple[int, ...], ...] | None = None
) -> CompiledPolicy:
    """Return the views of a policy for a model of so many layers and KV heads, on the current mesh. Raises UserError as
    `on_mesh` does."""
    host = on_mesh(policy, layers, kv_heads, head_order)
    eviction = host.eviction
    if eviction is not None:
        method = innermost(eviction)
        if isinstance(method, LateMetadata) and host.schedule is not None and not host.compacts_answers:
            eviction = with_innermost(eviction, method.for_prompts)
        eviction = eviction.traced
    while_decoding = eviction if host.compacts_answers else None

    def view(eviction: Eviction | None, selection: Selection | None = None) -> View:
        return View(host.admission.traced, eviction, selection, host.window)

    read, extend = (view(x if observes_tokens(x) else None) for x in (eviction, while_decoding))
    return CompiledPolicy(host, read, extend, view(while_decoding, host.selection), eviction)


def stores_every_token(admission: Admission, window: int) -> bool:
    """Return True if every token is stored for good as it comes: all are admitted, and there is no local window."""
    return isinstance(admission, Full) and window == 1


def observes_tokens(eviction: Eviction | None) -> bool:
    """Return True if an eviction looks at tokens as they come, and not only at stored entries."""
    return isinstance(innermost(eviction), Observer | TokenMetadata)


def on_mesh(
    policy: Any, layers: int, kv_heads: int, head_order: tuple[tuple[int, ...], ...] | None = None
) -> Any:
    """Return a policy, or a method, whose arrays are on the current mesh, for a model of so many layers and KV heads.
    Numbers get a layer axis, and tables are split with the heads. `head_order` is that of `ModelConfig`.

    Raises UserError for a table of another model and for a value that is not a number.
    """

    def place(path: Any, given: Any) -> jax.Array:
        if is_placed(given):
            given = given if isinstance(given, Tracer) else adopt(given)
            return given if order is None or not is_split_by_head(given) else _reordered(given, order)
        x, name = np.asarray(given), path[-1].name
        if x.dtype.kind in "OSU":
            raise UserError(
                f"policy {policy.name}: {name} must be a number or an array of numbers, or be declared static, got "
                f"{shown(given)}"
            )
        if x.ndim < 2:
            return put(np.broadcast_to(x, (layers, *x.shape)))
        if x.shape[:2] not in ((1, 1), (layers, kv_heads)):
            if isinstance(given, jax.Array) and x.shape[0] == layers:
                return put(x)  # an array of a module, shared by a layer's heads
            raise UserError(
                f"policy {policy.name}: {name} is made for {x.shape[0]} layers × {x.shape[1]} kv heads, the model has "
                f"{layers} × {kv_heads}"
            )
        x = np.broadcast_to(x, (layers, kv_heads, *x.shape[2:]))
        return put(x if order is None else x[np.arange(layers)[:, None], order], None, HEADS)

    order = None if head_order is None else np.array(head_order, np.int32)
    return jax.tree_util.tree_map_with_path(place, policy)


def is_split_by_head(x: jax.Array) -> bool:
    """Return True if an array on a mesh has a layer axis and then one of KV heads, which the mesh splits."""
    spec = [*jax.typeof(x).sharding.spec, None, None]
    return spec[1] == HEADS


@jax.jit
def _reordered(x: Shaped[Array, "l k ..."], order: Int[Array, "l k"]) -> Shaped[Array, "l k ..."]:
    """Return an array by head with the KV heads in another order."""
    reordered = reshard(x, P())[jnp.arange(len(order))[:, None], order]
    return reshard(reordered, jax.typeof(x).sharding.spec)
