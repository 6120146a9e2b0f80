"""Evictions that look at the same prompts: one reading serves all of them."""

from jaxtyping import Array, Float, Int

from kvjax.policies.interfaces import Eviction, State
from kvjax.step import Step, Stored
from kvjax.struct import struct


@struct
class Together:
    """The memories of several methods side by side; `None` stands for a policy that evicts nothing."""

    methods: tuple[Eviction | None, ...]

    def init(self, batch: int) -> tuple[State, ...]:
        return tuple(() if method is None else method.init(batch) for method in self.methods)

    def observe(
        self, state: tuple[State, ...], step: Step, seen: Int[Array, " b"], valid: Int[Array, " b"]
    ) -> tuple[State, ...]:
        return tuple(
            own if method is None else method.observe(own, step, seen, valid)
            for method, own in zip(self.methods, state, strict=True)
        )

    def score(self, state: tuple[State, ...], stored: Stored) -> Float[Array, "b k s"]:
        raise TypeError("what is read together is scored by each method for itself")
