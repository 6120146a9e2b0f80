"""Evictions that hold another one and change a part of it."""

from collections.abc import Mapping
from typing import Any

from jaxtyping import Array, Float, Int

from kvjax.errors import UserError, shown
from kvjax.policies.budget import Shares
from kvjax.policies.interfaces import Eviction, Needs, Numbers, Planes, State
from kvjax.step import Attended, Shape, Step, Stored
from kvjax.struct import changed, struct


@struct
class Wrapped(Eviction):
    """Another eviction, which is asked for everything; compiled programs see that one alone."""

    eviction: Eviction

    def __post_init__(self):
        if not isinstance(self.eviction, Eviction):
            raise UserError(
                f"{type(self).__name__} is around an eviction such as SnapKV(), got {shown(self.eviction)}"
            )

    @property
    def label(self) -> str:
        return self.name or self.eviction.label

    def check(self, model: Any) -> None:
        self.eviction.check(model)

    @property
    def traced(self) -> Any:
        return self.eviction.traced

    @property
    def unweighed(self) -> Eviction:
        return changed(self, eviction=self.eviction.unweighed)

    @property
    def needs(self) -> Needs:
        return self.eviction.needs

    @property
    def shares(self) -> Shares:
        return self.eviction.shares

    @property
    def places(self) -> str:
        return self.eviction.places

    @property
    def alone(self) -> str:
        return self.eviction.alone

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

    def numbers(self, state: State, step: Step, attended: Attended) -> Numbers:
        return self.eviction.numbers(state, step, attended)

    def update(self, state: State, planes: Planes, step: Step, attended: Attended) -> Planes:
        return self.eviction.update(state, planes, step, attended)

    def observe(self, state: State, step: Step, seen: Int[Array, " b"], valid: Int[Array, " b"]) -> State:
        return self.eviction.observe(state, step, seen, valid)

    def score(self, state: State, stored: Stored) -> Float[Array, "b k s"]:
        return self.eviction.score(state, stored)
