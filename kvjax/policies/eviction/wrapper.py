"""Evictions that wrap another one and change its budget or its scores."""

from collections.abc import Mapping
from typing import Any

from jaxtyping import Array, Float

from kvjax.errors import UserError, shown
from kvjax.policies.base import MIXINS, EntryMetadata, Eviction, State
from kvjax.policies.budget import Shares
from kvjax.policies.schedule import Needs, Schedule
from kvjax.policies.trigger import Trigger
from kvjax.policies.views import Stored
from kvjax.struct import changed, struct, without_host_fields


@struct
class Wrapper(Eviction):
    """An eviction around another one. A subclass overrides functions that are defined here. The innermost
    eviction decides which tokens are observed and which metadata it has (`innermost`); a wrapper may add metadata
    (`entry_fields`)."""

    eviction: Eviction
    """The wrapped eviction."""

    def __post_init__(self):
        if not isinstance(self.eviction, Eviction):
            raise UserError(
                f"{type(self).__name__} wraps an eviction such as SnapKV(), got {shown(self.eviction)}"
            )

    def __init_subclass__(cls, **options: Any) -> None:
        """Raise TypeError if a subclass also derives from one of `MIXINS`, whose functions would never be called."""
        super().__init_subclass__(**options)
        if issubclass(cls, MIXINS):
            raise TypeError(f"{cls.__name__} must derive from Wrapper alone")

    @property
    def label(self) -> str:
        """The name as in a policy string: `snapkv:adakv`."""
        inner = self.eviction.label
        return f"{inner}{',' if ':' in inner else ':'}{super().label}"

    @property
    def traced(self) -> Any:
        """The wrapped eviction alone, unless this one has a score of its own."""
        inner = self.eviction.traced
        if type(self).score is Wrapper.score:
            return inner
        return changed(without_host_fields(self), eviction=inner)

    def check(self, model: Any) -> None:
        self.eviction.check(model)

    def score(self, state: State, stored: Stored) -> Float[Array, "b k s"]:
        return self.eviction.score(state, stored)

    @property
    def needs(self) -> Needs:
        return self.eviction.needs

    @property
    def shares(self) -> Shares:
        return self.eviction.shares

    @property
    def usual_trigger(self) -> Trigger:
        return self.eviction.usual_trigger

    @property
    def entry_fields(self) -> Mapping[str, str]:
        """The names and dtypes of the entry metadata, of the wrapped eviction and of this wrapper."""
        return metadata_of(self.eviction)

    def refusal(self, schedule: Schedule, stores_all: bool) -> str:
        return self.eviction.refusal(schedule, stores_all)


def innermost(eviction: Eviction | None) -> Eviction | None:
    """Return the eviction within all wrappers."""
    while isinstance(eviction, Wrapper):
        eviction = eviction.eviction
    return eviction


def with_innermost(eviction: Eviction, method: Eviction) -> Eviction:
    """Return the eviction with another one within its wrappers."""
    if not isinstance(eviction, Wrapper):
        return method
    return changed(eviction, eviction=with_innermost(eviction.eviction, method))


def metadata_of(eviction: Eviction | None) -> Mapping[str, str]:
    """Return the names and dtypes of an eviction's entry metadata."""
    if isinstance(eviction, Wrapper):
        return eviction.entry_fields
    return eviction.metadata if isinstance(eviction, EntryMetadata) else {}
