"""Several evictions that share one reading of the contexts."""

from collections.abc import Iterator, Mapping

from jaxtyping import Array, Float, Int, Shaped

from kvjax.cache import SCALE
from kvjax.policies.base import Eviction, Metadata, Numbers, Observations, Observer, State, TokenMetadata
from kvjax.policies.eviction.wrapper import metadata_of
from kvjax.policies.views import Readout, Shape, Step, Stored
from kvjax.struct import struct


@struct
class JointEviction(TokenMetadata, Observer, Eviction):
    """The state, observation buffers and entry metadata of several methods, each kept separately."""

    methods: tuple[Eviction | None, ...]
    """The methods, without wrappers; None for a policy that evicts nothing."""

    @property
    def metadata(self) -> Mapping[str, str]:
        return {
            _prefixed(i, name): dtype
            for i, method in enumerate(self.methods)
            for name, dtype in metadata_of(method).items()
        }

    @property
    def _writers(self) -> Iterator[tuple[int, TokenMetadata]]:
        return ((i, method) for i, method in enumerate(self.methods) if isinstance(method, TokenMetadata))

    def init(self, shape: Shape) -> tuple[State, ...]:
        return tuple(method.init(shape) if isinstance(method, Observer) else () for method in self.methods)

    def observe(
        self, state: tuple[State, ...], step: Step, seen: Int[Array, " b"], valid: Int[Array, " b"]
    ) -> tuple[State, ...]:
        return tuple(
            method.observe(method_state, step, seen, valid) if isinstance(method, Observer) else method_state
            for method, method_state in zip(self.methods, state, strict=True)
        )

    def observations(self, shape: Shape) -> tuple[Observations, ...]:
        return tuple(
            method.observations(shape) if isinstance(method, Observer) else () for method in self.methods
        )

    def record(self, step: Step) -> tuple[Observations, ...]:
        return tuple(method.record(step) if isinstance(method, Observer) else () for method in self.methods)

    def numbers(self, state: tuple[State, ...], step: Step, readout: Readout) -> Numbers:
        return {
            _prefixed(i, name): x
            for i, method in self._writers
            for name, x in method.numbers(state[i], step, readout).items()
        }

    def update(self, state: tuple[State, ...], metadata: Metadata, step: Step, readout: Readout) -> Metadata:
        for i, method in self._writers:
            new = method.update(state[i], metadata_of_method(metadata, i), step, readout)
            metadata = metadata | {_prefixed(i, name): new[name] for name in method.metadata}
        return metadata

    def score(self, state: tuple[State, ...], stored: Stored) -> Float[Array, "b k s"]:
        raise TypeError("a joint reading has no score; each method scores its own copy")


def _prefixed(index: int, name: str) -> str:
    return f"{index} {name}"


def metadata_of_method(
    metadata: Mapping[str, Shaped[Array, "..."]], index: int
) -> dict[str, Shaped[Array, "..."]]:
    """Return the entry metadata of a method, by its original names, and the scales of int8 entries."""
    start = _prefixed(index, "")
    return {
        name.removeprefix(start): x for name, x in metadata.items() if name.startswith(start) or name == SCALE
    }
