"""Evictions that hold another one and change a part of it."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.errors import UserError, shown
from kvjax.policies.budget import Shares
from kvjax.policies.interfaces import Eviction, Numbers, Pass, Planes, State, Trail
from kvjax.policies.schedule import Needs
from kvjax.policies.trigger import Trigger
from kvjax.policies.views import Passage, Readout, Shape, Step, Stored
from kvjax.struct import changed, struct


@struct
class Wrapper(Eviction):
    """Another eviction, which is asked for everything; compiled programs see that one alone."""

    eviction: Eviction
    """The other one."""

    def __post_init__(self):
        if not isinstance(self.eviction, Eviction):
            raise UserError(
                f"{type(self).__name__} is around an eviction such as SnapKV(), got {shown(self.eviction)}"
            )

    @property
    def label(self) -> str:
        """As in a policy string: `snapkv:adakv`."""
        inner = self.eviction.label
        return f"{inner}{',' if ':' in inner else ':'}{super().label}"

    def check(self, model: Any) -> None:
        self.eviction.check(model)

    @property
    def traced(self) -> Any:
        return self.eviction.traced

    @property
    def without_values(self) -> Eviction:
        return changed(self, eviction=self.eviction.without_values)

    @property
    def of_prompts(self) -> Eviction:
        return changed(self, eviction=self.eviction.of_prompts)

    @property
    def needs(self) -> Needs:
        return self.eviction.needs

    @property
    def shares(self) -> Shares:
        return self.eviction.shares

    def guided(self, tokens: int) -> Eviction | None:
        inner = self.eviction.guided(tokens)
        return None if inner is None else changed(self, eviction=inner)

    @property
    def usual_trigger(self) -> Trigger:
        return self.eviction.usual_trigger

    def refuses_trigger(self, trigger: Trigger) -> str:
        return self.eviction.refuses_trigger(trigger)

    @property
    def refuses_threshold(self) -> str:
        return self.eviction.refuses_threshold

    @property
    def refuses_admission(self) -> str:
        return self.eviction.refuses_admission

    @property
    def looks(self) -> bool:
        return self.eviction.looks

    @property
    def planes(self) -> Mapping[str, str]:
        return self.eviction.planes

    def init(self, shape: Shape) -> State:
        return self.eviction.init(shape)

    def bias(self, state: State, step: Step) -> Float[Array, "b k t"]:
        return self.eviction.bias(state, step)

    def numbers(self, state: State, step: Step, readout: Readout) -> Numbers:
        return self.eviction.numbers(state, step, readout)

    def update(self, state: State, planes: Planes, step: Step, readout: Readout) -> Planes:
        return self.eviction.update(state, planes, step, readout)

    def observe(self, state: State, step: Step, seen: Int[Array, " b"], valid: Int[Array, " b"]) -> State:
        return self.eviction.observe(state, step, seen, valid)

    def trail(self, shape: Shape) -> Trail:
        return self.eviction.trail(shape)

    def trace(self, step: Step) -> Trail:
        return self.eviction.trace(step)

    @property
    def updates(self) -> bool:
        return self.eviction.updates

    @property
    def pending(self) -> int:
        return self.eviction.pending

    def late(self, trail: Trail) -> Numbers:
        return self.eviction.late(trail)

    def passes(self, row: Int[np.ndarray, " _"]) -> Sequence[Pass]:
        return self.eviction.passes(row)

    def prefix_of(self, row: Int[np.ndarray, " _"]) -> int:
        return self.eviction.prefix_of(row)

    def reread(self, step: Step, passage: Passage) -> Numbers:
        return self.eviction.reread(step, passage)

    @property
    def rereads(self) -> bool:
        return self.eviction.rereads

    def score(self, state: State, stored: Stored) -> Float[Array, "b k s"]:
        return self.eviction.score(state, stored)
